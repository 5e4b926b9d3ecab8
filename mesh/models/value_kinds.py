"""What kinds of JSON an argument may be, by the schema of its function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEEPEST = 8
"""Schemas within schemas; deeper ones say nothing."""


def kinds_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """The types that the argument `key` may have, as far as the `schema` of all arguments says;
    none: any. What it does not speak of is a text."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, dict) else None
    return _kinds(found, schema, _DEEPEST) if isinstance(found, dict) else {"string"}


def kind_of(value: Any) -> str:
    """What a schema calls this value; a whole number is an integer."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else kinds.get(type(value), "object")


def _kinds(schema: Any, root: Mapping[str, Any], deep: int) -> set[str]:
    """As Pydantic writes them, among others: an `Optional[str]` is any of a string and null."""
    if not isinstance(schema, dict) or not deep:
        return set()
    if isinstance(path := schema.get("$ref"), str):
        return _kinds(_at(path, root), root, deep - 1)
    choices = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(choices, list):
        each = [_kinds(choice, root, deep - 1) for choice in choices]
        return set().union(*each) if all(each) else set()
    kinds, values = schema.get("type"), schema.get("enum")
    if isinstance(kinds, str):
        kinds = [kinds]
    if isinstance(kinds, list):
        found = {kind for kind in kinds if isinstance(kind, str)}
        return found | {"integer"} if "number" in found else found
    is_text = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return {"string"} if is_text else set()


def _at(path: str, root: Any) -> Any:
    """What a reference within a schema means; None where it means nothing there."""
    for name in path.removeprefix("#/").split("/"):
        root = root.get(name) if isinstance(root, dict) else None
    return root
