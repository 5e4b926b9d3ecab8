"""The cache of a session on layers of which some keep a running state: linear attention, Mamba,
short convolutions.

What a forward makes of the states is real with `commit` only; how a session goes back is said in
`mesh.shard.marks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch

from mesh.shard.kv import SessionCache
from mesh.shard.marks import Marks

StateKind = Literal["conv", "recurrent"]
"""The last inputs of a convolution (1, channels, width), or what is made of all."""

_Key = tuple[StateKind, int, int]
"""Of one state: which of a layer's two kinds, the layer, and which of several of that kind."""

_States = Mapping[_Key, torch.Tensor]


class _Held:
    """The states of a session, `now` and as the forward under way has made them so far."""

    def __init__(self) -> None:
        self.now: _States = {}
        self.next: dict[_Key, torch.Tensor] = {}

    def snapshot(self) -> _States:
        """See `mesh.shard.marks.RunningStates`. They are never written to."""
        return self.now

    def restore(self, states: _States | None) -> None:
        """See there."""
        self.now, self.next = states or {}, {}

    def advance(self) -> None:
        """See there."""
        self.now, self.next = {**self.now, **self.next}, {}

    def lent(self, key: _Key) -> torch.Tensor | None:
        """A copy: single rows are computed in it, and the forward may yet fail."""
        state = self.now.get(key)
        if state is None:
            return None
        self.next[key] = mine = state.clone()
        return mine


class StateCache(SessionCache):
    """Keys, values and states of one session for the layers of one span.

    Before a forward `rows_for` says what to compute: the step's rows, perhaps behind others that
    are computed once more.
    """

    in_pieces = False

    def __init__(self, layer_count: int, max_tokens: int) -> None:
        super().__init__(layer_count, max_tokens)
        self._states = _Held()
        self._kept = Marks(self._states)

    @property
    def computed(self) -> int:
        return self.length - self._kept.again

    @property
    def allocated_bytes(self) -> int:
        """What keys, values, states, marks and their inputs take on the device now."""
        mine = {id(t): t.nbytes for t in self._tensors()}
        return super().allocated_bytes + sum(mine.values())

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self._states.now.values()
        for states, inputs in self._kept.kept():
            yield from states.values()
            yield from inputs

    # Where it stands

    def held(self, positions: int) -> int:
        return self._kept.held(self.length, positions)

    def cut(self, position: int) -> None:
        """Forget everything from `position` on, and all where it cannot stand there."""
        if position < self.length:
            self.length = self._kept.cut(self.length, position)
            self._states.next = {}

    def copy(self, other: StateCache, stop: int) -> None:
        """As of any cache, all at once. States are never written to: both have the same."""
        super().copy(other, stop)
        self._kept.begin_as(other._kept)
        end, self.length = self.length, other.length
        self.cut(end)

    # One forward

    def rows_for(self, hidden: torch.Tensor, run: Callable[[torch.Tensor], object]) -> torch.Tensor:
        """What is to be computed, from `computed` on, for a step of these rows (1, rows, hidden)
        behind the end: they come last. Rows before them that are to be computed by themselves were
        given to `run`, to be computed from `computed` on."""
        rows = self._kept.rows_for(self.length, hidden, run)
        self._states.next = {}
        return rows

    def commit(self, rows: int) -> None:
        self._kept.commit(self.length, rows)
        super().commit(rows)

    # Layers without modules

    def before(self, kind: StateKind, layer: int) -> torch.Tensor | None:
        """A state of a layer as the last forward has left it, not to be written to."""
        return self._states.now.get((kind, layer, 0))

    def become(self, kind: StateKind, layer: int, state: torch.Tensor) -> None:
        """Take what the forward under way makes of it."""
        self._states.next[kind, layer, 0] = state

    # transformers.Cache

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never by transformers' own means."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs of a convolution (1, channels, width), to read or to write to."""
        return self._states.lent(("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A state, to read or to write to."""
        return self._states.lent(("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,  # (1, channels, rows)
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_kwargs: Any,
    ) -> torch.Tensor:
        """Take the next inputs of a convolution; returns them behind those that it still needs."""
        key: _Key = ("conv", layer_idx, state_idx)
        before = self._states.now.get(key)
        if before is not None:
            width, whole = before.shape[-1], torch.cat([before, conv_states], dim=-1)
        else:
            width = conv_kernel_size or conv_states.shape[-1]
            whole = torch.nn.functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self._states.next[key] = whole[..., -width:].clone()
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: Any
    ) -> torch.Tensor:
        """Take what a state has become."""
        key: _Key = ("recurrent", layer_idx, state_idx)
        before = self._states.now.get(key, recurrent_states)
        self._states.next[key] = recurrent_states.to(before.dtype)
        return recurrent_states
