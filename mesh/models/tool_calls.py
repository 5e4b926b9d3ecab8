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
from mesh.models.written_calls import JsonCall, TaggedCall, WrittenCall, object_in
from mesh.types import ToolCallDelta, ToolUse

_ALPHANUMERIC = string.ascii_letters + string.digits
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
    that. `is_tagged`: no JSON, but ``<function=NAME>`` and ``<parameter=KEY>``.
    """

    opening: str
    closing: str = ""
    arguments: str = "arguments"
    is_bare: bool = False
    is_named: bool = False
    is_list: bool = False
    is_tagged: bool = False
    id_chars: int = 0

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts of the form that a tokenizer may have special tokens for."""
        named = ("[ARGS]", "[CALL_ID]") if self.is_named else ()
        tagged = ("<function=",) if self.is_tagged else ()
        return tuple(mark for mark in (self.opening, self.closing, *named, *tagged) if mark)


HERMES = CallForm("<tool_call>", "</tool_call>")
"""Hermes 2 and its followers: Qwen 2.5 and 3, SmolLM 3, Granite 4."""
QWEN_TAGS = CallForm("<tool_call>", "</tool_call>", is_tagged=True)
"""Qwen 3 Coder, and Qwen from 3.5 on."""
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

_LLAMA_SAYS = '{"name": function name, "parameters":'
"""What the templates without the mark tell the model."""


def form_in(template: str) -> CallForm | None:
    """The form that a chat template teaches; None where it is none of those known here."""
    if HERMES.opening in template:
        if "<function=" in template:
            return QWEN_TAGS
        return None if "<arg_key>" in template else HERMES  # GLM's marks are around neither
    if MISTRAL.opening in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if PHI.opening in template:
        return PHI if PHI.closing in template else GRANITE
    if LLAMA.opening in template or _LLAMA_SAYS in template:
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
        functions = [tool["function"] for tool in tools.tools]
        self._schemas = {each["name"]: each.get("parameters", {}) for each in functions}
        self._held = ""
        self._raw = ""
        self._call: WrittenCall | None = None
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
        if (call := self._begun()) is not None:
            return self._open(call)
        if not is_over and self._may_become(held):
            return False
        if held and held[0] in (_BETWEEN_BARE if form.is_bare else _BETWEEN):
            self._skip(1)
            return True
        if self._has_called and any(mark.startswith(held) for mark in form.marks):
            self._skip(len(held))  # the answer was cut inside of a mark
        return self._end()

    def _begun(self) -> WrittenCall | None:
        """The call that what is held begins."""
        held, form = self._held, self._form
        if form.is_tagged:
            is_call = held.startswith("<function=")
            return TaggedCall(self._schemas, form.closing) if is_call else None
        if held.startswith("{"):
            return JsonCall("", form.opening[0])
        named = _NAMED_HEAD.match(held) if form.is_named else None
        if named is None:
            return None
        self._skip(named.end())
        return JsonCall(named[1], "")

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
        name: Any
        if call.has_arguments:  # that a brace is missing behind them loses nothing
            name, arguments = call.name, call.arguments
        elif self._form.is_tagged:
            return None
        else:
            said = object_in(call.text) or {}
            name = said.get("name")
            given = said.get("arguments", said.get("parameters"))
            if given is None and not self._form.is_bare:
                given = {}
            # Some write them as OpenAI's own API does, as a text.
            given = object_in(given) if isinstance(given, str) else given
            arguments = json.dumps(given, ensure_ascii=False)
        if not isinstance(name, str) or not self._is_wanted(name) or object_in(arguments) is None:
            return None
        return name, arguments

    def _is_wanted(self, name: str) -> bool:
        """JSON alone is a call only of a function that there is."""
        return bool(name) and (name in self._schemas or not self._form.is_bare)

    def _tell(self, call: WrittenCall, name: str, arguments: str) -> None:
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
