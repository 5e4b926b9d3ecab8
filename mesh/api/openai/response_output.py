"""What an answer of `/v1/responses` consists of: its items, and the events that tell of them.

Each item is told from its beginning to its end before the next begins: what the model thinks, what
it says, and each function that it calls. What a model thinks is the summary of its reasoning, which
is what clients of this API show of it. Knows nothing of sockets.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from mesh.api.faults import error_body
from mesh.api.openai.answers import ThoughtTokens, chat_logprobs, diagnostic, extension
from mesh.api.typed_events import Event
from mesh.errors import MeshError
from mesh.types import Done, PromptPiece, StreamFrame, TokenDelta, TokenLogprob, ToolCallDelta

_DONE, _CUT, _UNDER_WAY = "completed", "incomplete", "in_progress"


class _Item(ABC):
    """An item of the output, as far as it has come."""

    prefix: ClassVar[str]
    delta: ClassVar[str]
    """The type of the event with more of it."""

    def __init__(self, index: int) -> None:
        self.id = f"{self.prefix}_{secrets.token_hex(16)}"
        self._index = index
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All of it that has come."""
        return "".join(self._pieces)

    @abstractmethod
    def whole(self, status: str) -> dict[str, Any]:
        """The item, which is under way or has ended so."""

    @abstractmethod
    def opened(self) -> list[Event]:
        """The events behind that of an item that was added."""

    @abstractmethod
    def closed(self) -> list[Event]:
        """The events before that of an item that is done."""

    def begin(self) -> list[Event]:
        """The item is there, with nothing in it."""
        return [self._told("response.output_item.added", self.whole(_UNDER_WAY)), *self.opened()]

    def more(self, text: str, **besides: Any) -> Event:
        """The item goes on with this."""
        self._pieces.append(text)
        return self._event(self.delta, delta=text, **besides)

    def end(self, status: str) -> list[Event]:
        """The item is over."""
        return [*self.closed(), self._told("response.output_item.done", self.whole(status))]

    def _told(self, kind: str, item: dict[str, Any]) -> Event:
        return {"type": kind, "output_index": self._index, "item": item}

    def _event(self, kind: str, **what: Any) -> Event:
        return {"type": kind, "item_id": self.id, "output_index": self._index, **what}


class _Thought(_Item):
    prefix = "rs"
    delta = "response.reasoning_summary_text.delta"

    def whole(self, status: str) -> dict[str, Any]:
        summary = [self._part()] if self._pieces else []
        return {"id": self.id, "type": "reasoning", "summary": summary, "status": status}

    def opened(self) -> list[Event]:
        return [self._of_part("response.reasoning_summary_part.added", part=self._part())]

    def more(self, text: str, **besides: Any) -> Event:
        return super().more(text, summary_index=0, **besides)

    def closed(self) -> list[Event]:
        return [
            self._of_part("response.reasoning_summary_text.done", text=self.text),
            self._of_part("response.reasoning_summary_part.done", part=self._part()),
        ]

    def _part(self) -> dict[str, Any]:
        return {"type": "summary_text", "text": self.text}

    def _of_part(self, kind: str, **what: Any) -> Event:
        return self._event(kind, summary_index=0, **what)


class _Message(_Item):
    prefix = "msg"
    delta = "response.output_text.delta"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._logprobs: list[dict[str, Any]] = []
        self._has_part = False

    def whole(self, status: str) -> dict[str, Any]:
        content = [self._part()] if self._has_part else []
        said = {"role": "assistant", "content": content, "status": status}
        return {"id": self.id, "type": "message", **said}

    def opened(self) -> list[Event]:
        self._has_part = True
        return [self._of_part("response.content_part.added", part=self._part())]

    def say(self, text: str, logprobs: Sequence[TokenLogprob]) -> Event:
        """It goes on with this text."""
        told = chat_logprobs(tuple(logprobs))["content"]
        self._logprobs += told
        return self.more(text, content_index=0, logprobs=told)

    def closed(self) -> list[Event]:
        logprobs = [*self._logprobs]
        return [
            self._of_part("response.output_text.done", text=self.text, logprobs=logprobs),
            self._of_part("response.content_part.done", part=self._part()),
        ]

    def _part(self) -> dict[str, Any]:
        said = {"text": self.text, "annotations": [], "logprobs": [*self._logprobs]}
        return {"type": "output_text", **said}

    def _of_part(self, kind: str, **what: Any) -> Event:
        return self._event(kind, content_index=0, **what)


class _Call(_Item):
    prefix = "fc"
    delta = "response.function_call_arguments.delta"

    def __init__(self, index: int, begun: ToolCallDelta) -> None:
        super().__init__(index)
        self._call_id, self._name = begun.id, begun.name

    def whole(self, status: str) -> dict[str, Any]:
        called = {"call_id": self._call_id, "name": self._name, "arguments": self.text}
        return {"id": self.id, "type": "function_call", **called, "status": status}

    def opened(self) -> list[Event]:
        return []

    def closed(self) -> list[Event]:
        kind = "response.function_call_arguments.done"
        return [self._event(kind, name=self._name, arguments=self.text)]


_Kind = TypeVar("_Kind", bound=_Item)


class ResponseWriter:
    """Writes one answer, frame by frame: its events, and the answer itself as it stands."""

    def __init__(self, response_id: str, echo: dict[str, Any]) -> None:
        """`echo` is what the answer repeats of its request."""
        self._echo = echo
        self._id = response_id
        self._created_at = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._open: _Item | None = None
        self._unspoken: list[TokenDelta] = []
        self._thought = ThoughtTokens()
        self._told = 0
        self.answer: dict[str, Any] = self._standing(_UNDER_WAY)
        """The whole answer, once it has ended."""

    def take(self, frame: StreamFrame) -> list[Event]:
        """The events of a frame."""
        if isinstance(frame, TokenDelta):
            events = self._go_on(frame)
        elif isinstance(frame, Done):
            events = self._end(frame)
        elif isinstance(frame, PromptPiece):  # a conversation is not given back
            events = []
        else:
            events = [{"type": "hearthnet.event", "hearthnet": diagnostic(frame)}]
        return self._numbered(events)

    def fail(self, error: MeshError) -> list[Event]:
        """The events that end an answer so."""
        failure = {"code": error.code, "message": str(error)}
        items = [*self._items, *([self._open.whole(_CUT)] if self._open is not None else [])]
        self.answer = {**self._standing("failed"), "output": items, "error": failure}
        # Some clients read the error's fields in the event, others in its object.
        told = {"type": "error", **failure, "param": error.param, **error_body(error)}
        return self._numbered([told, {"type": "response.failed", "response": self.answer}])

    def _numbered(self, events: list[Event]) -> list[Event]:
        if not self._told:
            begins = ("response.created", "response.in_progress")
            standing = self._standing(_UNDER_WAY)
            events = [*({"type": kind, "response": standing} for kind in begins), *events]
        first, self._told = self._told, self._told + len(events)
        return [{**event, "sequence_number": first + n} for n, event in enumerate(events)]

    def _standing(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **self._echo,
        }

    def _go_on(self, delta: TokenDelta) -> list[Event]:
        self._thought.take(delta)
        self._unspoken.append(delta)  # a mark, or half a character, belongs to what follows it
        # What is left of the call under way comes before what is said behind it.
        calls = delta.tool_calls
        fresh = next((n for n, news in enumerate(calls) if news.id), len(calls))
        events = [event for news in calls[:fresh] for event in self._call(news)]
        if delta.reasoning:
            thought, begun = self._within(_Thought)
            events += [*begun, thought.more(delta.reasoning)]
        if delta.text:
            logprobs = [entry for each in self._unspoken for entry in each.logprobs]
            message, begun = self._within(_Message)
            events += [*begun, message.say(delta.text, logprobs)]
        for news in calls[fresh:]:
            events += self._call(news)
        if events:
            self._unspoken.clear()
        return events

    def _call(self, news: ToolCallDelta) -> list[Event]:
        events = self._begin(partial(_Call, begun=news))[1] if news.id else []
        if news.arguments and self._open is not None:
            events.append(self._open.more(news.arguments))
        return events

    def _within(self, kind: type[_Kind]) -> tuple[_Kind, list[Event]]:
        """The item of this kind that is under way, or one that begins."""
        return (self._open, []) if isinstance(self._open, kind) else self._begin(kind)

    def _begin(self, make: Callable[[int], _Kind]) -> tuple[_Kind, list[Event]]:
        """The next item, which `make` makes of its number."""
        ended = self._close(_DONE)
        item = make(len(self._items))
        self._open = item
        return item, [*ended, *item.begin()]

    def _close(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        self._items.append(item.whole(status))
        return item.end(status)

    def _end(self, done: Done) -> list[Event]:
        was_cut = done.finish_reason == "length"
        status = _CUT if was_cut else _DONE
        events = self._close(status)
        if all(item["type"] == "reasoning" for item in self._items) and not was_cut:
            _, begun = self._within(_Message)  # an answer of no words is one as well
            events += [*begun, *self._close(status)]
        self.answer = {
            **self._standing(status),
            "incomplete_details": {"reason": "max_output_tokens"} if was_cut else None,
            "completed_at": None if was_cut else int(time.time()),
            "output": self._items,
            "usage": self._usage(done),
            "hearthnet": extension([done]),
        }
        return [*events, {"type": f"response.{status}", "response": self.answer}]

    def _usage(self, done: Done) -> dict[str, Any]:
        return {
            "input_tokens": done.prompt_tokens,
            "input_tokens_details": {"cached_tokens": done.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": done.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._thought.count},
            "total_tokens": done.prompt_tokens + done.completion_tokens,
        }
