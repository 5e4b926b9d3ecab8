"""Which node people mean by a name or an id. Never decides who is trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeGuard

from mesh.identity.decisions import MAX_NAME
from mesh.identity.keys import short_id, without_prefix
from mesh.types import NodeId

_SHORTEST = 6
"""Characters of an id's beginning that may stand for it."""


def nodes_meant(who: str, known: Iterable[tuple[NodeId, str]]) -> list[NodeId]:
    """Those of `known`, ids with what they are called, that `who` may mean: an id before a name, a
    name before the beginning of an id, with or without what all ids begin with."""
    pairs = list(known)
    ways: tuple[Callable[[NodeId, str], bool], ...] = (
        lambda node, name: node == who,
        lambda node, name: name == who,
        lambda node, name: len(who) >= _SHORTEST and node.startswith(who),
        lambda node, name: len(who) >= _SHORTEST and without_prefix(node).startswith(who),
    )
    for is_meant in ways:
        if found := sorted({node for node, name in pairs if is_meant(node, name)}):
            return found
    return []


def is_name(said: object) -> TypeGuard[str]:
    """Whether a node can be called that."""
    return isinstance(said, str) and 1 <= len(said) <= MAX_NAME and said.isprintable()


def called(known: Iterable[tuple[NodeId, str]]) -> dict[NodeId, str]:
    """What to call each for people, in the order of their names: where several share one, how its
    id begins as well."""
    names = dict(sorted(known, key=lambda pair: (pair[1], pair[0])))
    counts = Counter(names.values())
    return {
        node: name if counts[name] == 1 else f"{short_id(node)} ({name})"
        for node, name in names.items()
    }


def told_apart(known: Iterable[tuple[NodeId, str]]) -> str:
    """What can be said to mean each, for people."""
    return ", ".join(called(known).values())
