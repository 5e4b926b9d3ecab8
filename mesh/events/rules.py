"""What the log asks of whoever knows keys and membership. Protocols only.

Everything here must be a pure function of the set of decisions: two nodes with the same ones must
get the same answers, in whatever order they came.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from mesh.events.decision import SignedDecision
from mesh.events.graph import Graph
from mesh.events.types import Event, Place
from mesh.types import NodeId


class Membership(Protocol):
    """Who is in, as the decisions say. Immutable, comparable with ``==``."""

    def limit(self, author: NodeId) -> Place | None:
        """Generation and number of the author's last event that counts; None for no end."""

    def standing(self, author: NodeId) -> Hashable:
        """All that `admits` looks at for this author; a change folds the author's events again."""

    def admits(self, event: Event) -> bool:
        """Whether an event has an effect; depends on the event and its author's standing only.

        What is not admitted is still stored and passed on.
        """


class GraphJudge(Protocol):
    """Follows one graph of decisions and says what they mean. Not for several threads at a time."""

    def key(self, decision: SignedDecision) -> bytes | None:
        """The raw public key of the author; None when nobody let it in and it brings none."""

    def permits(self, decision: SignedDecision) -> bool:
        """Whether a decision can ever count; its parents are in the graph, it is not.

        Depends on the decision and what is before it only, and not on its signature.
        """

    def note(self, decision: SignedDecision) -> None:
        """A decision that is permitted was added to the graph."""

    def truncate(self, length: int) -> None:
        """The graph has forgotten what came after its first `length` decisions."""

    def membership(self) -> Membership:
        """Who is in, by all decisions in the graph."""

    def acknowledged(self) -> int:
        """The mask of the decisions that this node's next one comes after."""

    def is_second_history(self, decision: SignedDecision) -> bool:
        """Whether the author has signed a decision in the graph that this one's past lacks."""

    def second_histories(self, author: NodeId) -> int:
        """How many decisions of an author beside its first history nobody has acknowledged."""

    def is_recovery(self, decision: SignedDecision) -> bool:
        """Whether it overrules all anchors, whatever came before it."""

    def rewrites(self, decision: SignedDecision) -> bool:
        """Whether it would bring in another history of an author than is acknowledged here."""

    def anchors(self) -> frozenset[NodeId]:
        """Who decides, by all decisions in the graph."""

    def signed_by(self, author: NodeId) -> int:
        """How many decisions of an author are in the graph."""


class Rules(Protocol):
    """How decisions make a `Membership`."""

    version: str
    """Changes whenever the same decisions may give another membership than before."""

    def judge(self, graph: Graph) -> GraphJudge:
        """The judge of the decisions in a graph that is empty now."""


class Verify(Protocol):
    """Checks signatures of events with the keys that a membership introduces."""

    def __call__(self, event: Event, membership: Membership) -> bool | None:
        """Whether `event.signature` covers `event.signed_bytes`; None when the key is unknown yet.

        An event with an unknown author waits a while for the decision that lets it in.
        """
