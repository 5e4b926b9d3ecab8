"""Fetches again what has changed on the disk since it came.

Where one tensor has changed others may have: all of a checkpoint is read again before it is whole.
Tries until it is there: somebody who has it may be away for long. Use on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from mesh.clock import backoff_s
from mesh.errors import MeshError
from mesh.processes.tasks import end, spawn
from mesh.transfers.commands import Damaged

logger = logging.getLogger(__name__)


class Repairs:
    """`take` what is damaged, `forget` what is to be fetched no more, `close` at the end."""

    first_s: float = 5.0
    """What else is damaged is found meanwhile, and others hear that it is not offered any more."""
    again_s: float = 1800.0

    def __init__(
        self,
        ensure: Callable[[Damaged], Awaitable[object]],
        reread: Callable[[str], Awaitable[object]],
    ) -> None:
        """`ensure` has all of it here that was, `reread` compares a checkpoint with its hashes once
        more; both raise MeshError."""
        self.on_repaired: Callable[[str], None] = lambda weights_sha256: None
        """Hears of each checkpoint that is whole again."""
        self._ensure, self._reread = ensure, reread
        self._wanted: dict[Path, list[Damaged]] = {}
        self._tasks: dict[Path, asyncio.Task[None]] = {}

    def take(self, damaged: Damaged) -> None:
        """Fetch this again."""
        wanted = self._wanted.setdefault(damaged.directory, [])
        if not _is_among(damaged, wanted):
            wanted.append(damaged)
        if damaged.directory not in self._tasks:
            work = self._repair(damaged.directory, wanted)
            self._tasks[damaged.directory] = spawn(work, f"repair {damaged.directory}")

    def __contains__(self, directory: Path) -> bool:
        """Whether something is fetched again there."""
        return directory in self._tasks

    def forget(self, directory: Path) -> None:
        """It is to be removed."""
        self._wanted.pop(directory, None)
        if (task := self._tasks.pop(directory, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        """Fetch nothing any more."""
        await end(self._tasks.values())

    async def _repair(self, directory: Path, wanted: list[Damaged]) -> None:
        widest, wait_s, rounds = wanted[0], self.first_s, 0
        sha256 = widest.weights_sha256
        while wanted:
            await asyncio.sleep(wait_s)
            first = wanted.pop(0)  # what is found of the same from now on is not fetched with it
            try:
                await self._ensure(first)
                wait_s = 0.0
                if not wanted and not _is_among(first, [widest]):
                    # Of layers of which much was missing just then less is known to have been here.
                    wanted.append(widest)
                elif not wanted:  # what else has changed, or was found meanwhile, becomes wanted
                    await self._reread(sha256)
                    rounds += 1  # a disk may change all that it is given
                    wait_s = backoff_s(rounds, self.first_s, self.again_s)
            except MeshError as error:
                logger.warning("%s is not whole again yet: %s", directory, error)
                wait_s = self.again_s
                if not _is_among(first, wanted):
                    wanted.insert(0, first)
        logger.info("%s is whole again", directory)
        del self._wanted[directory], self._tasks[directory]
        self.on_repaired(sha256)


def _is_among(damaged: Damaged, wanted: Sequence[Damaged]) -> bool:
    """Whether one of these is of the same layers and ends."""
    return any((each.layers, each.ends) == (damaged.layers, damaged.ends) for each in wanted)
