"""Who is in the hearth, at which trust level: plain data that `mesh.identity.membership` makes.

Answers questions and changes nothing. Knows nothing of events, links or how anybody got in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Protocol

from mesh.errors import UntrustedPeer
from mesh.types import NodeId


class SignedFact(Protocol):
    """What identity looks at of an event of the log."""

    @property
    def author(self) -> NodeId:
        """Who signed it."""

    @property
    def seq(self) -> int:
        """Its number in the author's chain, from 1, without gaps."""

    @property
    def id(self) -> bytes:
        """The SHA-256 of its body."""

    @property
    def lamport(self) -> int:
        """Greater than that of all events that its author had seen; grows along a chain."""

    @property
    def type(self) -> str:
        """The event type."""

    @property
    def payload(self) -> Any:
        """The event's content."""


class TrustLevel(IntEnum):
    """What a member may do; each level includes those below it."""

    MEMBER = 1
    """May link, and see who is there."""
    TRUSTED = 2
    """May serve and use shards."""
    ANCHOR = 3
    """May decide who is in."""

    @property
    def label(self) -> str:
        """``member``, ``trusted`` or ``anchor``."""
        return self.name.lower()

    @classmethod
    def parse(cls, text: str) -> TrustLevel:
        """The level of that label; ValueError when there is none."""
        for level in cls:
            if level.label == text:
                return level
        raise ValueError(f"{text!r} is not a trust level; expected member, trusted or anchor")


@dataclass(frozen=True, slots=True)
class Member:
    """One node that is in. `certificate` is DER; `added_by` the anchor that let it in."""

    node_id: NodeId
    public_key: bytes
    name: str
    level: TrustLevel
    added_by: NodeId
    certificate: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of an author's chain: its events after `last_seq` count for nothing, ever.

    The event at `last_seq` counts only if it has `last_hash`; 0 and b"" cut the whole chain.
    """

    last_seq: int
    last_hash: bytes

    def voids(self, seq: int, event_hash: bytes) -> bool:
        """Whether an event of the author falls to the cut."""
        if seq == self.last_seq and self.last_hash:
            return event_hash != self.last_hash
        return seq > self.last_seq


@dataclass(frozen=True, slots=True)
class Pending:
    """A decision that waits for more anchors: `action` is ``revoke`` or a level's label."""

    subject: NodeId
    action: str
    voters: tuple[NodeId, ...]
    needed: int


@dataclass(frozen=True, slots=True)
class Roster:
    """One hearth's members. Nodes in `cuts` are out for good, under that key.

    `frozen` ones of them are out because nobody can say who was right (two anchors revoked each
    other) or because they signed two histories. `former` are members that are out now. `keys` are
    the raw public keys of everybody who was ever let in, rightly or not, and `deciders` those who
    were ever made anchors: what they signed is kept and checked.

    It also is what the log asks for as `mesh.events.rules.Membership`.
    """

    hearth_id: str
    name: str = ""
    two_signatures: bool = True
    members: Mapping[NodeId, Member] = field(default_factory=dict)
    former: Mapping[NodeId, Member] = field(default_factory=dict)
    cuts: Mapping[NodeId, Cut] = field(default_factory=dict)
    frozen: frozenset[NodeId] = frozenset()
    pending: tuple[Pending, ...] = ()
    keys: Mapping[NodeId, bytes] = field(default_factory=dict)
    deciders: frozenset[NodeId] = frozenset()

    @property
    def revoked(self) -> frozenset[NodeId]:
        """Who was put out by a decision."""
        return frozenset(self.cuts) - self.frozen

    @property
    def anchors(self) -> tuple[NodeId, ...]:
        """Who decides."""
        return tuple(m.node_id for m in self.members.values() if m.level is TrustLevel.ANCHOR)

    @property
    def certificates(self) -> tuple[bytes, ...]:
        """The trust anchors for `mesh.identity.tls`."""
        return tuple(member.certificate for member in self.members.values())

    def is_member(self, node_id: str) -> bool:
        """Whether the node is in, at any level."""
        return NodeId(node_id) in self.members

    def at_least(self, node_id: str, level: TrustLevel) -> bool:
        """Whether the node is in at `level` or above."""
        member = self.members.get(NodeId(node_id))
        return member is not None and member.level >= level

    def require(self, node_id: str, level: TrustLevel = TrustLevel.MEMBER) -> Member:
        """The member, if it is in at `level` or above. Raises UntrustedPeer."""
        member = self.members.get(NodeId(node_id))
        if member is None:
            raise UntrustedPeer(
                f"{node_id[:9]} is not a member of this hearth.",
                fix="Pair it with `hearthnet invite` and `hearthnet join`.",
            )
        if member.level < level:
            raise UntrustedPeer(
                f"{member.name} is {member.level.label}; this needs {level.label}.",
                fix=f"An anchor can run `hearthnet members promote {member.name}`.",
            )
        return member

    # What the log asks.

    def limit(self, author: NodeId) -> int | None:
        """After which of the author's events the log need not keep more; None for no end.

        What an anchor signed after its cut is void but has to be known: if it revokes those who
        revoked it, then only nodes that have seen both can agree that both are frozen.
        """
        cut = self.cuts.get(author)
        return None if cut is None or author in self.deciders else cut.last_seq

    def standing(self, author: NodeId) -> tuple[TrustLevel | None, Cut | None]:
        """The level that the author has, or had when it was put out, and where it ends."""
        member = self.members.get(author) or self.former.get(author)
        return None if member is None else member.level, self.cuts.get(author)

    def admits(self, event: SignedFact) -> bool:
        """Whether an event counts: before its author's end, and what its level may say."""
        level, cut = self.standing(event.author)
        if level is None or (cut is not None and cut.voids(event.seq, event.id)):
            return False
        return level >= _LEVEL_FOR.get(event.type, TrustLevel.MEMBER)


_LEVEL_FOR = {
    "experimental.shard.advertised": TrustLevel.TRUSTED,
    "model.published": TrustLevel.TRUSTED,
    "placement.wished": TrustLevel.TRUSTED,
    "steering.published": TrustLevel.TRUSTED,
}


def freeze(roster: Roster, forked: Mapping[NodeId, int]) -> Roster:
    """The roster without those that signed two histories; `forked` has their last good seq."""
    cuts = dict(roster.cuts)
    for node, last_seq in forked.items():
        known = cuts.get(node)
        if known is None or last_seq < known.last_seq:
            cuts[node] = Cut(last_seq, b"")
    out = {n: member for n, member in roster.members.items() if n in cuts}
    return replace(
        roster,
        members={n: member for n, member in roster.members.items() if n not in cuts},
        former={**roster.former, **out},
        cuts=cuts,
        frozen=roster.frozen | frozenset(forked),
    )


def departed(before: Roster, after: Roster) -> frozenset[NodeId]:
    """Who is in `before` and not in `after`: whose live links are to be closed."""
    return frozenset(before.members) - frozenset(after.members)
