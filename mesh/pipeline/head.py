"""The output head for several generations at once: rows that wait together are one call.

Reading the head's weights is what a call costs, once for all its rows. Rows are computed together
only as far as each has the bits that it has alone, so nobody's tokens depend on who else asks.
"""

from __future__ import annotations

import asyncio

import torch

from mesh.pipeline.model import AskerModel
from mesh.shard.ends import in_checked_sizes


class OutputHead:
    """One model's head on the event loop."""

    def __init__(self, model: AskerModel) -> None:
        self._model = model
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
        return in_checked_sizes(self._call, rows, self._most)

    def _call(self, rows: torch.Tensor) -> torch.Tensor:
        return self._model.own_ends.logits(rows)[0]
