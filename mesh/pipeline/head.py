"""The output head for several generations at once: rows that wait together are one call.

Reading the head's weights is what a call costs, once for all its rows. Rows are computed together
only as far as each has the bits that it has alone, so nobody's tokens depend on who else asks.
"""

from __future__ import annotations

import asyncio

import torch

from mesh.pipeline.model import AskerModel, ModelEnds

MOST_ROWS = 8


class OutputHead:
    """One model's head on the event loop; `calls` counts how often it was run."""

    def __init__(self, model: AskerModel) -> None:
        self.calls = 0
        self._ends = model.ends
        self._most = model.head_rows
        self._waiting: list[tuple[torch.Tensor, asyncio.Future[torch.Tensor]]] = []

    async def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """(rows, vocab) of (1, rows, hidden), together with those that come in the same turn of the
        loop. Raises what the head raises."""
        if self._most == 1:
            return self._call(rows)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[torch.Tensor] = loop.create_future()
        self._waiting.append((rows, done))
        if len(self._waiting) == 1:
            loop.call_soon(self._run)
        return await done

    def _run(self) -> None:
        waiting = [(rows, done) for rows, done in self._waiting if not done.cancelled()]
        self._waiting.clear()
        if not waiting:
            return
        try:
            computed = self._compute(torch.cat([rows for rows, _ in waiting], dim=1))
        except Exception as error:  # noqa: BLE001 - it is each one's who waits for it
            for _, done in waiting:
                done.set_exception(error)
            return
        parts = torch.split(computed, [rows.shape[1] for rows, _ in waiting])
        for (_, done), logits in zip(waiting, parts, strict=True):
            done.set_result(logits)

    def _compute(self, rows: torch.Tensor) -> torch.Tensor:
        """(rows, vocab) in calls of the sizes that `rows_at_once` has checked."""
        found = []
        for part in torch.split(rows, self._most, dim=1):
            count = part.shape[1]
            size = 1 << (count - 1).bit_length()
            padded = torch.cat([part, part[:, :1].expand(1, size - count, -1)], dim=1)
            found.append(self._call(padded)[:count])
        return torch.cat(found) if len(found) > 1 else found[0]

    def _call(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self._ends.logits(rows)[0]


def rows_at_once(ends: ModelEnds, hidden_size: int, most: int = MOST_ROWS) -> int:
    """How many rows the head may compute together, a power of two: with 2, 4, ... `most` of them
    each has the same bits as alone on this machine."""
    seeded = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, most, hidden_size, generator=seeded)
    alone: list[torch.Tensor] = []
    equal = 1
    while 2 * equal <= most:
        size = 2 * equal
        alone += [ends.logits(hidden[:, at : at + 1]) for at in range(len(alone), size)]
        if not torch.equal(ends.logits(hidden[:, :size]), torch.cat(alone, dim=1)):
            break
        equal = size
    return equal
