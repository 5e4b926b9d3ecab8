"""Attention of single rows, each over the keys of its own session in the pool.

By torch's flash kernel, which takes where the keys of each row begin and how many count as tensors:
so a graph that was captured once serves any sessions. It adds up a row's keys in parts, and how
many parts depends on how many rows there are; with `FULL_ROWS` at least, a row of few has the bits
that it has among them. `plain_attention` computes the same from what is written down in papers, on
any device: what the kernel gives is compared with that before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from mesh.shard.cuda.pool import Pool
from mesh.shard.lean_attention import AttentionPlace

FULL_ROWS = 16
"""Attention is computed for so many rows at least."""

_FLASH = torch.ops.aten._flash_attention_forward  # noqa: SLF001 - checked before it is used


@dataclass(frozen=True, slots=True)
class Row:
    """The row at `position` of a session whose region begins at `start`."""

    position: int
    start: int


@dataclass(frozen=True, slots=True)
class Behind:
    """Where the one query of each row begins, and its keys in the pool, (rows + 1,) each, and how
    many of those count, (rows,); all int32. What stands last in the first two is nobody's.

    `most` bounds how many keys can count: it decides in how many parts the kernel adds them up.
    """

    queries: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    most: int


class RowAttention(Protocol):
    """Attention of rows over keys in a pool."""

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        behind: Behind,
        place: AttentionPlace,
    ) -> torch.Tensor:
        """(rows, heads, width) queries over (positions, kv heads, width): (rows, heads, width)."""


class PooledRows:
    """The numbers of up to `rows` rows at fixed addresses, and their keys on their way."""

    def __init__(self, pool: Pool, rows: int, most: int, attend: RowAttention) -> None:
        self.rows = rows
        self._pool = pool
        self._most = most
        self._attend = attend
        full = max(rows, FULL_ROWS)
        device = pool.keys[0].device
        self._numbers = torch.zeros((3, full), dtype=torch.int64, device=device)
        self._queries = torch.arange(full + 1, dtype=torch.int32, device=device)
        self._behind: Behind | None = None

    def stand(self, rows: Sequence[Row]) -> None:
        """The next forward computes these, and rows that nobody wants behind them."""
        scratch = self._pool.scratch
        full = self._numbers.shape[1]
        none = [scratch] * (full - len(rows))
        numbers = [
            [row.position for row in rows] + [0] * len(none),
            [row.start + row.position for row in rows] + none,
            [row.start for row in rows] + none,
        ]
        self._numbers.copy_(torch.tensor(numbers))

    def begin(self) -> torch.Tensor:
        """At the start of a forward: the rows' positions, (rows, 1)."""
        positions, starts = self._numbers[0], self._numbers[2]
        starts, counts = F.pad(starts.to(torch.int32), (0, 1)), (positions + 1).to(torch.int32)
        self._behind = Behind(self._queries, starts, counts, self._most)
        return positions[: self.rows, None]

    def __call__(
        self, place: AttentionPlace, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write (rows, kv heads, width) keys and values; (rows, heads, width) as the queries."""
        assert self._behind is not None  # noqa: S101 - `begin` comes first
        keys, values = self._pool.keys[place.index], self._pool.values[place.index]
        written = self._numbers[1, : self.rows]
        keys.index_copy_(0, written, key)
        values.index_copy_(0, written, value)
        full = self._numbers.shape[1]
        query = F.pad(query, (0, 0, 0, 0, 0, full - self.rows)) if full > self.rows else query
        return self._attend(query, keys, values, self._behind, place)[: self.rows]


def flash_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    behind: Behind,
    place: AttentionPlace,
) -> torch.Tensor:
    """See `RowAttention`. On CUDA, for fp16 and bf16."""
    window = {}
    if place.window is not None:
        window = {"window_size_left": place.window - 1, "window_size_right": 0}
    output: torch.Tensor = _FLASH(
        query.contiguous(), keys, values, behind.queries, behind.starts, 1, behind.most, 0.0,
        False, False, scale=place.scale, seqused_k=behind.counts, **window,
    )[0]  # fmt: skip
    return output


def plain_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    behind: Behind,
    place: AttentionPlace,
) -> torch.Tensor:
    """See `RowAttention`. softmax(q·k·scale)·v in fp32, one row after another."""
    found = []
    for row, start, count in zip(
        query, behind.starts.tolist()[:-1], behind.counts.tolist(), strict=True
    ):
        first = start + (0 if place.window is None else max(0, count - place.window))
        key, value = (
            each[first : start + count].float().repeat_interleave(len(row) // each.shape[1], 1)
            for each in (keys, values)
        )
        scores = torch.einsum("hw,khw->hk", row.float(), key) * place.scale
        if place.softcap is not None:
            scores = torch.tanh(scores / place.softcap) * place.softcap
        found.append(torch.einsum("hk,khw->hw", torch.softmax(scores, -1), value))
    return torch.stack(found).to(query.dtype)
