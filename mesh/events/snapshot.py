"""A `State` as bytes and back: a cache that makes a start quick, never an authority.

Whatever is wrong with a snapshot, the answer is the same: it is not used, the log is folded again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgpack

from mesh.errors import BadEvent
from mesh.events import apply as applying
from mesh.events.rules import Rules
from mesh.events.state import AuthorFold, Fact, State, Subject
from mesh.events.types import EventId, decode
from mesh.types import NodeId

_VERSION = "hearthnet/state/v1"


def dump(state: State, rules_version: str) -> bytes | None:
    """The state as bytes; None while authors are stale."""
    if state.stale:
        return None
    authors = [
        [
            author,
            fold.seq,
            [
                [*subject, *fact.order, fact.event_id, fact.wall_ms, fact.payload]
                for subject, fact in fold.facts.items()
            ],
        ]
        for author, fold in state.authors.items()
    ]
    members = [[event.body, event.signature] for event in state.member_events]
    content: bytes = msgpack.packb([_VERSION, rules_version, members, dict(state.frozen), authors])
    return hashlib.sha256(content).digest() + content


def load(snapshot: bytes, rules: Rules, frozen: Mapping[NodeId, int]) -> State | None:
    """The state that was dumped, or None when it was not by these rules or for these forks."""
    digest, content = snapshot[:32], snapshot[32:]
    if hashlib.sha256(content).digest() != digest:
        return None
    try:
        version, rules_version, members, frozen_then, authors = msgpack.unpackb(content)
        if version != _VERSION or rules_version != rules.version or frozen_then != frozen:
            return None
        state = State(applying.empty(rules).membership, frozen=dict(frozen))
        state = applying.apply(rules, state, [decode(body, sig) for body, sig in members])
        folds = {NodeId(author): _fold(state, author, seq, facts) for author, seq, facts in authors}
    except (ValueError, TypeError, BadEvent):
        return None
    return State(state.membership, state.member_events, folds, state.frozen)


def _fold(state: State, author: NodeId, seq: int, rows: list[list[object]]) -> AuthorFold:
    facts: dict[Subject, Fact] = {}
    for kind, name, lamport, by, event_seq, event_id, wall_ms, payload in rows:
        order = (lamport, NodeId(str(by)), event_seq)
        facts[str(kind), str(name)] = Fact(order, EventId(event_id), wall_ms, payload)  # type: ignore[arg-type]
    return AuthorFold(applying.standing(state, author), seq, facts)
