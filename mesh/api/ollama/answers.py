"""The parts that Ollama's answers are made of, from the frames of a generation."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime
from typing import Any, Protocol

from mesh.api.ollama.messages import whole_calls
from mesh.api.openai.answers import chat_logprobs
from mesh.types import Done, StreamFrame, TokenDelta

_NS_PER_MS = 1e6
_REASONS = {"tool_calls": "stop"}


class Wording(Protocol):
    """One endpoint's way to say what is new."""

    def __call__(self, delta: TokenDelta) -> dict[str, Any]:
        """The fields for more text, reasoning or calls."""


def in_message(delta: TokenDelta) -> dict[str, Any]:
    """What `/api/chat` says: a message, or more of one."""
    said: dict[str, Any] = {"role": "assistant", "content": delta.text, **_thinking(delta)}
    if delta.tool_calls:
        said["tool_calls"] = whole_calls(delta.tool_calls)
    return {"message": said, **_logprobs(delta)}


def in_text(delta: TokenDelta) -> dict[str, Any]:
    """What `/api/generate` says: a text, or more of one."""
    return {"response": delta.text, **_thinking(delta), **_logprobs(delta)}


def head(model: str) -> dict[str, Any]:
    """The fields that every object begins with; `model` as the client calls it."""
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    return {"model": model, "created_at": now.replace("+00:00", "Z")}


class Stopwatch:
    """What the parts of one answer took. Made when the request has come; takes every frame."""

    def __init__(self) -> None:
        self._began_ns = time.perf_counter_ns()
        self._first_ns: int | None = None
        self._prompt_ns: int | None = None

    def take(self, frame: StreamFrame) -> None:
        """Note when the first token came, and what computing the prompt before it took."""
        if self._first_ns is None and isinstance(frame, TokenDelta):
            self._first_ns = time.perf_counter_ns()
        if self._prompt_ns is None and isinstance(frame, Done):
            prompt_ms = frame.first_token_ms - frame.construct_ms
            self._prompt_ns = round(prompt_ms * _NS_PER_MS) if math.isfinite(prompt_ms) else 0

    def durations(self) -> dict[str, int]:
        """Nanoseconds: `total_duration` of all, `eval_duration` from the first token to the end,
        and before that `prompt_eval_duration`, of computing the prompt. `load_duration` is what is
        left in front: until the model was up, there was room on a route and the text was tokens.
        """
        now_ns = time.perf_counter_ns()
        first_ns = now_ns if self._first_ns is None else self._first_ns
        until_first_ns = first_ns - self._began_ns
        prompt_ns = min(max(self._prompt_ns or 0, 0), until_first_ns)
        return {
            "total_duration": now_ns - self._began_ns,
            "load_duration": until_first_ns - prompt_ns,
            "prompt_eval_duration": prompt_ns,
            "eval_duration": now_ns - first_ns,
        }

    def last(self, done: Done) -> dict[str, Any]:
        """The fields that the last object ends with."""
        return {
            "done": True,
            "done_reason": _REASONS.get(done.finish_reason, done.finish_reason),
            "prompt_eval_count": done.prompt_tokens,
            "eval_count": done.completion_tokens,
            **self.durations(),
        }


def _thinking(delta: TokenDelta) -> dict[str, str]:
    return {"thinking": delta.reasoning} if delta.reasoning else {}


def _logprobs(delta: TokenDelta) -> dict[str, Any]:
    return {"logprobs": chat_logprobs(delta.logprobs)["content"]} if delta.logprobs else {}
