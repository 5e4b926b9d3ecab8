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
from dataclasses import dataclass
from typing import Any

from mesh.errors import BadRequest
from mesh.models.call_forms import GEMMA, HARMONY, KIMI, CallForm
from mesh.models.python_calls import PythonCalls, as_python

Message = Mapping[str, Any]

_ID, _NAME = "tried0000", "tell_the_word"
"""The id has a form that Mistral's templates take."""
_TRIED: tuple[Message, ...] = (
    {"role": "user", "content": "hello"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": _ID,
                "type": "function",
                "function": {"name": _NAME, "arguments": {"spoken": "probe"}},
            }
        ],
    },
    {"role": "tool", "content": "told", "tool_call_id": _ID, "name": _NAME},
)
_PRINTED = "{'spoken'"
"""What Python prints of an object that was to be a text."""
_KIMI_ID = re.compile(r"functions\.[\w.-]+:\d+")


@dataclass(frozen=True, slots=True)
class Wants:
    """What a template wants: `text_arguments` as the text of an object; `one_call` in a message,
    with what was thought and said before it in one, as gpt-oss has it; `counted_ids`, with the
    name and a number, as Kimi has them; results beside the calls (`tool_responses`), as Gemma's
    first template has them. `spells`: it leaves calls out, and they are to be written into the
    content in this form."""

    text_arguments: bool = False
    one_call: bool = False
    counted_ids: bool = False
    tool_responses: bool = False
    spells: CallForm | None = None


def wants_of(
    render: Callable[[Sequence[Message]], str], template: str, form: CallForm | None
) -> Wants:
    """What a template of this form wants, which `render` follows and which raises BadRequest."""
    own = Wants(
        one_call=form is HARMONY,
        counted_ids=form is KIMI,
        tool_responses=form is GEMMA and "tool_call_id" not in template,
    )
    as_objects, as_texts = (
        Wants(given, own.one_call, own.counted_ids, own.tool_responses) for given in (False, True)
    )
    with_objects, with_texts = (_tried(render, wants) for wants in (as_objects, as_texts))
    if with_texts and (not with_objects or _PRINTED in with_objects):
        return as_texts
    is_spelled = form is not None and (
        isinstance(form.writing, PythonCalls) or form.writing.around(_NAME) is not None
    )
    if not is_spelled or not with_objects or _NAME in with_objects:
        return as_objects
    return Wants(spells=form, counted_ids=own.counted_ids)


def _tried(render: Callable[[Sequence[Message]], str], wants: Wants) -> str:
    try:
        return render(turned(_TRIED, wants))
    except BadRequest:
        return ""


def turned(messages: Sequence[Message], wants: Wants) -> list[dict[str, Any]]:
    """A conversation as a template wants it. What was thought is told under both names that there
    are for it."""
    shown = [
        {**message, "thinking": message["reasoning_content"]}
        if "reasoning_content" in message
        else dict(message)
        for message in messages
    ]
    if wants.counted_ids:
        _count_ids(shown)
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
        before = filter(None, (message.get("thinking"), message["content"]))
        thinking = "\n\n".join(before)
        for call in calls:
            one = {"role": "assistant", "content": "", "tool_calls": [call]}
            shown.append({**one, "thinking": thinking} if thinking else one)
            thinking = ""
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
