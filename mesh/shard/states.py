"""The cache of a session on layers of which some keep a running state: linear attention, Mamba,
short convolutions.

A state stands for all positions before one, and cannot be cut. So the cache keeps a few marks:
states as they were at an earlier position, with the inputs of some rows that followed. It goes back
to a position behind a mark by computing the rows between once more; where no mark reaches, it
cannot, and the session ends. What a forward makes of the states is real with `commit` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mesh.shard.kv import SessionCache

LONG_ROWS = 16
"""What has more rows is a prompt. Also so many at most are computed once more with the next step;
more are computed by themselves, so that the next time they need not be."""

REACH = 256
"""Rows that are kept behind a mark: a chunk of a prompt, and what may follow its last."""

MARKS = 2
"""So many are kept where chunks of a prompt began, for the next turn and for texts that begin
alike; and where drafts began, of which two are under way at most."""

_Key = tuple[str, int, int]
"""Of one state: which of a layer's two kinds, the layer, and which of several of that kind."""

_States = Mapping[_Key, torch.Tensor]


@dataclass(slots=True)
class _Mark:
    """The states before `position`, and (1, rows, hidden) inputs from there on."""

    position: int
    states: _States
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

    def copy(self) -> _Mark:
        """The same, whatever is added here later."""
        return _Mark(self.position, self.states, self.is_long, [*self.inputs], self.end)


class StateCache(SessionCache):
    """Keys, values and states of one session for the layers of one span.

    Before a forward `rows_for` says what to compute: the step's rows, perhaps behind others that
    are computed once more.
    """

    in_pieces = False

    def __init__(self, layer_count: int, max_tokens: int) -> None:
        super().__init__(layer_count, max_tokens)
        self._states: _States = {}
        self._next: dict[_Key, torch.Tensor] = {}
        self._marks: list[_Mark] = []
        self._step: torch.Tensor | None = None
        self._again = 0

    @property
    def computed(self) -> int:
        return self.length - self._again

    @property
    def allocated_bytes(self) -> int:
        """What keys, values, states, marks and their inputs take on the device now."""
        mine = {id(t): t.nbytes for t in self._tensors()}
        return super().allocated_bytes + sum(mine.values())

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self._states.values()
        for mark in self._marks:
            yield from mark.states.values()
            yield from mark.inputs

    # Where it stands

    def held(self, positions: int) -> int:
        if positions >= self.length:
            return self.length
        reached = (min(positions, each.end) for each in self._marks if each.position <= positions)
        return max(reached, default=0)

    def cut(self, position: int) -> None:
        """Forget everything from `position` on, and all where it cannot stand there."""
        if position >= self.length:
            return
        if self.held(position) < position:
            position = 0
        marks = [each for each in self._marks if each.position <= position]
        for mark in marks:
            mark.cut(position)
        # `computed` may stay where it is, if that is not behind `position`.
        if position < self.computed:
            self._stand_at(position, marks)
        else:
            self._again = position - self.computed
        self.length, self._marks, self._next = position, marks, {}

    def _stand_at(self, position: int, marks: list[_Mark]) -> None:
        mark = next((each for each in reversed(marks) if each.end >= position), None)
        self._states = {} if mark is None else mark.states
        self._again = 0 if mark is None else position - mark.position

    def copy(self, other: StateCache, stop: int) -> None:
        """As of any cache, all at once. States are never written to: both have the same."""
        states, again = other._states, other._again
        marks = [each.copy() for each in other._marks]
        super().copy(other, stop)
        self._states, self._again, self._marks = states, again, marks
        end, self.length = self.length, other.length
        self.cut(end)

    # One forward

    @property
    def again(self) -> torch.Tensor | None:
        """Rows (1, rows, hidden) at `computed` that are to be computed by themselves first."""
        return self._rows_again() if self._again > LONG_ROWS else None

    def rows_for(self, hidden: torch.Tensor) -> torch.Tensor:
        """What is to be computed, from `computed` on, for a step of these rows (1, rows, hidden)
        behind the end: they come last."""
        self._step, self._next = hidden, {}
        return torch.cat([self._rows_again(), hidden], dim=1) if self._again else hidden

    def commit_again(self) -> None:
        """What `again` had is computed."""
        self._states, self._again = {**self._states, **self._next}, 0
        self._mark(_Mark(self.length, self._states, is_long=False, end=self.length))

    def commit(self, rows: int) -> None:
        start, step = self.length, self._step
        if rows > 1 and not self._again:
            self._mark(_Mark(start, self._states, rows > LONG_ROWS, end=start))
        if step is not None:
            for mark in self._marks:
                mark.add(start, step)
        self._states, self._step = {**self._states, **self._next}, None
        super().commit(rows)
        self._again = 0

    # Private

    def _rows_again(self) -> torch.Tensor:
        mark = next(each for each in self._marks if each.position == self.computed)
        return torch.cat(mark.inputs, dim=1)

    def _mark(self, mark: _Mark) -> None:
        alike = [each for each in self._marks if each.is_long == mark.is_long]
        if len(alike) >= MARKS:
            self._marks.remove(alike[0])
        self._marks.append(mark)

    # transformers.Cache

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never by transformers' own means."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs of a convolution (1, channels, width), to read or to write to."""
        return self._lent(("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A state, to read or to write to."""
        return self._lent(("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,  # (1, channels, rows)
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_kwargs: Any,
    ) -> torch.Tensor:
        """Take the next inputs of a convolution; returns them behind those that it still needs."""
        key = ("conv", layer_idx, state_idx)
        before = self._states.get(key)
        if before is not None:
            width, whole = before.shape[-1], torch.cat([before, conv_states], dim=-1)
        else:
            width = conv_kernel_size or conv_states.shape[-1]
            whole = torch.nn.functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self._next[key] = whole[..., -width:].clone()
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: Any
    ) -> torch.Tensor:
        """Take what a state has become."""
        key = ("recurrent", layer_idx, state_idx)
        before = self._states.get(key, recurrent_states)
        self._next[key] = recurrent_states.to(before.dtype)
        return recurrent_states

    def _lent(self, key: _Key) -> torch.Tensor | None:
        """A copy: single rows are computed in it, and the forward may yet fail."""
        state = self._states.get(key)
        if state is None:
            return None
        self._next[key] = mine = state.clone()
        return mine
