"""How events make a `State`. Pure: no clock, no I/O, arguments are never changed.

`fold` is the definition; `apply`, `with_membership`, `freeze` and `refold` get to the same state
step by step, with an author's own events in the order of its chain and authors interleaved at will.
Refuses to judge signatures or chains: what comes in here is valid.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from mesh.events.rules import Membership
from mesh.events.state import (
    MOST_SUBJECTS,
    SUBJECT_FIELDS,
    AuthorFold,
    Fact,
    State,
    Subject,
    outranks,
)
from mesh.events.types import Event, Place
from mesh.types import NodeId


def fold(membership: Membership, events: Iterable[Event], frozen: Mapping[NodeId, Place]) -> State:
    """The state of a whole log: this is what a log means."""
    state = State(membership, frozen=frozen)
    chains: dict[NodeId, list[Event]] = {}
    for event in sorted(events, key=lambda event: event.place):
        chains.setdefault(event.author, []).append(event)
    for author, chain in chains.items():
        newest = [event for event in chain if event.generation == chain[-1].generation]
        state = refold(replace(state, stale=frozenset({author})), author, newest)
    return state


def apply(state: State, events: Sequence[Event]) -> State:
    """The state with these events in it too; costs one copy of what their authors said before.

    Events that are in it already change nothing. Before those of a new generation `begin_again`.
    """
    chains: dict[NodeId, list[Event]] = {}
    for event in events:
        if event.author not in state.stale:
            chains.setdefault(event.author, []).append(event)
    authors = dict(state.authors)
    for author, chain in chains.items():
        before = authors.get(author)
        authors[author] = _extend(state, author, before or _blank(state, author), chain)
    return replace(state, authors=authors)


def with_membership(state: State, membership: Membership) -> State:
    """The state after members came, went or changed. May leave authors `stale`."""
    return _restand(replace(state, membership=membership))


def freeze(state: State, author: NodeId, last: Place) -> State:
    """The state after a proof that the author forked its chain behind `last`."""
    known = state.frozen.get(author)
    if known is not None and known <= last:
        return state
    return _restand(replace(state, frozen={**state.frozen, author: last}))


def begin_again(state: State, author: NodeId) -> State:
    """The state when an author's chain is replaced by one of a new generation."""
    frozen = {node: last for node, last in state.frozen.items() if node != author}
    authors = {node: kept for node, kept in state.authors.items() if node != author}
    return replace(state, frozen=frozen, authors=authors, stale=state.stale - {author})


def unfrozen(state: State, author: NodeId) -> State:
    """The state as if its author had not forked its chain; leaves the author `stale`."""
    state = begin_again(state, author)
    return replace(state, stale=state.stale | {author})


def gathered(
    state: State, author: NodeId, known: Mapping[Subject, Fact], chain: Iterable[Event]
) -> Mapping[Subject, Fact]:
    """The facts that an author has said in these events, which follow each other, or before, by
    what is `known`; where it forked its chain does not matter."""
    state = unfrozen(state, author)
    return _extend(state, author, replace(_blank(state, author), facts=known), chain).facts


def joined(state: State, author: NodeId, facts: Mapping[Subject, Fact]) -> State:
    """The state with these facts, which the author has said in another history, as well."""
    fold = state.authors.get(author)
    if fold is None or not facts:
        return state
    both = dict(fold.facts)
    for subject, fact in facts.items():
        if subject not in both or outranks(subject[0], fact, both[subject]):
            both[subject] = fact
    for kind in MOST_SUBJECTS:
        _keep_newest(both, kind)
    return replace(state, authors={**state.authors, author: replace(fold, facts=both)})


def refold(state: State, author: NodeId, chain: Iterable[Event]) -> State:
    """The state with a stale author's whole chain folded under its present standing."""
    if author not in state.stale:
        return state
    authors = dict(state.authors)
    authors[author] = _extend(state, author, _blank(state, author), chain)
    return replace(state, authors=authors, stale=state.stale - {author})


def standing(state: State, author: NodeId) -> Hashable:
    """All that decides about an author's events."""
    return state.membership.standing(author), state.limit(author)


def _restand(state: State) -> State:
    """Withhold what authors said whose standing is no longer the one it was folded under."""
    moved = {
        author
        for author, before in state.authors.items()
        if before.standing != standing(state, author)
    }
    if not moved:
        return state
    authors = {author: kept for author, kept in state.authors.items() if author not in moved}
    return replace(state, authors=authors, stale=state.stale | moved)


def _blank(state: State, author: NodeId) -> AuthorFold:
    return AuthorFold(standing(state, author), 0, 0, {})


def _extend(state: State, author: NodeId, before: AuthorFold, chain: Iterable[Event]) -> AuthorFold:
    facts: dict[Subject, Fact] = dict(before.facts)
    limit = state.limit(author)
    place = before.generation, before.seq
    fuller: set[str] = set()
    for event in chain:
        if event.place <= place or (limit is not None and event.place > limit):
            continue
        place = event.place
        named, payload = SUBJECT_FIELDS.get(event.type), event.payload
        if named is None or not isinstance(payload, dict):
            continue
        name = payload.get(named)
        if not isinstance(name, str) or not state.membership.admits(event):
            continue
        subject, fact = (event.type, name), Fact(event.order, event.id, event.wall_ms, payload)
        if subject not in facts or outranks(event.type, fact, facts[subject]):
            facts[subject] = fact
            fuller.add(event.type)
    for kind in fuller & MOST_SUBJECTS.keys():
        _keep_newest(facts, kind)
    return AuthorFold(before.standing, *place, facts)


def _keep_newest(facts: dict[Subject, Fact], kind: str) -> None:
    """What is dropped is older than all that stays, so it does not matter when that is done."""
    of_kind = [(fact.order, subject) for subject, fact in facts.items() if subject[0] == kind]
    for _, subject in sorted(of_kind)[: -MOST_SUBJECTS[kind]]:
        del facts[subject]
