"""The decisions of a hearth as a graph: each after its parents, and which came before which.

A set of decisions is a bit mask over the order in which they came in here, so what two nodes call
by the same number differs; ids do not. Knows nothing of what decisions mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mesh.events.decision import DecisionId, SignedDecision


class Graph:
    """Grows at its end only; `truncate` takes back what could not be stored."""

    def __init__(self) -> None:
        self._decisions: list[SignedDecision] = []
        self._positions: dict[DecisionId, int] = {}
        self._past: list[int] = []
        self._tips: dict[DecisionId, None] = {}

    def __len__(self) -> int:
        return len(self._decisions)

    def __getitem__(self, position: int) -> SignedDecision:
        return self._decisions[position]

    def __contains__(self, decision_id: DecisionId) -> bool:
        return decision_id in self._positions

    @property
    def tips(self) -> tuple[DecisionId, ...]:
        """The decisions that nothing here comes after."""
        return tuple(self._tips)

    @property
    def everything(self) -> int:
        """The mask of all decisions."""
        return (1 << len(self._decisions)) - 1

    def past(self, position: int) -> int:
        """The mask of all that a decision's author had seen, without the decision itself."""
        return self._past[position]

    def reach(self, ids: Iterable[DecisionId]) -> int:
        """The mask of these decisions and all before them; those that are not here are left out."""
        mask = 0
        for decision_id in ids:
            position = self._positions.get(decision_id)
            if position is not None:
                mask |= self._past[position] | 1 << position
        return mask

    def missing(self, decision: SignedDecision) -> list[DecisionId]:
        """The parents that are not here."""
        return [parent for parent in decision.parents if parent not in self._positions]

    def depth(self, decision_id: DecisionId) -> int:
        """The depth of a decision that is here."""
        return self._decisions[self._positions[decision_id]].depth

    def depth_after(self, parents: Iterable[DecisionId]) -> int:
        """The depth of a decision with these parents, which must be here."""
        return 1 + max(map(self.depth, parents), default=0)

    def add(self, decision: SignedDecision) -> int:
        """Take in a decision whose parents are here; its position."""
        position = len(self._decisions)
        self._past.append(self.reach(decision.parents))
        self._decisions.append(decision)
        self._positions[decision.id] = position
        for parent in decision.parents:
            self._tips.pop(parent, None)
        self._tips[decision.id] = None
        return position

    def truncate(self, length: int) -> None:
        """Forget everything from this position on."""
        for decision in self._decisions[length:]:
            del self._positions[decision.id]
        del self._decisions[length:], self._past[length:]
        beneath = 0
        for past in self._past:
            beneath |= past
        self._tips = {
            decision.id: None
            for position, decision in enumerate(self._decisions)
            if not beneath >> position & 1
        }

    def between(
        self, have: Iterable[DecisionId], want: Iterable[DecisionId]
    ) -> Iterator[SignedDecision]:
        """`want` and all before it that is not `have` or before it, parents first."""
        return (self._decisions[at] for at in positions(self.reach(want) & ~self.reach(have)))

    def newest(self, mask: int) -> tuple[DecisionId, ...]:
        """Of a set of decisions those that no other one of it comes after."""
        beneath = 0
        for position in positions(mask):
            beneath |= self._past[position]
        return tuple(self._decisions[at].id for at in positions(mask & ~beneath))


def positions(mask: int) -> Iterator[int]:
    """The positions in a mask, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
