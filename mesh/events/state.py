"""What the log says, as a value: per author the newest event about each subject, and who is in.

Authors are folded apart, because within one chain events never come late; what is newest overall
is the largest in canonical order, and last words count before all else. So no late event ever makes
another one be undone, and the state does not depend on the order of arrival. Plain data: how it
changes is `mesh.events.apply`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mesh.events.rules import Membership
from mesh.events.types import (
    MODEL_PUBLISHED,
    NODE_NAMED,
    PLACEMENT_PLANNED,
    PLACEMENT_WISHED,
    SHARD_ADVERTISED,
    STEERING_PUBLISHED,
    TOKEN_REVOKED,
    EventId,
    Order,
    Payload,
    Place,
)
from mesh.types import NodeId

SUBJECT_FIELDS: Mapping[str, str] = {
    MODEL_PUBLISHED: "model_id",
    NODE_NAMED: "node_id",
    PLACEMENT_PLANNED: "deployment",
    PLACEMENT_WISHED: "deployment",
    SHARD_ADVERTISED: "shard_id",
    STEERING_PUBLISHED: "name",
    TOKEN_REVOKED: "token_id",
}
"""For each type that is applied, the payload's field that says what the event is about."""

_LAST_WORDS: Mapping[str, str] = {PLACEMENT_WISHED: "evicted"}
"""For types whose subjects may end for good, the payload's field that is true when they do."""

MOST_SUBJECTS: Mapping[str, int] = {NODE_NAMED: 1, TOKEN_REVOKED: 1024}
"""For types of which only an author's newest count, how many: tokens live short, and each node has
its own name."""

Subject = tuple[str, str]
"""An event type and the subject's name."""


@dataclass(frozen=True, slots=True)
class Fact:
    """The event about a subject that counts. `payload` keeps keys that nobody here knows."""

    order: Order
    event_id: EventId
    wall_ms: int
    payload: dict[str, Any]

    @property
    def author(self) -> NodeId:
        """Who says so."""
        return self.order[1]


def outranks(kind: str, fact: Fact, other: Fact) -> bool:
    """Whether of two facts of a type about one subject the first counts: a last word before any
    other, else the newer."""
    field_name = _LAST_WORDS.get(kind, "")
    is_last, other_is_last = (each.payload.get(field_name) is True for each in (fact, other))
    return (is_last, fact.order) > (other_is_last, other.order)


@dataclass(frozen=True, slots=True)
class AuthorFold:
    """One author's events of a generation up to `seq`, folded while its standing was `standing`."""

    standing: Hashable
    generation: int
    seq: int
    facts: Mapping[Subject, Fact]


@dataclass(frozen=True, slots=True)
class State:
    """A function of the membership and the set of valid events and fork proofs; nothing else.

    `frozen` holds, of authors that forked their chain, its generation and the last sequence number
    that counts. `stale` are authors whose standing changed: what they said is withheld until
    `mesh.events.apply.refold` read their chain again.
    """

    membership: Membership
    authors: Mapping[NodeId, AuthorFold] = field(default_factory=dict)
    frozen: Mapping[NodeId, Place] = field(default_factory=dict)
    stale: frozenset[NodeId] = frozenset()

    def limit(self, author: NodeId) -> Place | None:
        """Generation and number of the author's last event that counts; None for no end."""
        cut = self.membership.limit(author)
        frozen = self.frozen.get(author)
        if cut is None or frozen is None:
            return cut if frozen is None else frozen
        return min(cut, frozen)

    def models(self) -> dict[str, Fact]:
        """The newest publication of each model, by model id."""
        return self._newest(MODEL_PUBLISHED)

    def steering(self) -> dict[str, Fact]:
        """The newest steering edit of each name; one that was removed says no more than that."""
        return self._newest(STEERING_PUBLISHED)

    def wishes(self) -> dict[str, Fact]:
        """The newest wish of each deployment, by its id; of one that was evicted the wish that said
        so, whatever was wished by who had not heard of it."""
        return self._newest(PLACEMENT_WISHED)

    def plans(self) -> dict[str, list[Fact]]:
        """Each author's newest plan of each deployment, by its id, newest first.

        All of them, because the newest may have been made for a wish that counts no longer.
        """
        found: dict[str, list[Fact]] = {}
        for fold in self.authors.values():
            for (kind, name), fact in fold.facts.items():
                if kind == PLACEMENT_PLANNED:
                    found.setdefault(name, []).append(fact)
        return {
            name: sorted(facts, key=lambda fact: fact.order, reverse=True)
            for name, facts in found.items()
        }

    def advertised_shards(self) -> dict[tuple[NodeId, str], Fact]:
        """Shards advertised for the record, by node and shard id; says nothing about now."""
        return {
            (author, name): fact
            for author, fold in self.authors.items()
            for (kind, name), fact in fold.facts.items()
            if kind == SHARD_ADVERTISED
        }

    def restated(self, author: NodeId) -> list[tuple[str, Payload]]:
        """What of an author's facts is still news: what it would say when it began again."""
        fold = self.authors.get(author)
        facts = fold.facts if fold is not None else {}
        newest = {kind: self._newest(kind) for kind in SUBJECT_FIELDS if kind != SHARD_ADVERTISED}
        live = [
            (fact.order, kind, fact.payload)
            for (kind, name), fact in facts.items()
            if kind == SHARD_ADVERTISED or newest[kind][name] is fact
        ]
        return [(kind, payload) for _, kind, payload in sorted(live, key=lambda row: row[0])]

    def _newest(self, wanted: str) -> dict[str, Fact]:
        newest: dict[str, Fact] = {}
        for fold in self.authors.values():
            for (kind, name), fact in fold.facts.items():
                if kind == wanted and (name not in newest or outranks(kind, fact, newest[name])):
                    newest[name] = fact
        return newest
