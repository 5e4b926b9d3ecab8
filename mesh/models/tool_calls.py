"""The calls of functions in an answer, told apart from its text by the form that its template has.

What is no well-formed call stays text. Knows nothing of how tokens are chosen or sent, and not what
the functions do.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable

from mesh.models.call_forms import CallForm
from mesh.models.splitting import first_of, most_overlap
from mesh.models.written_calls import WrittenCall, object_in
from mesh.types import ToolCallDelta, ToolUse

_ALPHANUMERIC = string.ascii_letters + string.digits


class CallReader:
    """Splits one answer's text, as it comes, into text and calls.

    White space beside calls belongs to neither. `is_full`: the calls that were wanted are there,
    and what follows is not read any more. `count` is of the calls so far.
    """

    def __init__(self, form: CallForm, tools: ToolUse) -> None:
        self.count = 0
        self.is_full = False
        self._form = form
        self._tools = tools
        functions = [tool["function"] for tool in tools.tools]
        self._schemas = {each["name"]: each.get("parameters", {}) for each in functions}
        self._texts = (*form.marks, *form.between)
        self._ids: set[str] = set()
        self._held = ""
        self._raw = ""
        self._call: WrittenCall | None = None
        self._has_called = False
        self._is_opened = True
        """Whether a mark has opened these calls."""
        self._trims = False
        self._read: Callable[[bool], bool] = self._begin if form.is_bare else self._text
        self._said: list[str] = []
        self._told: list[ToolCallDelta] = []

    def push(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """More of the answer: what is certain now to be text, and news of calls."""
        self._held += text
        return self._advance(is_over=False)

    def flush(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """What was held back, once no more text comes."""
        return self._advance(is_over=True)

    # Private: each reads what it can of what is held, and says whether to go on.

    def _advance(self, *, is_over: bool) -> tuple[str, tuple[ToolCallDelta, ...]]:
        while not self.is_full and self._read(is_over):
            pass
        said, told = "".join(self._said), tuple(self._told)
        self._said.clear()
        self._told.clear()
        return said, told

    def _begin(self, is_over: bool) -> bool:
        begun = self._held.lstrip()
        if not begun and not is_over:
            return False
        self._read = self._between if begun.startswith("{") else self._text
        return True

    def _text(self, is_over: bool) -> bool:
        if (found := first_of(self._held, self._form.openings)) is not None:
            place, mark = found
            self._is_opened = mark == self._form.opening
            text = self._held[:place]
            self._say(text.rstrip())
            self._raw, self._held, self._has_called = "", self._held[len(text.rstrip()) :], False
            self._skip(place - len(text.rstrip()) + (len(mark) if self._is_opened else 0))
            self._read = self._between
            return True
        if is_over:
            self._say(self._held)
            self._held = ""
            return False
        # White space is held back as well: a call may follow it.
        keep = most_overlap(self._held, self._form.openings)
        certain = self._held[: len(self._held) - keep].rstrip()
        self._say(certain)
        self._held = self._held[len(certain) :]
        return False

    def _between(self, is_over: bool) -> bool:
        """Behind the opening mark, or a call."""
        self._skip(len(self._held) - len(self._held.lstrip()))
        held, form = self._held, self._form
        if held.startswith(form.opening):
            self._skip(len(form.opening))
            return True
        if form.closing and held.startswith(form.closing):
            self._skip(len(form.closing))
            return self._end()
        if (begun := form.writing.begun(held, self._schemas)) is not None:
            self._skip(begun[0])
            return self._open(begun[1])
        if not is_over and self._may_become(held):
            return False
        if (text := next(filter(held.startswith, form.between), None)) is not None:
            self._skip(len(text))
            return True
        if is_over and self._has_called and any(text.startswith(held) for text in self._texts):
            self._skip(len(held))  # the answer was cut inside of a mark
        elif not (self._is_opened or self._has_called):
            self._skip(len(form.head))
        return self._end()

    def _may_become(self, held: str) -> bool:
        """Whether more text may make a mark or a call of what begins so."""
        if not held or self._form.writing.may_begin(held):
            return True
        return any(text.startswith(held) and text != held for text in self._texts)

    def _skip(self, size: int) -> None:
        self._raw += self._held[:size]
        self._held = self._held[size:]

    def _end(self) -> bool:
        """Text again: what was held for a call is none, unless there was one."""
        if self._has_called:
            self._trims = True
        else:
            self._say(self._raw)
        self._raw, self._read = "", self._behind if self._has_called else self._text
        return True

    def _behind(self, is_over: bool) -> bool:
        """Behind calls, where the answer may be over."""
        held = self._held.lstrip()
        self.is_full = any(held.startswith(end) for end in self._form.ends)
        if not is_over and any(end.startswith(held) for end in self._form.ends):
            return False
        self._read = self._text
        return True

    def _open(self, call: WrittenCall) -> bool:
        if self.count and not self._tools.parallel:
            self.is_full = True
            return False
        self._call = call
        self._read = self._arguments
        return True

    def _arguments(self, is_over: bool) -> bool:
        call = self._call
        assert call is not None  # noqa: S101 - it was opened
        self._held = call.take(self._held)
        if self._tools.in_pieces and (call.is_told or self._is_wanted(call.name)):
            self._tell(call, call.name, call.arguments)
        if not call.is_ended and not is_over:
            return False
        if not call.is_told and (found := self._found(call)) is not None:
            self._tell(call, *found)
        self._call = None
        if call.is_told:
            self._raw, self._has_called = "", True
            self._read = self._between
        else:
            self._raw, self._has_called = self._raw + call.text, False
            self._end()
        return True

    def _found(self, call: WrittenCall) -> tuple[str, str] | None:
        """Name and arguments of a call that has ended, if it is one."""
        found = call.found()
        if found is None or not self._is_wanted(found[0]) or object_in(found[1]) is None:
            return None
        return found

    def _is_wanted(self, name: str) -> bool:
        """JSON alone is a call only of a function that there is, as is what nothing opens."""
        is_known = name in self._schemas
        return bool(name) and (is_known or (self._is_opened and not self._form.is_bare))

    def _tell(self, call: WrittenCall, name: str, arguments: str) -> None:
        if not call.is_told:
            call.is_told = True
            self._told.append(ToolCallDelta(self.count, "", self._new_id(call), name))
            self.count += 1
        if new := arguments[call.told_chars :]:
            call.told_chars = len(arguments)
            self._told.append(ToolCallDelta(self.count - 1, new))

    def _new_id(self, call: WrittenCall) -> str:
        if call.call_id and call.call_id not in self._ids:
            self._ids.add(call.call_id)
            return call.call_id
        if not self._form.id_chars:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(self._form.id_chars))

    def _say(self, text: str) -> None:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        if text:
            self._said.append(text)
