"""Where chat templates take functions from: nearly all as `tools`, SmolLM 3's first as `xml_tools`,
Phi 4 mini's out of the system message."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mesh.models.turns import speaks_of_calls

PROBE: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "tell_whether_tools_are_known",
        "description": "Tell it.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
"""A tool that shows in what a template makes of it."""

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Place = Callable[[Messages, Tools], tuple[Messages, dict[str, Any]]]
"""Gives the messages, and what else a template is handed, for these functions."""

_HAS_TOOLS = "You are a helpful assistant with some tools."
"""As Phi 4 mini's own examples have it."""


def as_tools(messages: Messages, tools: Tools) -> tuple[Messages, dict[str, Any]]:
    """As OpenAI has them."""
    return messages, {"tools": [*tools] or None}


def _as_xml_tools(messages: Messages, tools: Tools) -> tuple[Messages, dict[str, Any]]:
    return messages, {"xml_tools": [tool["function"] for tool in tools] or None}


def _in_system(messages: Messages, tools: Tools) -> tuple[Messages, dict[str, Any]]:
    if not tools:
        return messages, {}
    if not messages or messages[0]["role"] != "system":
        messages = [{"role": "system", "content": _HAS_TOOLS}, *messages]
    said = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return [{**messages[0], "tools": said}, *messages[1:]], {}


_PLACES: tuple[tuple[str, Place], ...] = (
    ("", as_tools),
    ("xml_tools", _as_xml_tools),
    ("message['tools']", _in_system),
)
"""Each with what a template has in it that takes them from there."""


def place_in(template: str, shows: Callable[[Place], bool]) -> Place | None:
    """Where a template takes functions from, of which `shows` says whether it has them in its text
    then; None where it has no place for any."""
    places = (place for hint, place in _PLACES if hint in template)
    return next((place for place in places if shows(place)), None)


def handed_to(
    place: Place, messages: Messages, tools: Tools, has_several: bool
) -> tuple[Messages, dict[str, Any]]:
    """The messages, and what else a template is handed. Where a model `has_several`, that for tools
    is chosen by there being some, be it none, and it may be the only one that knows of calls."""
    shown, handed = place(messages, tools)
    if has_several and not tools and any(map(speaks_of_calls, messages)):
        return shown, {"tools": []}
    return shown, handed
