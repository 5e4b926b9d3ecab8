"""The door of a hearth's decisions: which ones are ever worth keeping, and what they come to.

What is let in was signed by an anchor of what it had seen, so it was lawful when it was signed as
far as its author says; whether it holds beside what others signed is `resolve`'s business. Gives
the log its `Rules` (see `mesh.events.rules`).
"""

from __future__ import annotations

from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from mesh.errors import BadEvent
from mesh.events.decision import SignedDecision
from mesh.events.graph import Graph
from mesh.events.types import Event
from mesh.identity import decisions
from mesh.identity.certificates import check_certificate
from mesh.identity.decisions import Decision, Founded, Recovered, Revoked
from mesh.identity.keys import node_id
from mesh.identity.membership.acts import Act, Acts, let_in
from mesh.identity.membership.reading import Court
from mesh.identity.membership.resolve import Resolver
from mesh.identity.membership.rulings import RulingKind, Votes, matter_of
from mesh.identity.recovery import proves
from mesh.identity.roster import Roster
from mesh.types import NodeId

_NOBODY: frozenset[NodeId] = frozenset()


class HearthRules:
    """The log's `Rules` for one hearth."""

    version = "hearthnet/membership/v2"

    def __init__(self, hearth_id: str) -> None:
        self.hearth_id = hearth_id

    def judge(self, graph: Graph) -> Judge:
        """The judge of the decisions in a graph, which is empty now."""
        return Judge(self.hearth_id, graph)


class Judge:
    """Follows a graph of decisions: `examine` each before it is added, `note` it afterwards.

    Not for several threads at a time. All else is a function of what is in the graph.
    """

    def __init__(self, hearth_id: str, graph: Graph) -> None:
        self._hearth_id = hearth_id
        self._graph = graph
        self._acts = Acts()
        self._votes = Votes()
        self._resolver = Resolver(self._acts, self._votes)
        self._court = Court(hearth_id, self._acts, self._votes, self._resolver)
        self._keys: dict[NodeId, bytes] = {}

    def key(self, decision: SignedDecision) -> bytes | None:
        """The raw public key of the author; None when nobody let it in and it brings none."""
        known = self._keys.get(decision.author)
        if known is not None:
            return known
        said = _read(decision)
        if not isinstance(said, Founded | Recovered):
            return None
        key = check_certificate(said.certificate)
        return key if node_id(key) == decision.author else None

    def permits(self, decision: SignedDecision) -> bool:
        """Whether a decision whose parents are all here can ever count.

        A function of the decision and its past only: the answer is the same on every node. The
        signature is not looked at.
        """
        try:
            said = decisions.decode(decision.type, decision.payload)
        except BadEvent:
            return False
        if isinstance(said, Founded):
            return self._is_founding(decision, said)
        if not self._acts.all:
            return False
        past = self._graph.reach(decision.parents)
        match said:
            case Recovered():
                return self.is_recovery(decision)
            case Revoked(subject) if subject == decision.author:
                return self._may_leave(subject, past)
        return decision.author in self._resolver.holding(past).anchors

    def note(self, decision: SignedDecision) -> None:
        """The decision was added to the graph; `permits` let it in."""
        said = decisions.decode(decision.type, decision.payload)
        past = self._graph.reach(decision.parents)
        order = (decision.depth, decision.author, decision.id)
        holding = self._resolver.holding(past) if past else None
        settled = self._settled(decision.author, said, past)
        bit = 1 << len(self._acts.all)
        if isinstance(said, Recovered):
            settled |= bit
        member = let_in(decision.author, said)
        act = Act(decision.author, order, bit, past, said, member, settled)
        if isinstance(said, Founded):
            self._resolver.two_signatures = said.two_signatures
        if member is not None:
            self._keys.setdefault(member.node_id, member.public_key)
        self._acts.add(act)
        matter = matter_of(act, holding.counted, holding.forked) if holding is not None else None
        self._votes.add(act, matter)
        self._resolver.note(act)

    def truncate(self, length: int) -> None:
        """Forget the decisions from this position on: they were not kept."""
        self._acts.truncate(length)
        self._votes.truncate((1 << length) - 1)
        self._resolver.truncate(length)
        self._keys = {
            node: key for node, key in self._keys.items() if node in self._acts.letting_in
        }

    def membership(self) -> Roster:
        """The roster after all decisions in the graph."""
        return self._court.roster()

    def acknowledged(self) -> int:
        """The mask of what the next decision of this node comes after: all that stands, or may.

        What was cut off is not acknowledged, nor is the second of two histories.
        """
        if not self._acts.all:
            return 0
        reading = self._resolver.holding(self._acts.everything).lenient
        return sum(act.bit for act in self._acts.all if reading.stands(act))

    def is_second_history(self, decision: SignedDecision) -> bool:
        """Whether the author has signed a decision here that this one's past does not have."""
        if decision.type == decisions.ACKNOWLEDGED:
            return False
        past = self._graph.reach(decision.parents)
        return bool(self._acts.unseen_by(decision.author, past))

    def second_histories(self, author: NodeId) -> int:
        """How many decisions of an author beside its first history nobody has acknowledged."""
        return sum(
            twin.act.author == author
            and not twin.acknowledged_by
            and twin.rivals & -twin.rivals < twin.act.bit
            for twin in self._acts.twins.values()
        )

    def is_recovery(self, decision: SignedDecision) -> bool:
        """Whether the recovery code's key has signed all of a decision that its author recovers."""
        said = _read(decision)
        if not isinstance(said, Recovered) or not self._acts.all:
            return False
        founding = self._acts[0].decision
        assert isinstance(founding, Founded)  # noqa: S101 - nothing else is let in first
        statement = decisions.recovery_statement(
            self._hearth_id, said, decision.parents, decision.wall_ms
        )
        return said.subject == decision.author and proves(
            founding.recovery_key, said.proof, statement
        )

    def rewrites(self, decision: SignedDecision) -> bool:
        """Whether a decision would bring in another history than others have acknowledged here.

        Of two histories of one author each can look as true as the other, with anchors that only
        it has made. The one that this node has seen acknowledged stands; another joins it when an
        anchor of the hearth as it stands here has acknowledged it, and not when only its own have.
        """
        if decision.type == decisions.RECOVERED:
            return False
        past = self._graph.reach(decision.parents)
        twins = self._acts.twins
        brought = [
            twin
            for twin in twins.values()
            if twin.act.bit & past
            and twin.act.author != decision.author
            and not twin.acknowledged_by
            and any(
                other.acknowledged_by and other.act.bit & twin.rivals for other in twins.values()
            )
        ]
        if not brought:
            return False
        return decision.author not in self._resolver.holding(past).anchors & self.anchors()

    def anchors(self) -> frozenset[NodeId]:
        """The anchors by all decisions in the graph."""
        return self._resolver.holding(self._acts.everything).anchors if self._acts.all else _NOBODY

    def signed_by(self, author: NodeId) -> int:
        """How many decisions of an author are here."""
        return len(self._acts.by_author.get(author, ()))

    def _is_founding(self, decision: SignedDecision, said: Founded) -> bool:
        return (
            not self._acts.all
            and not decision.parents
            and decision.wall_ms == said.founded_ms
            and decisions.hearth_id(said) == self._hearth_id
            and node_id(said.founder_key) == decision.author
        )

    def _may_leave(self, node: NodeId, past: int) -> bool:
        """Once, and only out of what one was let into."""
        let_in = any(act.bit & past for act in self._acts.letting_in.get(node, ()))
        return let_in and not any(
            isinstance(act.decision, Revoked) and act.decision.subject == node and act.bit & past
            for act in self._acts.by_author.get(node, ())
        )

    def _settled(self, author: NodeId, said: Decision | None, past: int) -> int:
        """What a decision goes on from: the recoveries and its author's readmissions it knows."""
        mask = past if isinstance(said, Recovered) else 0
        for act in self._acts.recoveries:
            if act.bit & past:
                mask |= act.reach
        if author in self._votes.candidates:
            for ruling in self._resolver.holding(past).decided if past else ():
                if ruling.matter.kind is RulingKind.READMIT and ruling.subject == author:
                    mask |= ruling.mask
        return mask


def _read(decision: SignedDecision) -> Decision | None:
    """What it says; None for what this version cannot read."""
    try:
        return decisions.decode(decision.type, decision.payload)
    except BadEvent:
        return None


def verify(event: Event, membership: object) -> bool | None:
    """The log's `Verify`: whether the author signed the event; None when its key is unknown.

    `membership` is the `Roster` that a `Judge` made.
    """
    assert isinstance(membership, Roster)  # noqa: S101 - the log hands back what we made
    key = membership.keys.get(event.author)
    return None if key is None else signed_by(key, event.signature, event.signed_bytes)


def signed_by(key: bytes, signature: bytes, signed_bytes: bytes) -> bool:
    """Whether the owner of a raw Ed25519 key signed these bytes."""
    try:
        _public_key(key).verify(signature, signed_bytes)
    except InvalidSignature:
        return False
    return True


@lru_cache(maxsize=1024)
def _public_key(raw: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(raw)
