"""What an answer must look like, as the text of a grammar: by a JSON schema, as calls, or both.

The grammar is in the Lark dialect of the library llguidance; nothing here loads it. Of a model it
knows the form and the special tokens of its calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from mesh.errors import BadRequest
from mesh.models.call_forms import CallForm, CallMarks
from mesh.models.channels import CHANNEL, END, MESSAGE, START, THOUGHT, ChannelMarks
from mesh.models.channels import TEXT as FINAL
from mesh.models.written_calls import Objects
from mesh.types import GenerationRequest, ToolUse

Objection = Callable[[Mapping[str, Any]], str]
"""Why a JSON schema cannot be followed; empty where it can."""

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_SPACES = r"( |\n[ \t]{0,20})?"
"""Between the parts of JSON. A bound: some models write white space without end."""
_TEXT = r"TEXT: /(.|\n)*/"


def is_bound(request: GenerationRequest) -> bool:
    """Whether a request says what its answer must look like."""
    tools = request.tools
    return says_all(request) or (tools is not None and bool(tools.required or tools.strict))


def says_all(request: GenerationRequest) -> bool:
    """Whether it says what all of an answer without calls must look like."""
    return request.schema is not None or request.pattern is not None


def grammar_of(
    request: GenerationRequest,
    marks: CallMarks | None,
    objection: Objection,
    channels: ChannelMarks | None = None,
) -> str:
    """The grammar of a request that `is_bound`; `marks` are those of calls, where it has tools, and
    `channels` those of a model that answers in such.

    Raises BadRequest for a schema that cannot be followed. The arguments of functions that are not
    `strict` are any object there.
    """
    tools = request.tools
    rules = [f"answer: {_answer(request, objection)}"] if says_all(request) else []
    calls = None if tools is None or marks is None else _Calls(marks, tools, objection)
    if channels is not None:
        return "\n".join([*_in_channels(channels, request, calls), *rules])
    if calls is None or tools is None:
        return "\n".join(["start: answer", *rules])
    if tools.required or rules:
        start = "calls" if tools.required else "answer | calls"
        rules = [] if tools.required else rules
        return "\n".join([f"start: {start}", *rules, *calls.alone()])
    return "\n".join(calls.in_text())


def _in_channels(
    channels: ChannelMarks, request: GenerationRequest, calls: _Calls | None
) -> list[str]:
    """Rules for `start`: thoughts, and then what is wanted, which is one call if any."""
    ids = {mark: token_id for token_id, mark in channels.unseen.items()}

    def message(header: str, text: str, behind: str = "") -> str:
        return f"{_spelled(header, ids)} {text} {_spelled(behind, ids)}".rstrip()

    tools, again = request.tools, f"{END}{START}assistant"
    before = message(f"{CHANNEL}{THOUGHT}{MESSAGE}", "TEXT", again)
    last: list[str] = []
    if tools is None or not tools.required:
        said = "answer" if says_all(request) else "TEXT"
        last.append(message(f"{CHANNEL}{FINAL}{MESSAGE}", said))
    rules: list[str] = []
    if calls is not None:
        last.append("call")
        rules = calls.alone()
        if not says_all(request):
            before += " | " + message(f"{CHANNEL}commentary{MESSAGE}", "TEXT", again)
    return ["start: before* last", f"before: {before}", f"last: {' | '.join(last)}", *rules, _TEXT]


class _Calls:
    """The rules of the calls that may be made."""

    def __init__(self, marks: CallMarks, tools: ToolUse, objection: Objection) -> None:
        if marks.form.writing.around("") is None:
            raise BadRequest(
                "this model writes calls between tags or as code, not as JSON; they cannot be"
                " bound.",
                fix="Ask with tool_choice auto, without strict functions and response_format.",
                param="tools",
            )
        self._form: CallForm = marks.form
        self._ids = {mark: token_id for token_id, mark in marks.unseen.items()}
        self._tools = tools
        self._objection = objection

    def alone(self) -> list[str]:
        """Rules for `calls`: nothing but calls."""
        form = self._form
        one = "body" if form.is_bare else f"{self._text(form.opening)} body"
        many = r'call ("\n"? call)*' if self._may_repeat else "call"
        return [f"calls: {many}", f"call: {one}", *self._body()]

    def in_text(self) -> list[str]:
        """Rules for `start`: text in which calls may stand."""
        form = self._form
        if form.is_bare:
            # What begins with a brace, or behind the mark, is a call.
            plain = r"PLAIN: /[^{\s](.|\n)*/"
            return [
                f"start: {self._mark(form.opening)}? body | PLAIN?", plain, *self._body(),
            ]  # fmt: skip
        often = "*" if self._tools.parallel else "?"
        if form.opening in self._ids:
            head = [f"head: TEXT {self._mark(form.opening)}"]
        else:
            head = [f"head[lazy]: TEXT {_literal(form.opening)}"]
        return [f"start: (head body){often} TEXT", *head, *self._body(), _TEXT]

    @property
    def _may_repeat(self) -> bool:
        return self._tools.parallel and self._form.separator is None and not self._form.is_bare

    def _body(self) -> list[str]:
        """What stands behind the opening mark."""
        form = self._form
        functions = [
            (number, tool["function"])
            for number, tool in enumerate(self._tools.tools)
            if self._tools.named in ("", tool["function"]["name"])
        ]
        objects = [
            self._function(function["name"], self._arguments(number, function))
            for number, function in functions
        ]
        closing = self._mark(form.closing) if form.closing else ""
        if form.separator == ",":
            more = '("," " "? object)*' if self._tools.parallel else ""
            body = f'" "? "[" object {more} "]" {closing}'
        elif form.separator is not None:
            body = f"object{'+' if self._tools.parallel else ''} {closing}"
        elif form.closing:
            body = rf'"\n"? object "\n"? {closing}'
        else:
            body = "object"
        return [f"body: {body}", f"object: {' | '.join(objects)}"]

    def _function(self, name: str, arguments: str) -> str:
        writing = self._form.writing
        if self._form.separator == ",":  # a list is one of objects
            writing = writing if isinstance(writing, Objects) else Objects()
        before, behind = writing.around(name) or ("", "")
        return " ".join(filter(None, (self._text(before), arguments, self._text(behind))))

    def _arguments(self, number: int, function: Mapping[str, Any]) -> str:
        schema: Mapping[str, Any] = function["parameters"]
        if schema.get("properties") == {}:  # a function of none, whose caller would invent some
            schema = {"additionalProperties": False, **schema}
        kinds = schema.get("type", "object")
        if kinds == "object" or (isinstance(kinds, list) and "object" in kinds):
            schema, why = {**schema, "type": "object"}, self._objection
        else:
            why = _no_object
        if function["name"] in self._tools.strict:
            _require(schema, f"tools.{number}.function.parameters", why)
        elif why(schema):
            schema = _ANY_OBJECT
        return _json(schema)

    def _mark(self, mark: str) -> str:
        return f"<[{self._ids[mark]}]>" if mark in self._ids else _literal(mark)

    def _text(self, text: str) -> str:
        """A text with marks in it."""
        return _spelled(text, self._ids)


def _no_object(schema: Mapping[str, Any]) -> str:
    return f"arguments are an object, and its type is {json.dumps(schema['type'])[:64]}"


def _require(schema: Mapping[str, Any], param: str, objection: Objection) -> None:
    if why := objection(schema):
        raise BadRequest(
            f"{param}: this JSON schema cannot be followed: {why}.",
            fix="Leave out what is not supported, and check the answer yourself.",
            param=param,
        )


def _answer(request: GenerationRequest, objection: Objection) -> str:
    if request.pattern is not None:
        return _pattern(request.pattern)
    schema = request.schema or {}
    _require(schema, request.bound_by, objection)
    return _json(schema)


def _pattern(expression: str) -> str:
    """A regular expression as a rule has it: between slashes, on one line."""
    written = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    inner = re.sub(r"\\.|/|\n", lambda it: written.get(it[0], it[0]), expression, flags=re.DOTALL)
    return f"/{inner}/"


def _json(schema: Mapping[str, Any]) -> str:
    bounded = {**schema, "x-guidance": {"whitespace_pattern": _SPACES}}
    return f"%json {json.dumps(bounded)}"


def _spelled(text: str, ids: Mapping[str, int]) -> str:
    """A text as a rule has it, the marks in it that have `ids` as their tokens."""
    if not ids:
        return _literal(text) if text else ""
    pieces = re.split(f"({'|'.join(map(re.escape, ids))})", text)
    return " ".join(
        f"<[{ids[piece]}]>" if piece in ids else _literal(piece) for piece in pieces if piece
    )


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
