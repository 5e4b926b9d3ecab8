"""The roster: members and their trust levels, plain data that `mesh.identity.membership` makes.

Answers questions and changes nothing. Knows nothing of events, links or how anybody got in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from mesh.codec import Int63
from mesh.errors import UntrustedPeer
from mesh.events.types import Event
from mesh.types import NodeId


class TrustLevel(IntEnum):
    """A member's rights; each level includes those below it."""

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
    """One node that is in. `certificate` is DER; `added_by` the anchor that let it in.

    `name` is what it calls itself now; `let_in_as` what it was let in as, where that is another.
    """

    node_id: NodeId
    public_key: bytes
    name: str
    level: TrustLevel
    added_by: NodeId
    certificate: bytes = field(repr=False)
    let_in_as: str = ""

    def called(self, name: str) -> Member:
        """The same one by the name that it gives itself."""
        return self if name == self.name else replace(self, name=name, let_in_as=self.name)


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """The end of an author's facts: what it says after `last_seq` counts for nothing, ever.

    The fact at `last_seq` counts only if it has `last_hash`; (0, 0, b"") cuts all of them.
    """

    generation: Int63
    last_seq: Int63
    last_hash: bytes

    def voids(self, fact: Event) -> bool:
        """Whether a fact of the author falls to the cut."""
        here, end = (fact.generation, fact.seq), (self.generation, self.last_seq)
        return here > end or (here == end and fact.id != self.last_hash)


@dataclass(frozen=True, slots=True)
class Pending:
    """A decision that waits for more anchors.

    `action` is ``revoke``, ``readmit`` or a level's label.
    """

    subject: NodeId
    action: str
    voters: tuple[NodeId, ...]
    needed: int


@dataclass(frozen=True, slots=True)
class Roster:
    """One hearth's members. Nodes in `cuts` are out for good, under that key.

    `frozen` ones of them are out because nobody can say who was right: two anchors revoked each
    other. `former` are members that are out now. `forked` are anchors that signed two histories:
    until they are readmitted they may do what a member of the lowest level may. `keys` are the raw
    public keys of everybody who was ever let in, rightly or not.

    It also is what the log asks for as `mesh.events.rules.Membership`.
    """

    hearth_id: str
    name: str = ""
    two_signatures: bool = True
    members: Mapping[NodeId, Member] = field(default_factory=dict)
    former: Mapping[NodeId, Member] = field(default_factory=dict)
    cuts: Mapping[NodeId, Cut] = field(default_factory=dict)
    frozen: frozenset[NodeId] = frozenset()
    forked: frozenset[NodeId] = frozenset()
    pending: tuple[Pending, ...] = ()
    keys: Mapping[NodeId, bytes] = field(default_factory=dict)

    @property
    def anchors(self) -> tuple[NodeId, ...]:
        """The members that decide."""
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

    def limit(self, author: NodeId) -> tuple[int, int] | None:
        """Generation and number of the author's last fact that counts; None for no end."""
        cut = self.cuts.get(author)
        return None if cut is None else (cut.generation, cut.last_seq)

    def standing(self, author: NodeId) -> tuple[TrustLevel | None, Cut | None]:
        """The level by which the author's facts count, and where they end.

        For who was put out it is the last one; a fork of decisions says nothing about facts.
        """
        member = self.members.get(author) or self.former.get(author)
        if member is None:
            return None, self.cuts.get(author)
        level = TrustLevel.TRUSTED if author in self.forked else member.level
        return level, self.cuts.get(author)

    def admits(self, fact: Event) -> bool:
        """Whether a fact counts: before its author's end, and what its level may say."""
        level, cut = self.standing(fact.author)
        if level is None or (cut is not None and cut.voids(fact)):
            return False
        return level >= _LEVEL_FOR.get(fact.type, TrustLevel.MEMBER)


_LEVEL_FOR = {
    "experimental.shard.advertised": TrustLevel.TRUSTED,
    "model.published": TrustLevel.TRUSTED,
    "placement.planned": TrustLevel.TRUSTED,
    "placement.wished": TrustLevel.TRUSTED,
    "steering.published": TrustLevel.TRUSTED,
    "token.revoked": TrustLevel.TRUSTED,
}
"""Tokens are signed by who may use shards, so who may not has none to revoke."""


def departed(before: Roster, after: Roster) -> frozenset[NodeId]:
    """The members of `before` that are not in `after`: their live links are to be closed."""
    return frozenset(before.members) - frozenset(after.members)
