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

    async def logits(self, row: torch.Tensor) -> torch.Tensor:
        """(vocab,) of a row (1, 1, hidden), in one call with those that come in the same turn of
        the loop. Raises what the head raises."""
        if self._most == 1:
            return self._compute([row])[0]
        loop = asyncio.get_running_loop()
        done: asyncio.Future[torch.Tensor] = loop.create_future()
        self._waiting.append((row, done))
        if len(self._waiting) == 1:
            loop.call_soon(self._run)
        return await done

    def _run(self) -> None:
        waiting = [(row, done) for row, done in self._waiting if not done.cancelled()]
        self._waiting.clear()
        for start in range(0, len(waiting), self._most):
            together = waiting[start : start + self._most]
            try:
                computed = self._compute([row for row, _ in together])
            except Exception as error:  # noqa: BLE001 - it is each one's who waits for it
                for _, done in together:
                    done.set_exception(error)
            else:
                for (_, done), logits in zip(together, computed, strict=True):
                    done.set_result(logits)

    def _compute(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        self.calls += 1
        if len(rows) == 1:
            return [self._ends.logits(rows[0])[0, -1]]
        # Of the sizes that `rows_at_once` has checked.
        size = 1 << (len(rows) - 1).bit_length()
        padded = torch.cat([*rows, *rows[:1] * (size - len(rows))], dim=1)
        return list(self._ends.logits(padded)[0, : len(rows)])


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
