"""What an answer of `/v1/messages` consists of: its blocks, and the events that tell of them.

Each block is told from its beginning to its end before the next begins: what the model thinks, what
it says, and each function that it calls. Knows nothing of sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mesh.api.faults import ANTHROPIC, error_body
from mesh.api.openai.answers import diagnostic, extension
from mesh.api.typed_events import Event
from mesh.errors import MeshError
from mesh.models.written_calls import object_in
from mesh.types import Done, PromptPiece, StreamFrame, TokenDelta, ToolCallDelta

_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""By the type of a block: that of more of it, and the field that has it."""


class _Block:
    """A block of the answer, as far as it has come."""

    def __init__(self, index: int, begins: dict[str, Any]) -> None:
        """`begins` is the block with nothing in it."""
        self._begins = begins
        self._index = index
        self._pieces: list[str] = []

    @property
    def kind(self) -> str:
        """``text``, ``thinking`` or ``tool_use``."""
        return str(self._begins["type"])

    def whole(self) -> dict[str, Any]:
        """The block with all that has come."""
        text = "".join(self._pieces)
        if self.kind == "tool_use":
            return {**self._begins, "input": object_in(text or "{}") or {}}
        return {**self._begins, self.kind: text}

    def begin(self) -> Event:
        """It is there."""
        start = {"index": self._index, "content_block": self._begins}
        return {"type": "content_block_start", **start}

    def more(self, text: str) -> Event:
        """It goes on with this."""
        self._pieces.append(text)
        kind, field = _DELTAS[self.kind]
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def end(self) -> Event:
        """It is over."""
        return {"type": "content_block_stop", "index": self._index}


class MessageWriter:
    """Writes one answer, frame by frame: its events, and the answer itself."""

    def __init__(
        self, message_id: str, model: str, max_tokens: int, *, tells_thoughts: bool = True
    ) -> None:
        """`tells_thoughts`: what the model thinks is told, not only that it does."""
        self._id = message_id
        self._model = model
        self._max_tokens = max_tokens
        self._tells_thoughts = tells_thoughts
        self._blocks: list[dict[str, Any]] = []
        self._open: _Block | None = None
        self._is_begun = False
        self.answer: dict[str, Any] = {}
        """The whole message, once it has ended."""

    def take(self, frame: StreamFrame) -> list[Event]:
        """The events of a frame."""
        if isinstance(frame, TokenDelta):
            return [*self._begin(frame.prompt_tokens), *self._go_on(frame)]
        if isinstance(frame, Done):
            return [*self._begin(frame.prompt_tokens), *self._end(frame)]
        if isinstance(frame, PromptPiece):  # a conversation is not given back
            return []
        return [{"type": "ping", "hearthnet": diagnostic(frame)}]

    def fail(self, error: MeshError) -> list[Event]:
        """The event that ends an answer so."""
        return [error_body(error, ANTHROPIC)]

    def _begin(self, prompt_tokens: int) -> list[Event]:
        """The message is there, with nothing in it."""
        if self._is_begun:
            return []
        self._is_begun = True
        usage = _usage(prompt_tokens, cached=0, output=0)
        return [{"type": "message_start", "message": self._message([], None, None, usage)}]

    def _go_on(self, delta: TokenDelta) -> list[Event]:
        events: list[Event] = []
        # What is left of the call under way comes before what is said behind it.
        calls = delta.tool_calls
        fresh = next((n for n, news in enumerate(calls) if news.id), len(calls))
        for news in calls[:fresh]:
            events += self._call(news)
        if delta.reasoning:
            events += self._say("thinking", delta.reasoning, signature="")
        if delta.text:
            events += self._say("text", delta.text)
        for news in calls[fresh:]:
            events += self._call(news)
        return events

    def _say(self, kind: str, text: str, **besides: Any) -> list[Event]:
        """More of the block of this kind that is under way, or of one that begins."""
        block, begun = self._open, list[Event]()
        if block is None or block.kind != kind:
            block, begun = self._next({"type": kind, kind: "", **besides})
        if kind == "thinking" and not self._tells_thoughts:
            return begun
        return [*begun, block.more(text)]

    def _call(self, news: ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        if news.id:
            call = {"id": news.id, "name": news.name, "input": {}}
            events = self._next({"type": "tool_use", **call})[1]
        if news.arguments and self._open is not None:
            events.append(self._open.more(news.arguments))
        return events

    def _next(self, begins: dict[str, Any]) -> tuple[_Block, list[Event]]:
        """The next block, behind the one that is under way."""
        ended = self._close()
        block = self._open = _Block(len(self._blocks), begins)
        return block, [*ended, block.begin()]

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        block, self._open = self._open, None
        self._blocks.append(block.whole())
        return [block.end()]

    def _end(self, done: Done) -> list[Event]:
        events, reason, ran = self._close(), self._reason(done), extension([done])
        stopped_by = done.stopped_by or None
        cached, output = done.cached_tokens, done.completion_tokens
        usage = _usage(done.prompt_tokens, cached=cached, output=output)
        message = self._message(self._blocks, reason, stopped_by, usage)
        self.answer = {**message, "hearthnet": ran}
        delta = {"stop_reason": reason, "stop_sequence": stopped_by}
        ending = {"type": "message_delta", "delta": delta, "usage": usage, "hearthnet": ran}
        return [*events, ending, {"type": "message_stop"}]

    def _reason(self, done: Done) -> str:
        if done.stopped_by:
            return "stop_sequence"
        if done.finish_reason != "length":
            return _REASONS[done.finish_reason]
        is_full = done.completion_tokens < self._max_tokens
        return "model_context_window_exceeded" if is_full else "max_tokens"

    def _message(
        self,
        content: Sequence[dict[str, Any]],
        reason: str | None,
        stopped_by: str | None,
        usage: dict[str, int],
    ) -> dict[str, Any]:
        said = {"role": "assistant", "content": list(content), "stop_reason": reason}
        who = {"id": self._id, "type": "message", "model": self._model}
        return {**who, **said, "stop_sequence": stopped_by, "usage": usage}


def _usage(prompt: int, *, cached: int, output: int) -> dict[str, int]:
    """Of the prompt, what was computed and what a cache had are counted apart."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }
