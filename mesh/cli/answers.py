"""Printing one streamed answer, for `run` and `chat`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from mesh.cli.output import event_line, note, say, summary_line


@dataclass
class ReceivedAnswer:
    """An answer as received so far; complete once `extension` is set."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    extension: dict[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """Where the answer came from and how fast."""
        return summary_line(self.extension, self.usage)

    def to_dict(self) -> dict[str, Any]:
        """What `run --json` prints."""
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "usage": self.usage,
            "hearthnet": self.extension,
        }


async def receive(
    chunks: AsyncGenerator[dict[str, Any], None], answer: ReceivedAnswer, *, show: bool = True
) -> None:
    """Fill `answer` from a stream, printing the text on stdout as it comes unless `show` is off.

    What happens to the route is told on stderr. On cancellation and errors `answer` keeps what
    came before, and the line on the screen is ended.
    """
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                _take(chunk, answer, show=show)
    finally:
        if show and answer.text and not answer.text.endswith("\n"):
            say()


def _take(chunk: dict[str, Any], answer: ReceivedAnswer, *, show: bool) -> None:
    extension = chunk.get("hearthnet", {})
    if "event" in extension:
        note(f"[{event_line(extension['event'])}]")
    elif extension:
        answer.extension = extension
    answer.usage = chunk.get("usage") or answer.usage
    for choice in chunk["choices"]:
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        answer.text += text
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        if show and text:
            say(text, end="")
