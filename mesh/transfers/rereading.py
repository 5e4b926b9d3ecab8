"""Whether what lies on this node's disk is still what came: its tensors are hashed once more.

Each before others are first given of it, so that nobody gets what a disk or another program has
changed, and takes this node for one that lies; all of them now and then, in a small part of the
time. What has changed is given to nobody from then on, and said. Of a partial checkpoint it counts
as missing, so that nobody loads it either. Use on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mesh.errors import MeshError, WeightsDamaged
from mesh.models.hashing import damaged, has_changed
from mesh.models.partial import read_partial
from mesh.models.partial_writer import drop_tensor
from mesh.processes.tasks import abandonable, unheard
from mesh.transfers.commands import Damaged
from mesh.transfers.documents import complete_layers
from mesh.transfers.shelf import Shelf, StoredCheckpoint

logger = logging.getLogger(__name__)

SHARE = 0.01
"""Of one core's time, and of the disk's, for going through everything."""
_AT_ONCE = 2
"""Tensors that are read whole because somebody asks for them."""


class Rereading:
    """Of what is on the shelf; `on_damage` hears what has changed."""

    def __init__(self, shelf: Shelf, on_damage: Callable[[Damaged], None]) -> None:
        self._shelf = shelf
        self._on_damage = on_damage
        self._unchanged: set[tuple[Path, str]] = set()
        self._looks: dict[tuple[Path, str], asyncio.Task[bool]] = {}
        self._turn, self._room = asyncio.Lock(), asyncio.Semaphore(_AT_ONCE)

    async def before_giving(self, sha256: str, name: str) -> None:
        """Have all of a tensor read, unless that was done. Raises WeightsMissing where it is not
        here, or not any more; ModelNotFound, OSError."""
        while True:
            kept = await asyncio.to_thread(self._shelf.having, sha256, name)
            key = kept.place, name
            if key in self._unchanged:
                return
            if key not in self._looks:  # many may ask for it at once
                look = asyncio.create_task(self._looked_at(kept, name))
                self._looks[key] = look
                look.add_done_callback(partial(self._looked, key))
            await asyncio.shield(self._looks[key])

    async def all(self, sha256: str = "") -> int:
        """Go through everything here, in any order and with `SHARE` of the time; or through what is
        here of this checkpoint, at once. How many tensors have changed."""
        of_it = self._shelf.of(sha256) if sha256 else self._shelf.all()
        tensors = [(kept.place, name) for kept in of_it for name in kept.names]
        random.shuffle(tensors)  # also a machine that is never on for long comes to all of them
        found = 0
        for place, name in tensors:
            try:
                kept = await asyncio.to_thread(self._shelf.still, place, name)
                if kept is not None:
                    found += await self._has_changed(kept, name, 1.0 if sha256 else SHARE)
            except OSError as error:
                logger.info("%s cannot be read again: %s", place, error)
        return found

    async def _looked_at(self, kept: StoredCheckpoint, name: str) -> bool:
        async with self._room:
            return await self._has_changed(kept, name)

    def _looked(self, key: tuple[Path, str], look: asyncio.Task[bool]) -> None:
        del self._looks[key]
        unheard(look)

    async def _has_changed(self, kept: StoredCheckpoint, name: str, share: float = 1.0) -> bool:
        """Whether a tensor has changed; if so it is here no more. Raises OSError."""
        place = kept.place
        if await abandonable(has_changed, kept.manifest.tensors[name], share):
            async with self._turn:
                # What was removed or replaced meanwhile was read in parts of either.
                now = await asyncio.to_thread(self._shelf.still, place, name)
                if now is None:
                    return True
                if await abandonable(has_changed, now.manifest.tensors[name]):
                    self._unchanged.discard((place, name))
                    self._on_damage(await asyncio.to_thread(self._drop, now, name))
                    return True
        self._unchanged.add((place, name))
        return False

    def _drop(self, kept: StoredCheckpoint, name: str) -> Damaged:
        manifest, error = kept.manifest, damaged(kept.manifest.tensors[name])
        is_fetched = is_noted = kept.complete is not None
        if is_fetched and manifest.tensors[name] in manifest.settings_tensors():
            # Without them it is no checkpoint any more, to which something could be added.
            again = "Remove the model with `hearthnet rm`, then fetch it again."
            is_fetched = is_noted = False
            error = WeightsDamaged(error.message, fix=again)
        if is_noted:
            try:
                drop_tensor(manifest.directory, name)
            except (MeshError, OSError) as refused:
                # By who fetches there just now, and has it said to be here; or by a disk that is
                # read-only since it failed. It is read again before it is given.
                logger.info("%s is not noted as missing: %s", name, refused)
                is_noted = False
        self._shelf.lose(kept.place, name, is_noted=is_noted)
        return _found(kept, kept.names, error, is_fetched=is_fetched)


def left_damaged(kept: StoredCheckpoint) -> Damaged | None:
    """What had changed of a partial checkpoint before this process ran, and has not come again;
    None where nothing has. Blocks. Raises BadCheckpoint."""
    partial = None if kept.complete is None else read_partial(kept.manifest.directory)
    if partial is None or not partial.dropped:
        return None
    first = kept.manifest.tensors[min(partial.dropped)]
    was = kept.names | partial.dropped
    return _found(kept, was, damaged(first), is_fetched=True, is_old=True)


def _found(
    kept: StoredCheckpoint,
    was: frozenset[str],
    error: MeshError,
    *,
    is_fetched: bool,
    is_old: bool = False,
) -> Damaged:
    """`was` are the tensors that were here."""
    manifest = kept.manifest
    is_whole = len(was) == len(manifest.tensors)
    layers, ends = (None, True) if is_whole else complete_layers(manifest, was)
    return Damaged(
        manifest.model_id, manifest.weights_sha256, kept.place, error, is_fetched, layers, ends,
        is_old,
    )  # fmt: skip
