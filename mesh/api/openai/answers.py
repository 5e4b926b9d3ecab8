"""The parts that every OpenAI answer is made of, from the frames of a generation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mesh.types import (
    BringingUp,
    Done,
    Queued,
    ShardFailover,
    ShardStatus,
    StreamFrame,
    TokenDelta,
    TokenLogprob,
)
from mesh.types import PipelineAborted as Aborted

Diagnostic = Queued | BringingUp | ShardStatus | ShardFailover | Aborted
"""A frame that says nothing of the answer: what happens to its route."""

_LOWEST_LOGPROB = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON does not have."""


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that all objects of one answer repeat; and how many choices a prompt has, one
    behind the other."""

    id: str
    object: str
    model: str
    per_prompt: int = 1
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The object with these choices."""
        # One for each token: `asdict` would take longer than all else that is done for it here.
        return {
            "id": self.id,
            "object": self.object,
            "model": self.model,
            "created": self.created,
            "choices": choices,
        }


class ThoughtTokens:
    """Counts the tokens of one answer that the model thought with."""

    def __init__(self) -> None:
        self.count = 0
        self._unshown = 0

    def take(self, frame: StreamFrame) -> None:
        """Count a frame."""
        if not isinstance(frame, TokenDelta):
            return
        self._unshown += len(frame.token_ids)
        if frame.reasoning and not frame.text:
            self.count += self._unshown
        if frame.reasoning or frame.text or frame.tool_calls:
            self._unshown = 0  # a mark, or half a character, belongs to what follows it


def usage(all_done: Sequence[Done], thought_tokens: int, per_prompt: int = 1) -> dict[str, Any]:
    """OpenAI's token counts, of all choices together; of a prompt once, with `per_prompt` of
    them."""
    firsts = all_done[::per_prompt]
    prompt_tokens = sum(done.prompt_tokens for done in firsts)
    completion_tokens = sum(done.completion_tokens for done in all_done)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(done.cached_tokens for done in firsts)},
        "completion_tokens_details": {"reasoning_tokens": thought_tokens},
    }


def extension(all_done: Sequence[Done]) -> dict[str, Any]:
    """The `hearthnet` object: what ran where and how fast; of several choices each one's, in the
    list `choices`."""
    if len(all_done) > 1:
        return {"choices": [_ran(done) for done in all_done]}
    return _ran(all_done[0])


def _ran(done: Done) -> dict[str, Any]:
    return {
        "token_ids": list(done.token_ids),
        "route": [
            {
                "shard_id": hop.shard.shard_id,
                "node": hop.shard.node_name,
                "layers": str(hop.layers),
            }
            for hop in done.route
        ],
        "failovers": done.failovers,
        "fallback": done.fallback,
        **({"note": done.note} if done.note else {}),
        **({"left_out_messages": done.left_out} if done.left_out else {}),
        "timings": {
            "first_token_ms": _finite(done.first_token_ms),
            "tokens_per_second": _finite(done.tokens_per_second),
            "drafted_tokens": done.drafted_tokens,
            "accepted_tokens": done.accepted_tokens,
            "hops": [
                {key: _finite(value) for key, value in asdict(hop).items()} for hop in done.hops
            ],
        },
    }


def diagnostic(frame: Diagnostic) -> dict[str, Any]:
    """The `hearthnet` object of a chunk that reports what happens to the route."""
    return {"event": asdict(frame)}


def chat_logprobs(entries: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""
    return {
        "content": [
            {
                **_chat_entry(entry.token, entry.logprob),
                "top_logprobs": [_chat_entry(token, value) for _, token, value in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(
    entries: Sequence[TokenLogprob], offsets: Iterable[int]
) -> dict[str, list[Any]]:
    """The `logprobs` of a completion choice whose tokens begin at these characters of its text."""
    return {
        "tokens": [_spelled(entry.token) for entry in entries],
        "token_logprobs": [_logprob(entry.logprob) for entry in entries],
        "top_logprobs": [
            None
            if entry.logprob is None
            else {_spelled(token): _logprob(value) for _, token, value in entry.top}
            | {_spelled(entry.token): _logprob(entry.logprob)}
            for entry in entries
        ],
        "text_offset": list(offsets),
    }


def _spelled(token: bytes) -> str:
    """A token as a key: halves of different characters differ, as OpenAI has it."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _chat_entry(token: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": _shown(token), "logprob": _logprob(logprob), "bytes": list(token)}


def _shown(token: bytes) -> str:
    return token.decode(errors="replace")


def _logprob(value: float | None) -> float | None:
    if value is None:
        return None
    return value if value > _LOWEST_LOGPROB else _LOWEST_LOGPROB


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
