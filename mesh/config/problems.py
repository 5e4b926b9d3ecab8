"""What is wrong with settings, in words: the key, where its value is from, and what is allowed.

Reads no settings, and takes their meaning from the fields' docstrings.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ValidationError

from mesh.errors import BadValue, ConfigError, UnknownKey


def meanings(section: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """What every key below a section means, by dotted key."""
    found: dict[str, str] = {}
    texts = _docstrings(section)
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= meanings(kind, f"{prefix}{name}.")
        else:
            found[prefix + name] = " ".join(texts.get(name, "").split())
    return found


def _docstrings(section: type[BaseModel]) -> dict[str, str]:
    """Those of a section's fields, read when they are asked for: pydantic would look for each as
    the class is made, for a tenth of the time that a command takes to start."""
    (its_class,) = ast.parse(inspect.getsource(section)).body
    return {
        field.target.id: text.value.value
        for field, text in pairwise(ast.iter_child_nodes(its_class))
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }


def first_problem(
    error: ValidationError, origins: Mapping[str, str], known: Mapping[str, str]
) -> ConfigError:
    """The error of the first key that has one; `known` are the `meanings`."""
    problems = error.errors(include_url=False)
    keys = [_key(problem["loc"], known) for problem in problems]
    key = keys[0]
    if problems[0]["type"] == "extra_forbidden":
        # Of a section that nobody knows the keys in it have an origin.
        given = (origins[each] for each in origins if f"{each}.".startswith(f"{key}."))
        return unknown(key, known, next(given, "the configuration"))
    # Every branch of a union reports.
    same = [_why(problem) for problem, its in zip(problems, keys, strict=True) if its == key]
    why = "; ".join(dict.fromkeys(same))
    if not key:
        return BadValue(f"{why}.", fix="Correct the settings.")
    meaning = known.get(key, "").replace("`", "")
    return BadValue(
        f"{key} (from {origins.get(key, 'default')}) has a value that cannot be used: {why}.",
        fix=f"What it means: {meaning}" if meaning else "It is a section: set the keys in it.",
        param=key,
    )


def unknown(key: str, known: Collection[str], origin: str) -> UnknownKey:
    """The error for a setting that `origin` has and nobody knows."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    section = key[: key.rfind(".") + 1]
    while section and not any(name.startswith(section) for name in known):
        section = section[: section.rstrip(".").rfind(".") + 1]
    there = (name[len(section) :].partition(".")[0] for name in known if name.startswith(section))
    fix = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(dict.fromkeys(there))}."
    return UnknownKey(f"{origin} sets {key}, which is no setting.", fix=fix, param=key)


def _key(location: tuple[int | str, ...], known: Mapping[str, str]) -> str:
    """The key as people write it: a union's branch is part of the location ("threads.int")."""
    path = [str(part) for part in location if not isinstance(part, int)]
    whole = ".".join(path)
    while path and (key := ".".join(path)) not in known:
        path.pop()
    return key if path else whole


def _why(problem: Any) -> str:
    if problem["type"] == "string_pattern_mismatch":
        return "it is not written as it has to be"
    return str(problem["msg"]).removeprefix("Value error, ")
