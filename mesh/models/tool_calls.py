"""The calls of functions in an answer, told apart from its text by the form that its template has.

Every family has its own form: JSON between marks, or JSON alone. Which one a model was taught shows
in its chat template. What is no well-formed call stays text. Knows nothing of how tokens are chosen
or sent, and not what the functions do.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mesh.models.reasoning import overlap
from mesh.types import ToolCallDelta, ToolUse

_ALPHANUMERIC = string.ascii_letters + string.digits
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
"""A call up to the brace that opens its arguments."""

_NAMED_HEAD = re.compile(r"\s*([\w.-]{1,256})(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
_NAMED_HEAD_BEGUN = re.compile(r"\s*[\w.-]{0,256}(?:\[[^{]*)?\s*")
_BETWEEN, _BETWEEN_BARE = ",;[]", ";"
"""What stands between the calls behind one mark, or none."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a family writes calls: ``opening {"name": ..., arguments: {...}} closing``.

    Behind one `opening` there may be several, or a list of them. `is_bare`: an answer that begins
    with a brace may be a call without `opening`. `is_named`: the name may stand before a brace that
    opens the arguments. Ids of calls are `id_chars` letters and digits where the template wants
    that.
    """

    opening: str
    closing: str = ""
    arguments: str = "arguments"
    is_bare: bool = False
    is_named: bool = False
    is_list: bool = False
    id_chars: int = 0

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts of the form that a tokenizer may have special tokens for."""
        named = ("[ARGS]", "[CALL_ID]") if self.is_named else ()
        return tuple(mark for mark in (self.opening, self.closing, *named) if mark)


HERMES = CallForm("<tool_call>", "</tool_call>")
"""Hermes 2 and its followers: Qwen 2.5 and 3, SmolLM 3, Granite 4."""
LLAMA = CallForm("<|python_tag|>", arguments="parameters", is_bare=True)
"""Llama 3.1 to 3.3."""
MISTRAL = CallForm("[TOOL_CALLS]", is_named=True, is_list=True, id_chars=9)
"""Mistral up to its seventh tokenizer."""
MISTRAL_NAMED = CallForm("[TOOL_CALLS]", is_named=True, id_chars=9)
"""Mistral from its eleventh tokenizer on."""
PHI = CallForm("<|tool_call|>", "<|/tool_call|>")
"""Phi 4 mini."""
GRANITE = CallForm("<|tool_call|>", is_list=True)
"""Granite 3."""


def form_in(template: str) -> CallForm | None:
    """The form that a chat template teaches; None where it is none of those known here."""
    if HERMES.opening in template:
        # The same marks around something else than JSON.
        is_other = any(mark in template for mark in ("<function=", "<arg_key>"))
        return None if is_other else HERMES
    if MISTRAL.opening in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if PHI.opening in template:
        return PHI if PHI.closing in template else GRANITE
    if LLAMA.opening in template or ('"name":' in template and '"parameters":' in template):
        return LLAMA
    return None


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The form of a model's calls; `unseen` has the marks whose token ids decode to no text,
    because they are special."""

    form: CallForm
    unseen: Mapping[int, str] = field(default_factory=dict)


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
        self._known = {tool["function"]["name"] for tool in tools.tools}
        self._held = ""
        self._raw = ""
        self._call: _Call | None = None
        self._has_called = False
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
        text, mark, rest = self._held.partition(self._form.opening)
        if mark:
            self._say(text.rstrip())
            self._raw, self._held, self._has_called = text[len(text.rstrip()) :] + mark, rest, False
            self._read = self._between
            return True
        if is_over:
            self._say(self._held)
            self._held = ""
            return False
        # White space is held back as well: a call may follow it.
        certain = self._held[: len(self._held) - overlap(self._held, self._form.opening)].rstrip()
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
        if held.startswith("{") or (form.is_named and _NAMED_HEAD.match(held)):
            return self._open()
        if not is_over and self._may_become(held):
            return False
        if held and held[0] in (_BETWEEN_BARE if form.is_bare else _BETWEEN):
            self._skip(1)
            return True
        if self._has_called and any(mark.startswith(held) for mark in form.marks):
            self._skip(len(held))  # the answer was cut inside of a mark
        return self._end()

    def _may_become(self, held: str) -> bool:
        """Whether more text may make a mark or a call of what begins so."""
        is_name = self._form.is_named and _NAMED_HEAD_BEGUN.fullmatch(held)
        return not held or bool(is_name) or any(mark.startswith(held) for mark in self._form.marks)

    def _skip(self, size: int) -> None:
        self._raw += self._held[:size]
        self._held = self._held[size:]

    def _end(self) -> bool:
        """Text again: what was held for a call is none, unless there was one."""
        if self._has_called:
            self._trims = True
        else:
            self._say(self._raw)
        self._raw, self._read = "", self._text
        return True

    def _open(self) -> bool:
        if self.count and not self._tools.parallel:
            self.is_full = True
            return False
        named = None if self._held.startswith("{") else _NAMED_HEAD.match(self._held)
        self._call = _Call("" if named is None else named[1], self._form.opening[0])
        self._skip(0 if named is None else named.end())
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

    def _found(self, call: _Call) -> tuple[str, str] | None:
        """Name and arguments of a call that has ended, if it is one."""
        name: Any
        if call.has_arguments:  # that a brace is missing behind them loses nothing
            name, arguments = call.name, call.arguments
        else:
            said = _object(call.text) or {}
            name = said.get("name")
            given = said.get("arguments", said.get("parameters"))
            if given is None and not self._form.is_bare:
                given = {}
            # Some write them as OpenAI's own API does, as a text.
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        if not isinstance(name, str) or not self._is_wanted(name) or _object(arguments) is None:
            return None
        return name, arguments

    def _is_wanted(self, name: str) -> bool:
        """JSON alone is a call only of a function that there is."""
        return bool(name) and (name in self._known or not self._form.is_bare)

    def _tell(self, call: _Call, name: str, arguments: str) -> None:
        if not call.is_told:
            call.is_told = True
            self._told.append(ToolCallDelta(self.count, "", self._new_id(), name))
            self.count += 1
        if new := arguments[call.told_chars :]:
            call.told_chars = len(arguments)
            self._told.append(ToolCallDelta(self.count - 1, new))

    def _new_id(self) -> str:
        if not self._form.id_chars:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(self._form.id_chars))

    def _say(self, text: str) -> None:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        if text:
            self._said.append(text)


class _Call:
    """One JSON object as it is written: a call, or with a `name` its arguments.

    `arguments` is what is certain of them; line ends inside of strings, which JSON forbids and
    small models write, are escaped there. It has ended with its last brace, or where something
    begins as a `mark` does that is no JSON.
    """

    def __init__(self, name: str, mark: str) -> None:
        self.name = name
        self.text = ""
        self.arguments = ""
        self.is_ended = self.is_told = False
        self._mark = mark if mark == "<" else ""
        self.told_chars = 0
        self._depth = 0
        self._outside = 0
        """How deep the object lies that the arguments are."""
        self._is_inside = bool(name)
        self._in_string = self._is_escaped = False

    def take(self, text: str) -> str:
        """Read on; what of `text` stands behind the object."""
        arguments: list[str] = []
        end = len(text)
        for place, sign in enumerate(text):
            if sign == self._mark and not self._in_string:
                self.is_ended, end = True, place
                break
            if sign == "{" and self._depth == 1 and not (self.name or self._in_string):
                self._look_for_name(self.text + text[:place])
            self._step(sign)
            if self._is_inside:
                is_raw = self._in_string and sign < " "
                arguments.append(json.dumps(sign)[1:-1] if is_raw else sign)
                self._is_inside = self._depth > self._outside
            if not self._depth:
                self.is_ended, end = True, place + 1
                break
        self.text += text[:end]
        self.arguments += "".join(arguments)
        return text[end:]

    @property
    def has_arguments(self) -> bool:
        """Whether `arguments` are all there."""
        return bool(self.arguments) and not self._is_inside

    def _look_for_name(self, begun: str) -> None:
        head = _HEAD.fullmatch(begun)
        if head is not None:
            self.name, self._outside, self._is_inside = head[1], 1, True

    def _step(self, sign: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif sign == '"':
            self._in_string = not self._in_string
        elif self._in_string:
            self._is_escaped = sign == "\\"
        elif sign in "{}":
            self._depth += 1 if sign == "{" else -1


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; None where it is none."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
