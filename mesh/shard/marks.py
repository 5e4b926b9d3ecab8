"""How a session goes back on layers that keep a running state, which cannot be cut.

A state stands for all positions before one. So a session keeps a few marks: states as they were at
an earlier position, with the inputs of some rows that followed. It goes back to a position behind a
mark by computing the rows between once more; where no mark reaches, it cannot, and the session
ends. Knows nothing of what states are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch

LONG_ROWS = 16
"""What has more rows is a prompt. Also so many at most are computed once more with the next step,
and short ones with their own rows; otherwise they are computed by themselves, so that the next time
they need not be, and rows of a short step are computed as rows of a short step."""

REACH = 256
"""Rows that are kept behind a mark: a chunk of a prompt, and what may follow its last."""

MARKS = 2
"""So many are kept where chunks of a prompt began, for the next turn and for texts that begin
alike; and where drafts began, of which two are under way at most."""

States = TypeVar("States")
"""Those of a session at one position. Nobody writes to them."""


class RunningStates(Protocol[States]):
    """The states that the next forward of a session begins with."""

    def snapshot(self) -> States:
        """They, as they will stay whatever is computed next."""

    def restore(self, states: States | None) -> None:
        """The next forward begins with these; with none, at the beginning of a text."""

    def advance(self) -> None:
        """What the last forward has made of them is real."""


@dataclass(slots=True, eq=False)  # tensors do not say in one word whether they are equal
class _Mark(Generic[States]):
    """The states before `position`, and (1, rows, hidden) inputs from there on."""

    position: int
    states: States
    is_long: bool
    inputs: list[torch.Tensor] = field(default_factory=list)
    end: int = 0
    """Behind the last of the inputs."""

    def add(self, start: int, hidden: torch.Tensor) -> None:
        """Keep rows that stand at `start`, if they follow and as far as there is room for them."""
        room = self.position + REACH - self.end
        if start == self.end and room > 0:
            rows = hidden[:, :room]
            self.inputs.append(rows)
            self.end += rows.shape[1]

    def cut(self, position: int) -> None:
        """Forget the rows from `position` on."""
        while self.end > position:
            last = self.inputs.pop()
            self.end -= last.shape[1]
            if self.end < position:
                self.inputs.append(last[:, : position - self.end])
                self.end = position

    def copy(self) -> _Mark[States]:
        """The same, whatever is added here later."""
        return _Mark(self.position, self.states, self.is_long, [*self.inputs], self.end)


class Marks(Generic[States]):
    """The marks of one session, and how many rows it has to compute once more.

    `length` is everywhere how many positions the session holds.
    """

    def __init__(self, states: RunningStates[States]) -> None:
        self._states = states
        self._marks: list[_Mark[States]] = []
        self._step: torch.Tensor | None = None
        self.again = 0
        """The states stand for so many positions less than the session holds."""

    def kept(self) -> Iterator[tuple[States, list[torch.Tensor]]]:
        """States and inputs of each mark."""
        return ((mark.states, mark.inputs) for mark in self._marks)

    # Going back

    def held(self, length: int, positions: int) -> int:
        """How many of the first `positions` the session can go back to."""
        if positions >= length:
            return length
        reached = (min(positions, each.end) for each in self._marks if each.position <= positions)
        return max(reached, default=0)

    def cut(self, length: int, position: int) -> int:
        """Go back to `position`, which lies before `length`, and to the beginning where it cannot
        stand there; to where it went."""
        if self.held(length, position) < position:
            position = 0
        computed = length - self.again
        self._marks = [each for each in self._marks if each.position <= position]
        for mark in self._marks:
            mark.cut(position)
        if position < computed:
            self._stand_at(position)
        else:  # the states may stay where they are
            self.again = position - computed
        return position

    def _stand_at(self, position: int) -> None:
        mark = next((each for each in reversed(self._marks) if each.end >= position), None)
        self._states.restore(None if mark is None else mark.states)
        self.again = 0 if mark is None else position - mark.position

    def begin_as(self, other: Marks[States]) -> None:
        """Have its marks and states."""
        self._marks = [each.copy() for each in other._marks]
        self._states.restore(other._states.snapshot())
        self.again = other.again

    # One forward

    def rows_for(
        self, length: int, hidden: torch.Tensor, run: Callable[[torch.Tensor], object]
    ) -> torch.Tensor:
        """What is to be computed for a step of these rows (1, rows, hidden) behind the end: they
        come last. Rows before them that are to be computed by themselves were given to `run`."""
        rows = hidden.shape[1]
        is_short_no_more = rows <= LONG_ROWS < self.again + rows
        if self.again > LONG_ROWS or is_short_no_more:
            run(self._rows_again(length))
            self.again = 0
            self._states.advance()
            self._mark(length, is_long=False)
        self._step = hidden
        return torch.cat([self._rows_again(length), hidden], dim=1) if self.again else hidden

    def _rows_again(self, length: int) -> torch.Tensor:
        mark = next(each for each in self._marks if each.position == length - self.again)
        return torch.cat(mark.inputs, dim=1)

    def commit(self, start: int, rows: int) -> None:
        """A step of so many rows at `start` has succeeded."""
        if rows > 1 and not self.again:
            self._mark(start, is_long=rows > LONG_ROWS)
        if self._step is not None:
            for mark in self._marks:
                mark.add(start, self._step)
        self._step, self.again = None, 0
        self._states.advance()

    def _mark(self, position: int, *, is_long: bool) -> None:
        """Keep the states as they are, which are those before `position`."""
        alike = [each for each in self._marks if each.is_long == is_long]
        if any(each.position == position for each in alike):
            return
        if len(alike) >= MARKS:
            self._marks.remove(alike[0])
        self._marks.append(_Mark(position, self._states.snapshot(), is_long, end=position))
