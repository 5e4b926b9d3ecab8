"""The pulls of this node that have begun and not ended, in a file, and those that go on for good,
as offers of directories do. A node that starts again goes on with them.

Knows nothing of how anything is fetched.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from mesh import codec
from mesh.codec import Fault
from mesh.private_files import write_private
from mesh.processes.tasks import to_its_end
from mesh.types import LayerRange, ModelId

logger = logging.getLogger(__name__)

MAIN = "main"
"""The revision of a repository where none is named."""


@dataclass(frozen=True, slots=True)
class PullWish:
    """What is to be pulled: `layers` None for all; `source` is '' for wherever it is, ``hub``, or
    the name or id of a node."""

    model: str
    layers: tuple[LayerRange, ...] | None = None
    ends: bool = True
    source: str = ""
    revision: str = MAIN
    drop: bool = False


@dataclass(frozen=True, slots=True)
class BegunPull:
    """A wish, and the checkpoint that its name meant when it began; None where the hub is asked."""

    wish: PullWish
    meant: tuple[ModelId, str] | None = None


class BegunPulls:
    """`read` once, then `put` and `remove`. Use on one event loop."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._begun: dict[str, BegunPull] = {}
        self._turn = asyncio.Lock()

    async def read(self) -> dict[str, BegunPull]:
        """Those that had not ended when this node ended, by the name of the pull."""
        try:
            form = dict[str, BegunPull]
            self._begun = await asyncio.to_thread(codec.read_file, self._file, form)
        except FileNotFoundError:
            pass
        except (OSError, Fault) as error:
            logger.warning("%s cannot be read, no pull goes on: %s", self._file, error)
        return dict(self._begun)

    async def put(self, name: str, begun: BegunPull) -> None:
        """It has begun."""
        if self._begun.get(name) != begun:
            self._begun[name] = begun
            await self._write()

    async def remove(self, name: str) -> None:
        """It has ended, whether it went well or not."""
        if self._begun.pop(name, None) is not None:
            await self._write()

    def is_twice(self, name: str) -> bool:
        """Whether another one has the same wish."""
        return any(
            self._begun[name] == each for other, each in self._begun.items() if other != name
        )

    async def _write(self) -> None:
        async with self._turn:
            text = json.dumps({name: codec.plain(begun) for name, begun in self._begun.items()})
            try:
                await to_its_end(write_private, self._file, text.encode())
            except OSError as error:
                logger.warning("a restart may not go on with what is pulled: %s", error)
