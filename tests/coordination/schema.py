"""A structural schema of Kubernetes, as far as the shipped definition uses one."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
}


def violations(value: Any, schema: dict[str, Any], at: str = "") -> Iterator[str]:
    """What an API server with strict field validation says against `value`."""
    kind = schema["type"]
    if not isinstance(value, _TYPES[kind]) or (kind == "integer" and isinstance(value, bool)):
        yield f"{at}: must be of type {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: unsupported value {value!r}"
    if kind == "object":
        yield from (
            f"{at}.{name}: required" for name in schema.get("required", ()) if name not in value
        )
        for name, inner in value.items():
            if name not in schema["properties"]:
                yield f"{at}.{name}: unknown field"
            else:
                yield from violations(inner, schema["properties"][name], f"{at}.{name}")
    elif kind == "array":
        for index, inner in enumerate(value):
            yield from violations(inner, schema["items"], f"{at}[{index}]")
    elif kind == "integer" and value < schema.get("minimum", value):
        yield f"{at}: too small"
    elif kind == "string":
        yield from _text(value, schema, at)


def _text(value: str, schema: dict[str, Any], at: str) -> Iterator[str]:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        yield f"{at}: length"
    if "pattern" in schema and re.search(schema["pattern"], value) is None:
        yield f"{at}: does not match {schema['pattern']}"
    try:
        if schema.get("format") == "byte":
            base64.b64decode(value, validate=True)
        if schema.get("format") == "date-time":
            datetime.strptime(value, "%Y-%m-%dT%H:%M:%S%z")
    except (binascii.Error, ValueError):
        yield f"{at}: is no {schema['format']}"
