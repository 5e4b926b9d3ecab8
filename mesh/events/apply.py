"""How events make a `State`. Pure: no clock, no I/O, arguments are never changed.

`fold` is the definition; `apply`, `freeze` and `refold` get to the same state step by step, with
an author's own events in the order of its chain and authors interleaved at will. Refuses to judge
signatures or chains: what comes in here is valid.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from mesh.events.rules import Membership, Rules
from mesh.events.state import SUBJECT_FIELDS, AuthorFold, Fact, State, Subject
from mesh.events.types import Event
from mesh.types import NodeId


def empty(rules: Rules) -> State:
    """The state of a log without events."""
    return State(rules.derive(()))


def fold(rules: Rules, events: Iterable[Event], frozen: Mapping[NodeId, int]) -> State:
    """The state of a whole log: this is what a log means."""
    ordered = sorted(events, key=lambda event: event.order)
    members = tuple(event for event in ordered if rules.concerns(event.type))
    state = State(_derive(rules, members, frozen), members, frozen=frozen)
    chains: dict[NodeId, list[Event]] = {}
    for event in ordered:
        chains.setdefault(event.author, []).append(event)
    for author, chain in chains.items():
        state = refold(replace(state, stale=frozenset({author})), author, chain)
    return state


def apply(rules: Rules, state: State, events: Sequence[Event]) -> State:
    """The state with these events in it too; costs one copy of what their authors said before.

    Events that are in it already change nothing. A membership event may leave authors `stale`.
    """
    members = [event for event in events if rules.concerns(event.type)]
    if members:
        state = _with_members(rules, state, members)
    chains: dict[NodeId, list[Event]] = {}
    for event in events:
        if event.author not in state.stale:
            chains.setdefault(event.author, []).append(event)
    authors = dict(state.authors)
    for author, chain in chains.items():
        before = authors.get(author)
        authors[author] = _extend(state, author, before or _blank(state, author), chain)
    return replace(state, authors=authors)


def freeze(rules: Rules, state: State, author: NodeId, last_seq: int) -> State:
    """The state after a proof that the author forked behind `last_seq`."""
    known = state.frozen.get(author)
    if known is not None and known <= last_seq:
        return state
    frozen = {**state.frozen, author: last_seq}
    membership = _derive(rules, state.member_events, frozen)
    return _restand(replace(state, frozen=frozen, membership=membership))


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


def _with_members(rules: Rules, state: State, members: Sequence[Event]) -> State:
    by_id = {event.id: event for event in (*state.member_events, *members)}
    ordered = tuple(sorted(by_id.values(), key=lambda event: event.order))
    membership = _derive(rules, ordered, state.frozen)
    return _restand(replace(state, member_events=ordered, membership=membership))


def _derive(rules: Rules, members: Sequence[Event], frozen: Mapping[NodeId, int]) -> Membership:
    """Membership from events that no fork has made void."""
    return rules.derive(
        [e for e in members if (last := frozen.get(e.author)) is None or e.seq <= last]
    )


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
    return AuthorFold(standing(state, author), 0, {})


def _extend(state: State, author: NodeId, before: AuthorFold, chain: Iterable[Event]) -> AuthorFold:
    facts: dict[Subject, Fact] = dict(before.facts)
    limit = state.limit(author)
    seq = before.seq
    for event in chain:
        if event.seq <= seq or (limit is not None and event.seq > limit):
            continue
        seq = event.seq
        named, payload = SUBJECT_FIELDS.get(event.type), event.payload
        if named is None or not isinstance(payload, dict):
            continue
        name = payload.get(named)
        if isinstance(name, str) and state.membership.admits(event):
            facts[event.type, name] = Fact(event.order, event.id, event.wall_ms, payload)
    return AuthorFold(before.standing, seq, facts)
