"""The decisions of the log in memory: their graph, what waits for its parents, and who is in.

Decides on each decision that is offered and never does I/O. Whoever stores them brackets offers
with `begin` and `commit` or `rollback`. Judging takes milliseconds where many decisions were made
side by side, so all of this runs in a worker thread, one call at a time; `graph` only grows
meanwhile and may be read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from mesh.errors import BadEvent
from mesh.events.decision import MAX_PARENTS, DecisionId, SignedDecision, decode
from mesh.events.graph import Graph, positions
from mesh.events.rules import Membership, Rules
from mesh.events.verdict import EventVerdict
from mesh.types import NodeId

MAX_PER_AUTHOR = 2048
"""What is kept of one author, beyond what other anchors come to rely on."""

MAX_SECOND_HISTORIES = 8
"""Decisions of a forked author that are kept beside its first history: two prove a fork."""

MAX_WAITING = 256
MAX_WAITING_BYTES = 1 << 20
_MAX_REFUSED = 4096

Signed = tuple[bytes, bytes]


class Docket:
    """One hearth's decisions. Starts empty; `load` puts in what storage holds."""

    def __init__(self, hearth_id: str, rules: Rules, *, max_per_author: int | None = None) -> None:
        self.graph = Graph()
        self._hearth_id = hearth_id
        self._max_per_author = MAX_PER_AUTHOR if max_per_author is None else max_per_author
        self._judge = rules.judge(self.graph)
        self._waiting: OrderedDict[DecisionId, SignedDecision] = OrderedDict()
        self._refused: OrderedDict[DecisionId, None] = OrderedDict()
        self._began = 0
        self._publish(self._judge.membership())

    # What others ask, from the event loop.

    acknowledged: tuple[DecisionId, ...]
    """The newest decisions of those that this node's next one would come after."""
    tips: tuple[DecisionId, ...]
    """The newest decisions of all, those first."""
    wanted: tuple[DecisionId, ...]
    """The parents that decisions here wait for."""
    membership: Membership
    """Who is in, by what is kept."""

    @property
    def fresh(self) -> list[SignedDecision]:
        """What was taken in since `begin`, in order."""
        return [self.graph[at] for at in range(self._began, len(self.graph))]

    @property
    def waiting_bytes(self) -> int:
        """The bodies' bytes of what waits for its parents."""
        return sum(len(each.body) for each in self._waiting.values())

    def unheard(self, own: NodeId) -> list[SignedDecision]:
        """What others have decided, and none of `own`'s decisions comes after."""
        graph = self.graph
        mine = graph.reach(graph[at].id for at in range(len(graph)) if graph[at].author == own)
        news = graph.reach(self.acknowledged) & ~mine
        return [graph[at] for at in positions(news) if graph[at].author != own]

    def lacks(self, ids: Iterable[DecisionId]) -> list[DecisionId]:
        """Which of these are neither here nor were refused."""
        return [one for one in ids if one not in self.graph and one not in self._refused]

    # Changing it, in a worker thread.

    def parents(self, *, everything: bool) -> tuple[DecisionId, ...]:
        """What this node's next decision comes after: what it acknowledges, or all there is.

        As many as it can name; of the rest those that most was decided before.
        """
        graph, mask = self.graph, self._judge.acknowledged()
        own = graph.newest(mask)
        found = graph.newest(graph.everything) if everything else own
        if len(found) <= MAX_PARENTS:
            return found
        first = sorted(own, key=graph.depth, reverse=True)
        more = sorted(set(found) - set(own), key=graph.depth, reverse=True)
        return (*first, *more)[:MAX_PARENTS]

    def load(self, decisions: Iterable[SignedDecision]) -> list[SignedDecision]:
        """Put in what was stored; those whose parents are gone, which wait for them from now on."""
        unplaced = []
        for decision in decisions:
            if self.graph.missing(decision) or not self._judge.permits(decision):
                unplaced.append(decision)
                self._wait(decision)
            else:
                self._add(decision)
        self._settle()
        self._publish(self._judge.membership())
        return unplaced

    def begin(self) -> None:
        """Open a transaction."""
        self._began = len(self.graph)

    def rollback(self) -> None:
        """Forget everything since `begin`; what waited and was used waits no more."""
        self.graph.truncate(self._began)
        self._judge.truncate(self._began)

    def derive(self) -> Membership:
        """Who is in, with everything since `begin`."""
        return self._judge.membership() if len(self.graph) > self._began else self.membership

    def commit(self, membership: Membership) -> None:
        """Keep everything since `begin`; `membership` is what `derive` gave."""
        self._began = len(self.graph)
        self._publish(membership)

    def take(self, received: Sequence[Signed]) -> list[EventVerdict]:
        """Offer what a peer sent."""
        verdicts = []
        for body, signature in received:
            try:
                decision = decode(body, signature)
            except BadEvent:
                verdicts.append(EventVerdict.MALFORMED)
            else:
                verdicts.append(self.offer(decision))
        return verdicts

    def offer(self, decision: SignedDecision) -> EventVerdict:
        """Judge one decision and take it in; then what waited for it."""
        verdict = self._examine(decision)
        if verdict is EventVerdict.HELD:
            self._wait(decision)
        elif verdict is EventVerdict.ACCEPTED:
            self._add(decision)
            self._settle()
        elif verdict not in _NOTHING_OF_THE_BODY:
            self._refuse(decision.id)
        return verdict

    # Private

    def _publish(self, membership: Membership) -> None:
        self.acknowledged = self.parents(everything=False)
        self.tips = tuple(dict.fromkeys((*self.acknowledged, *self.graph.tips)))
        missing = (
            parent
            for decision in self._waiting.values()
            for parent in self.graph.missing(decision)
            if parent not in self._waiting
        )
        self.wanted = tuple(dict.fromkeys(missing))
        self.membership = membership

    def _examine(self, decision: SignedDecision) -> EventVerdict:
        """What costs least comes first."""
        if decision.hearth_id != self._hearth_id:
            return EventVerdict.FOREIGN
        if decision.id in self.graph:
            return EventVerdict.KNOWN
        if self.graph.missing(decision):
            return EventVerdict.HELD
        return self._find_fault(decision) or EventVerdict.ACCEPTED

    def _find_fault(self, decision: SignedDecision) -> EventVerdict | None:
        """What keeps out a decision whose parents are here."""
        key = self._judge.key(decision)
        if decision.depth != self.graph.depth_after(decision.parents):
            return EventVerdict.BROKEN
        if key is not None and not _is_signed(decision, key):
            return EventVerdict.FORGED
        if key is None or not self._judge.permits(decision):
            return EventVerdict.UNLAWFUL
        if decision.id in self._relied_on():
            return None
        if self._judge.rewrites(decision):
            return EventVerdict.VOID
        return None if self._has_room(decision) else EventVerdict.FULL

    def _has_room(self, decision: SignedDecision) -> bool:
        if self._judge.is_second_history(decision):
            return self._judge.second_histories(decision.author) < MAX_SECOND_HISTORIES
        return self._judge.signed_by(decision.author) < self._max_per_author

    def _relied_on(self) -> set[DecisionId]:
        """What the waiting decisions of anchors, and of who has the recovery code, come after.

        It is taken in whatever it is: else they, and all that follows, would never be.
        """
        if not self._waiting:
            return set()
        anchors = self._judge.anchors()
        ahead = [
            decision
            for decision in self._waiting.values()
            if decision.author in anchors or self._judge.is_recovery(decision)
        ]
        found: set[DecisionId] = set()
        while ahead:
            decision = ahead.pop()
            for parent in decision.parents:
                if parent in self._waiting and parent not in found:
                    ahead.append(self._waiting[parent])
                found.add(parent)
        return found

    def _add(self, decision: SignedDecision) -> None:
        self.graph.add(decision)
        self._judge.note(decision)
        self._waiting.pop(decision.id, None)
        self._refused.pop(decision.id, None)

    def _settle(self) -> None:
        """Take in what waited, as far as its parents have come."""
        moving = True
        while moving:
            moving = False
            for decision in list(self._waiting.values()):
                verdict = self._examine(decision)
                if verdict is EventVerdict.ACCEPTED:
                    self._add(decision)
                    moving = True
                elif verdict is not EventVerdict.HELD:
                    del self._waiting[decision.id]
                    self._refuse(decision.id)

    def _wait(self, decision: SignedDecision) -> None:
        """Keep it if its author is known to have signed it; the oldest give way."""
        key = self._judge.key(decision)
        if key is None or not _is_signed(decision, key):
            return
        self._waiting[decision.id] = decision
        self._waiting.move_to_end(decision.id)
        while len(self._waiting) > MAX_WAITING or self.waiting_bytes > MAX_WAITING_BYTES:
            self._waiting.popitem(last=False)

    def _refuse(self, decision_id: DecisionId) -> None:
        self._refused[decision_id] = None
        while len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)


_NOTHING_OF_THE_BODY = (EventVerdict.KNOWN, EventVerdict.FORGED)
"""An id is that of a body: the same one with a true signature is to be asked for still."""


def _is_signed(decision: SignedDecision, key: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(decision.signature, decision.signed_bytes)
    except InvalidSignature:
        return False
    return True
