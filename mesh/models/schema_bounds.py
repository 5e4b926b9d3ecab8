"""Which JSON schemas are too much for llguidance, as it would block or end the process with them.

It bounds much of its work by itself. What is bounded here takes it time or memory that grows faster
than what it counts, before it counts or while the loop waits for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from math import lcm
from typing import Any

MAX_EXPRESSION = 4096
"""Letters of a regular expression. Of `.?.?.?` and the like 4000 take half a second, 16,000 ten
seconds and a gigabyte, 60,000 minutes and 16."""

_MAX_LETTERS = 128 << 10
"""Of a schema as JSON: a text that has to be said is looked through on the loop."""
_MAX_MULTIPLE = 1 << 16
"""A number's digits are followed by as many states as `multipleOf` has numbers below it: a million
take seven seconds, ten million minutes and gigabytes."""
_MAX_NAMES = 64
"""Expressions of one object's `patternProperties`, each compared with all others: 300 take four
seconds, 1000 minutes."""
_MAX_REFERRED = 2000
"""Levels of references in references, which are followed by recursion: some 4000 overflow a stack
of 8 MiB."""
_MAX_PATTERNS = 12
"""The time doubles with each one that is to hold together with others."""


def is_too_much(schema: Mapping[str, Any]) -> str:
    """Why following a schema could end or block the process; empty where it could not."""
    if (letters := len(json.dumps(schema))) > _MAX_LETTERS:
        return f"it has {letters} letters; there may be {_MAX_LETTERS}"
    levels = list(_levels(schema))
    places = [place for level in levels for place in level]
    return _too_long(places) or _too_many(places) or _too_far(places, len(levels))


def _levels(schema: Mapping[str, Any]) -> Iterator[list[Mapping[str, Any]]]:
    """The objects at each depth."""
    level: list[Any] = [schema]
    while level:
        yield [each for each in level if isinstance(each, Mapping)]
        level = [inner for outer in level for inner in _inside(outer)]


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_long(places: Iterable[Mapping[str, Any]]) -> str:
    multiple = 1
    for place in places:
        names = place.get("patternProperties")
        names = list(names) if isinstance(names, Mapping) else []
        if len(names) > _MAX_NAMES:
            return f"it has {len(names)} patternProperties; there may be {_MAX_NAMES}"
        for expression in (place.get("pattern"), *names):
            if isinstance(expression, str) and len(expression) > MAX_EXPRESSION:
                return f"a pattern has {len(expression)} letters; there may be {MAX_EXPRESSION}"
        multiple = lcm(multiple, _significant(place.get("multipleOf")))
        if multiple > _MAX_MULTIPLE:
            return f"the least common multiple of its multipleOf is over {_MAX_MULTIPLE}"
    return ""


def _significant(number: object) -> int:
    """A number without its point and the zeros behind it."""
    if not isinstance(number, int | float) or not number:
        return 1
    return int("".join(map(str, Decimal(str(number)).normalize().as_tuple().digits)))


def _too_many(places: Iterable[Mapping[str, Any]]) -> str:
    patterns, joins = 0, 0
    for place in places:
        patterns += "pattern" in place
        joins += "$ref" in place and len(place) > 1
        if isinstance(together := place.get("allOf"), list):
            joins += len(together)
    if min(patterns, joins) <= _MAX_PATTERNS:
        return ""
    return f"at most {_MAX_PATTERNS} patterns can hold together, by allOf or beside $ref"


def _too_far(places: Iterable[Mapping[str, Any]], depth: int) -> str:
    references = {name for place in places if isinstance(name := place.get("$ref"), str)}
    if len(references) * depth <= _MAX_REFERRED:
        return ""
    return (
        f"its $ref name {len(references)} places, and it is nested {depth} deep; the product may"
        f" be {_MAX_REFERRED}"
    )
