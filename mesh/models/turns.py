"""Conversations with calls as one chat template wants them.

They come as OpenAI has them, the arguments of calls as objects. Templates differ in whether they
take these as objects or as the text of one, and some in more; what one wants shows in what it makes
of a conversation that is tried on it.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mesh.errors import BadRequest
from mesh.models.call_forms import GEMMA, HARMONY, KIMI, CallForm
from mesh.models.python_calls import PythonCalls, as_python

Message = Mapping[str, Any]

_NAME, _ID = "tell_the_word", "tried000"


def _tries(count: int) -> tuple[Message, ...]:
    """A conversation with so many calls in one message, with ids as Mistral's templates take."""
    ids = [f"{_ID}{number}" for number in range(count)]
    calls = [
        {"id": one, "type": "function", "function": {"name": _NAME, "arguments": {"spoken": one}}}
        for one in ids
    ]
    results = ({"role": "tool", "content": "it", "tool_call_id": one, "name": _NAME} for one in ids)
    return (
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *results,
    )


_PRINTED = "{'spoken'"
"""What Python prints of an object that was to be a text."""
_KIMI_ID = re.compile(r"functions\.[\w.-]+:\d+")


@dataclass(frozen=True, slots=True)
class Wants:
    """What a template wants: `text_arguments` as the text of an object; `one_call` in a message;
    what was thought and said before a call in one (`joins_thoughts`), as gpt-oss has it;
    `counted_ids`, with the name and a number, as Kimi has them; results beside the calls
    (`tool_responses`), as Gemma's first template has them. `spells`: it leaves calls out, and they
    are to be written into the content in this form."""

    text_arguments: bool = False
    one_call: bool = False
    joins_thoughts: bool = False
    counted_ids: bool = False
    tool_responses: bool = False
    spells: CallForm | None = None


def wants_of(
    render: Callable[[Sequence[Message]], str], template: str, form: CallForm | None
) -> Wants:
    """What a template of this form wants, which `render` follows and which raises BadRequest."""

    def tried(wants: Wants, calls: int = 1) -> str:
        try:
            return render(turned(_tries(calls), wants))
        except BadRequest:
            return ""

    wants = Wants(
        one_call=form is HARMONY,
        joins_thoughts=form is HARMONY,
        counted_ids=form is KIMI,
        tool_responses=form is GEMMA and "tool_call_id" not in template,
    )
    with_objects, with_texts = tried(wants), tried(replace(wants, text_arguments=True))
    if with_texts and (not with_objects or _PRINTED in with_objects):
        wants = replace(wants, text_arguments=True)
    elif with_objects and _NAME not in with_objects and _can_be_spelled(form):
        return replace(wants, spells=form)
    first, both = tried(wants), tried(wants, calls=2)
    has_all = both.count(f"{_ID}1") >= first.count(f"{_ID}0")  # some leave out all but one
    splits = first and not (both and has_all)
    return replace(wants, one_call=True) if splits else wants


def _can_be_spelled(form: CallForm | None) -> bool:
    if form is None:
        return False
    return isinstance(form.writing, PythonCalls) or form.writing.around(_NAME) is not None


def plain_transcript(messages: Sequence[Mapping[str, Any]]) -> str:
    """How a conversation is put to a model that has no chat template."""
    lines = [f"{message['role']}: {message['content']}\n\n" for message in messages]
    return "".join((*lines, "assistant:"))


def speaks_of_calls(message: Message) -> bool:
    """Whether it is of calls or their results, which of several templates only that for tools may
    know."""
    return message["role"] == "tool" or "tool_calls" in message


def in_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The same with what is said as a list of parts, which all are text."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]


def turned(messages: Sequence[Message], wants: Wants) -> list[dict[str, Any]]:
    """A conversation as a template wants it. What was thought is told under all names that there
    are for it."""
    shown = [
        {**message, **dict.fromkeys(("thinking", "reasoning"), message["reasoning_content"])}
        if "reasoning_content" in message
        else dict(message)
        for message in messages
    ]
    if wants.counted_ids:
        _count_ids(shown)
    if wants.joins_thoughts:
        shown = [_with_thoughts(message) for message in shown]
    if wants.one_call:
        shown = _one_call_each(shown)
    if wants.tool_responses:
        shown = _with_responses(shown)
    for message in shown:
        if not message.get("tool_calls"):
            continue
        if wants.spells is not None:
            message["content"] += _spelled(message.pop("tool_calls"), wants.spells)
        elif wants.text_arguments:
            message["tool_calls"] = [_as_text(call) for call in message["tool_calls"]]
    return shown


def _as_text(call: Message) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _count_ids(messages: list[dict[str, Any]]) -> None:
    """Give calls, and their results, ids of Kimi's form where they have others."""
    count, ids = 0, dict[str, str]()
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            name, call_id = call["function"]["name"], call["id"]
            is_own = _KIMI_ID.fullmatch(call_id) is not None
            ids[call_id] = call_id if is_own else f"functions.{name}:{count}"
            calls.append({**call, "id": ids[call_id]})
            count += 1
        if calls:
            message["tool_calls"] = calls
        if (answered := message.get("tool_call_id")) is not None:
            message["tool_call_id"] = ids.get(answered, answered)


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """With what was thought and said before its calls as one, which gpt-oss's template wants."""
    said = [text for text in (message.get("thinking"), message["content"]) if text]
    if not (message.get("tool_calls") and said):
        return message
    return {**message, "content": "", "thinking": "\n\n".join(said)}


def _one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = []
    queue = deque(messages)
    while queue:
        message = queue.popleft()
        calls = message.get("tool_calls")
        if not calls:
            shown.append(message)
            continue
        results = _results(queue)
        for call in calls:
            shown.append({**message, "tool_calls": [call]})
            message = {"role": "assistant", "content": ""}
            shown += [each for each in results if each.get("tool_call_id") == call["id"]]
        ids = {call["id"] for call in calls}
        shown += [each for each in results if each.get("tool_call_id") not in ids]
    return shown


def _with_responses(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = []
    queue = deque(messages)
    while queue:
        message = queue.popleft()
        if message.get("tool_calls"):
            message["tool_responses"] = [
                {"name": each.get("name", ""), "response": each["content"]}
                for each in _results(queue)
            ]
        shown.append(message)
    return shown


def _results(queue: deque[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results that stand at the beginning of what is left of a conversation."""
    found = []
    while queue and queue[0]["role"] == "tool":
        found.append(queue.popleft())
    return found


def _spelled(calls: Sequence[Message], form: CallForm) -> str:
    each = [_one_spelled(call, form) for call in calls]
    if form.is_bare:
        return "; ".join(each)
    if form.separator is None and not isinstance(form.writing, PythonCalls):
        return "\n".join(f"{form.opening}{call}{form.closing}" for call in each)
    is_list = form.separator != ""
    inside = f"[{', '.join(each)}]" if is_list else "".join(each)
    return f"{form.opening}{inside}{form.closing}"


def _one_spelled(call: Message, form: CallForm) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if isinstance(form.writing, PythonCalls):
        return as_python(name, arguments)
    before, behind = form.writing.around(name) or ("", "")
    if form is KIMI:
        before = before.replace(f"functions.{name}:0", call["id"])
    return f"{before}{json.dumps(arguments, ensure_ascii=False)}{behind}"
