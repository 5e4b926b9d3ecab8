"""The key/value cache of one session on one shard, and several of them seen as one batch.

Buffers are contiguous per layer, start small and double up to the session's limit. What lies beyond
`length` does not exist: a forward writes there and `commit` makes it real, so a forward that fails
half-way leaves nothing behind, and cutting back is one assignment. Knows no masks and no positions
other than its own length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers.cache_utils import Cache

from mesh.errors import ContextTooLong

if TYPE_CHECKING:
    import torch

_FIRST_BLOCK = 256

_Buffers = list["torch.Tensor | None"]
"""A tensor (1, heads, capacity, width) for each layer that has run."""


def roomier(capacity: int, needed: int, most: int) -> int:
    """For how many positions a session's cache is to have room that has it for `capacity` and needs
    it for `needed`: twice as many until they fit. Raises ContextTooLong where that is over `most`.
    """
    if needed <= capacity:
        return capacity
    if needed > most:
        raise ContextTooLong(
            f"The session holds at most {most} positions; {needed} are needed.",
            fix="Open the session with more max_tokens, or shorten the prompt.",
        )
    capacity = max(capacity, _FIRST_BLOCK)
    while capacity < needed:
        capacity *= 2
    return min(capacity, most)


class OneSession(Cache):  # type: ignore[misc]  # transformers is untyped here
    """What every cache of one session has: a length, up to which what it holds exists.

    Sliding-window layers keep every position too: cutting back needs them.
    """

    in_pieces = True
    """Whether `copy` may be asked for a part at a time."""

    short = 0

    def __init__(self, max_tokens: int) -> None:
        super().__init__(layers=[])
        self.max_tokens = max_tokens
        self.length = 0

    @property
    def computed(self) -> int:
        """Up to where the next forward finds what it needs, and where it begins to write."""
        return self.length

    def held(self, positions: int) -> int:
        """With how many of its first `positions` a session can go on, or another begin."""
        return min(positions, self.length)

    def cut(self, position: int) -> None:
        """Forget everything from `position` on; a position beyond the end changes nothing."""
        self.length = min(self.length, position)

    def commit(self, rows: int) -> None:
        """The forward over `rows` positions succeeded; they count from now on."""
        self.length += rows

    def seen(self, layer_idx: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What `update` gave of a layer, in the forward of so many rows that runs."""
        raise NotImplementedError

    # transformers.Cache

    def update(
        self,
        key_states: torch.Tensor,  # (1, heads, rows, width)
        value_states: torch.Tensor,
        layer_idx: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write behind the end; returns (1, heads, length + rows, width) views."""
        raise NotImplementedError

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The same for every layer."""
        return self.computed

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Where the next row stands."""
        return self.computed

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys a query of this length sees, offset of the first): nothing is dropped."""
        return self.computed + query_length, 0


class SessionCache(OneSession):
    """Keys and values of one session for the layers of one span, in buffers of its own; and, where
    layers attend to chosen positions only, what these are chosen by."""

    def __init__(self, layer_count: int, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._capacity, self._layer_count = 0, layer_count
        self._keys, self._values, self._index_keys = self._buffers()

    def _buffers(self) -> tuple[_Buffers, _Buffers, _Buffers]:
        return [None] * self._layer_count, [None] * self._layer_count, [None] * self._layer_count

    @property
    def _all(self) -> tuple[_Buffers, _Buffers, _Buffers]:
        return self._keys, self._values, self._index_keys

    @property
    def allocated_bytes(self) -> int:
        """What the buffers take on the device now."""
        return sum(t.nbytes for each in self._all for t in each if t is not None)

    @property
    def capacity(self) -> int:
        """Positions that the buffers have room for."""
        return self._capacity

    def reset(self) -> None:
        """Forget everything and give the buffers back."""
        self.length = self._capacity = 0
        self._keys, self._values, self._index_keys = self._buffers()

    def reserve(self, rows: int) -> None:
        """Make room for `rows` more positions. Raises ContextTooLong beyond `max_tokens`."""
        capacity = roomier(self._capacity, self.length + rows, self.max_tokens)
        if capacity == self._capacity:
            return
        # All or nothing: when the device has no room, the old buffers still stand.
        keys, values, index = ([self._grown(t, capacity) for t in each] for each in self._all)
        self._keys, self._values, self._index_keys = keys, values, index
        self._capacity = capacity

    def copy(self, other: SessionCache, stop: int) -> None:
        """Take over the positions of `other` from `length` up to `stop`, which it holds.

        Raises ContextTooLong beyond `max_tokens`.
        """
        start, rows = self.length, stop - self.length
        self.reserve(rows)
        for mine, theirs in zip(self._all, other._all, strict=True):
            for index, tensor in enumerate(theirs):
                if tensor is None:  # a layer that this session does not run
                    continue
                held = mine[index]
                if held is None:
                    held = mine[index] = self._new(tensor)
                held[:, :, start:stop] = tensor[:, :, start:stop]
        self.length = stop

    def _grown(self, old: torch.Tensor | None, capacity: int) -> torch.Tensor | None:
        if old is None:
            return None
        _, heads, _, width = old.shape
        new = old.new_empty((1, heads, capacity, width))
        new[:, :, : self.length] = old[:, :, : self.length]
        return new

    def update(
        self,
        key_states: torch.Tensor,  # (1, heads, rows, width)
        value_states: torch.Tensor,
        layer_idx: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write behind the end; returns (1, heads, length + rows, width) views."""
        start = self.computed
        end = start + key_states.shape[2]
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if keys is None or values is None:
            keys = self._keys[layer_idx] = self._new(key_states)
            values = self._values[layer_idx] = self._new(value_states)
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def update_indexer(self, index_keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """As `update`, of (1, rows, width): what a layer with an indexer chooses by, to which
        positions a query attends (DeepSeek Sparse Attention). Returns (1, length + rows, width).
        """
        rows = index_keys.unsqueeze(1)
        held = self._index_keys[layer_idx]
        if held is None:
            held = self._index_keys[layer_idx] = self._new(rows)
        end = self.computed + rows.shape[2]
        held[:, :, self.computed : end] = rows
        return held[:, 0, :end]

    def seen(self, layer_idx: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `OneSession`."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        assert keys is not None and values is not None  # noqa: S101, PT018 - it has run before
        end = self.computed + rows
        return keys[:, :, :end], values[:, :, :end]

    def _new(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty((1, like.shape[1], self._capacity, like.shape[3]))


class Ragged(list["torch.Tensor"]):
    """Keys or values of one layer, a tensor for each session."""

    def to(self, *_args: Any) -> Ragged:
        """They lie where rows are computed: layers that see them are asked to put them there."""
        return self


class BatchCache(Cache):  # type: ignore[misc]
    """Caches of different lengths under one batch of single rows.

    `update` returns one tensor per session instead of one padded tensor; only the attention in
    `mesh.shard.attention` reads that, anything else fails on it.
    """

    def __init__(self, caches: Sequence[OneSession]) -> None:
        super().__init__(layers=[])
        self.caches = caches

    def update(
        self,
        key_states: torch.Tensor,  # (sessions, heads, 1, width)
        value_states: torch.Tensor,
        layer_idx: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[Ragged, Ragged]:
        """Write each session's row to its own cache; returns their views in the same order."""
        rows = [
            cache.update(key_states[i : i + 1], value_states[i : i + 1], layer_idx)
            for i, cache in enumerate(self.caches)
        ]
        return Ragged(keys for keys, _ in rows), Ragged(values for _, values in rows)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Of no session in particular: the positions come with the step."""
        return self.caches[0].length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Of no session in particular: the positions come with the step."""
        return self.caches[0].length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Of no session in particular: a single row sees all that its window covers."""
        return self.caches[0].length + query_length, 0
