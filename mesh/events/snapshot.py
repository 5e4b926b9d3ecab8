"""What authors said, folded, as bytes and back: a cache that makes a start quick, no authority.

Whatever is wrong with a snapshot, the answer is the same: it is not used, the log is folded again.
Members are not in it: who is in is found anew from the decisions, and what an author said whose
standing is another than it was is folded again.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import msgpack

from mesh.events import apply as applying
from mesh.events.state import AuthorFold, Fact, State, Subject
from mesh.events.types import EventId
from mesh.types import NodeId

_VERSION = "hearthnet/state/v6"


def dump(state: State, rules_version: str) -> bytes | None:
    """The state as bytes; None while authors are stale."""
    if state.stale:
        return None
    authors = [
        [
            author,
            repr(fold.standing),
            fold.generation,
            fold.seq,
            [
                [*subject, *fact.order, fact.event_id, fact.wall_ms, fact.payload]
                for subject, fact in fold.facts.items()
            ],
        ]
        for author, fold in state.authors.items()
    ]
    content: bytes = msgpack.packb([_VERSION, rules_version, authors])
    return hashlib.sha256(content).digest() + content


def load(snapshot: bytes, state: State, rules_version: str) -> State:
    """The state with those authors' folds that were made by these rules under this standing."""
    digest, content = snapshot[:32], snapshot[32:]
    if hashlib.sha256(content).digest() != digest:
        return state
    try:
        version, by_rules, authors = msgpack.unpackb(content)
        if (version, by_rules) != (_VERSION, rules_version):
            return state
        folds = {
            NodeId(author): _fold(state, author, generation, seq, facts)
            for author, standing, generation, seq, facts in authors
            if standing == repr(applying.standing(state, author))
        }
    except (ValueError, TypeError):
        return state
    return replace(state, authors=folds)


def _fold(
    state: State, author: NodeId, generation: int, seq: int, rows: list[list[object]]
) -> AuthorFold:
    facts: dict[Subject, Fact] = {}
    for kind, name, lamport, by, event_seq, event_id, wall_ms, payload in rows:
        order = (lamport, NodeId(str(by)), event_seq)
        facts[str(kind), str(name)] = Fact(order, EventId(event_id), wall_ms, payload)  # type: ignore[arg-type]
    return AuthorFold(applying.standing(state, author), generation, seq, facts)
