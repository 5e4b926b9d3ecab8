"""Reasoning that ends with calls, and not with its mark: so Qwen 3.5 and Kimi K2 Thinking, among
others, leave off thinking at times.

Knows the reasoning's marks from whoever splits by them, and calls from whoever reads them.
"""

from __future__ import annotations

from dataclasses import replace

from mesh.models.call_forms import CallForm
from mesh.models.splitting import Splitter, first_of, most_overlap
from mesh.models.tool_calls import CallReader
from mesh.types import ToolUse


class CallingThoughts:
    """Splits as `thoughts` does, but that calls of the tools with which an answer ends are no
    reasoning, be it closed or not.

    Calls that more reasoning follows, or the mark that ends it, are reasoning. Until that is known
    they are held back.
    """

    def __init__(self, thoughts: Splitter, form: CallForm, tools: ToolUse) -> None:
        self._thoughts = thoughts
        self._form = form
        self._tools = replace(tools, in_pieces=True)
        self._names = {tool["function"]["name"] for tool in tools.tools}
        self._held = ""
        self._reader: CallReader | None = None
        """Reads what may be calls, of which it has had so many characters:"""
        self._read = 0

    @property
    def is_open(self) -> bool | None:
        """Whether what comes now is reasoning; None while that is not known."""
        return self._thoughts.is_open

    def push(self, text: str) -> tuple[str, str]:
        """More of the answer: what is certain now to be reasoning, and the rest."""
        thought, said = self._thoughts.push(text)
        self._held += thought
        if self._thoughts.is_open:
            return self._certain(), said
        thought, self._held = self._held, ""
        return thought, said

    def flush(self) -> tuple[str, str]:
        """What was held back, once no more text comes."""
        thought, said = self._thoughts.flush()
        self._held += thought
        certain = self._certain()
        if self._thoughts.is_open and self._reader is not None and self._reader.count:
            return certain, self._held + said
        return certain + self._held, said

    def _certain(self) -> str:
        """What of that which is held is certain to be reasoning."""
        openings, certain = self._form.openings, ""
        while (found := first_of(self._held, openings)) is not None:
            if self._reader is None:
                certain += self._take(found[0])
                self._reader, self._read = CallReader(self._form, self._tools), 0
            if self._may_be_calls(self._reader):
                return certain
            self._reader = None
            certain += self._take(len(found[1]))
        return certain + self._take(len(self._held) - most_overlap(self._held, openings))

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken

    def _may_be_calls(self, reader: CallReader) -> bool:
        """Whether there is nothing but calls. Sign by sign: others may follow what is none."""
        for sign in self._held[self._read :]:
            self._read += 1
            said, told = reader.push(sign)
            if said or any(news.name and news.name not in self._names for news in told):
                return False
        return True
