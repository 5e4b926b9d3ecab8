"""Fetch some tensors of one checkpoint from whoever has them, into a partial checkpoint here.

Sources come and go while it runs. One that fails is left alone for a while and tried again; one
whose bytes were wrong is named and never asked again. What arrives is on the shelf, for others to
take, as soon as it is verified and on the disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from mesh.clock import set_within
from mesh.errors import MeshError, TransferFailed, as_mesh_error
from mesh.models.manifest import Manifest, read_manifest
from mesh.models.partial import PIECE_BYTES
from mesh.models.partial_writer import PartialWriter, WriteOutcome, pieces_of
from mesh.processes.tasks import end, spawn
from mesh.transfers.asking import Parts, Source
from mesh.transfers.documents import wanted_tensors
from mesh.transfers.meter import Meter
from mesh.transfers.pacing import Pace
from mesh.transfers.piece_picker import Piece, PiecePicker
from mesh.transfers.shelf import Shelf, StoredCheckpoint
from mesh.types import LayerRange

logger = logging.getLogger(__name__)

_TELL_EVERY_S = 1.0
"""What is verified is flushed, and told to others, so often."""
_MAX_PIECES = 8
"""Pieces in memory, on their way in or to the disk."""
_IN_VAIN = 2
"""Nobody waits for a source that has failed so often and given nothing since."""


@dataclass(frozen=True, slots=True)
class WantedLayers:
    """What of a checkpoint: these layers and perhaps the ends; None stands for all there is."""

    layers: tuple[LayerRange, ...] | None
    ends: bool = True

    def names(self, manifest: Manifest) -> list[str]:
        """The tensors. Raises BadCheckpoint for layers that the model does not have."""
        return wanted_tensors(manifest, self.layers, ends=self.ends)


@dataclass(slots=True)
class _Asked:
    """A source, and the questions to it that are under way."""

    source: Source
    on_error: Callable[[MeshError], None]
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


@asynccontextmanager
async def fetching(
    directory: Path,
    wanted: WantedLayers,
    shelf: Shelf,
    pace: Pace,
    on_lie: Callable[[str, str], None] = lambda source, tensor: None,
) -> AsyncIterator[Fetch]:
    """A fetch of what is wanted; at the end nobody is asked any more. `on_lie` hears the source
    whose bytes were wrong and the tensor.

    Raises DiskFull, BadCheckpoint, Busy while another process writes there.
    """
    writer = await _opened(directory)
    try:
        manifest = await asyncio.to_thread(read_manifest, directory)
        plan = await asyncio.to_thread(_plan_for, writer, manifest, wanted)
    except BaseException:
        await asyncio.to_thread(writer.close)
        raise
    fetch = Fetch(writer, manifest, plan, shelf, pace, on_lie)
    fetch.meter.total = sum(manifest.tensors[name].nbytes for name in wanted.names(manifest))
    try:
        yield fetch
    finally:
        await fetch.close()


class Fetch:
    """See `fetching`; `join` and `leave` say who can be asked. Use on one event loop."""

    def __init__(
        self,
        writer: PartialWriter,
        manifest: Manifest,
        plan: PiecePicker,
        shelf: Shelf,
        pace: Pace,
        on_lie: Callable[[str, str], None],
    ) -> None:
        self.directory = writer.directory
        self.meter = Meter()
        self._writer = writer
        self._manifest = manifest
        self._plan = plan
        self._shelf = shelf
        self._pace = pace
        self._on_lie = on_lie
        self._asked: dict[str, _Asked] = {}
        self._error: MeshError | None = None
        self._given_up: dict[str, str] = {}
        self._failed: Counter[str] = Counter()
        """How often a source has failed since it last gave something."""
        self._changed = asyncio.Event()
        self._room = asyncio.Semaphore(_MAX_PIECES)
        self._keeping: set[asyncio.Task[None]] = set()

    @property
    def liars(self) -> frozenset[str]:
        """The sources that are not asked again."""
        return frozenset(self._plan.liars)

    @property
    def stopped_by(self) -> str:
        """Why nothing comes, of everybody that gives nothing now; '' while somebody is asked."""
        if any(asked.tasks for asked in self._hoped):
            return ""
        return " ".join(f"{name}: {why}" for name, why in self._given_up.items())

    @property
    def lacking(self) -> list[str]:
        """The tensors that are missing and that no peer has."""
        return self._plan.lacking()

    def join(
        self,
        name: str,
        source: Source,
        holds: frozenset[str],
        on_error: Callable[[MeshError], None],
        *,
        is_spared: bool = False,
    ) -> None:
        """A source that has these tensors; `on_error` hears once why it is not used any more."""
        if self._failed[name] < _IN_VAIN:
            self._given_up.pop(source.name, None)
        self._asked[name] = _Asked(source, on_error)
        self._plan.join(name, holds, is_spared=is_spared)
        self._dispatch()

    def learn(self, name: str, holds: frozenset[str]) -> None:
        """A source has other tensors now."""
        if name in self._asked:
            self._plan.join(name, holds)
            self._dispatch()

    def note(self, source: str, why: str) -> None:
        """Why a source gives nothing now, for whoever is told that something is missing."""
        self._given_up[source] = why

    def leave(self, name: str) -> None:
        """A source is gone."""
        asked = self._asked.pop(name, None)
        if asked is not None:
            for task in asked.tasks:
                task.cancel()
            asked.source.close()
        self._leave_plan(name)

    async def close(self) -> None:
        """Ask nobody any more; what has come is on the disk and on the shelf."""
        for name in list(self._asked):
            self.leave(name)
        await end(self._keeping)
        await asyncio.to_thread(self._writer.close)
        self._put_on_shelf(is_over=True)

    def count(self) -> None:
        """Bring `meter` up to date."""
        self.meter.done = max(0, self.meter.total - self._plan.left_bytes)

    async def run(self, patience_s: float = 60.0) -> None:
        """Until all that is wanted is here, verified and on the disk. Raises TransferFailed when
        nobody has what is missing for so long, DiskFull, BadCheckpoint."""
        loop, plan = asyncio.get_running_loop(), self._plan
        helped_at = told_at = loop.time()
        while not plan.is_done:
            self._changed.clear()
            await set_within(self._changed, _TELL_EVERY_S)
            if self._error is not None:
                raise self._error
            if loop.time() - told_at >= _TELL_EVERY_S or plan.is_done:
                await asyncio.to_thread(self._writer.commit)
                self._put_on_shelf()
                told_at = loop.time()
            if self._is_helped():
                helped_at = loop.time()
            elif loop.time() - helped_at > patience_s:
                raise self._unhelped()

    # Private

    def _is_helped(self) -> bool:
        """Whether what is missing may come from those who can be asked now."""
        hoped = self._hoped
        is_asked = any(asked.tasks for asked in hoped)
        return is_asked or (len(hoped) > 0 and len(self._plan.unheld()) == 0)

    @property
    def _hoped(self) -> list[_Asked]:
        return [asked for name, asked in self._asked.items() if self._failed[name] < _IN_VAIN]

    def _unhelped(self) -> TransferFailed:
        unheld = self._plan.unheld()
        if len(unheld) > 0:
            said = (
                f"No node that is up has {len(unheld)} of the tensors that are missing,"
                f" {unheld[0]} among them."
            )
        else:
            names = ", ".join(sorted(asked.source.name for asked in self._asked.values()))
            said = f"Who has the tensors that are missing gives nothing of them: {names}."
        return TransferFailed(
            f"{said} {self.stopped_by}".rstrip(),
            fix="Start the node that has them, or pull the model from the hub. What was"
            " fetched is kept.",
        )

    def _put_on_shelf(self, *, is_over: bool = False) -> None:
        """Also what was damaged while somebody wrote here, once that `is_over`: what could not be
        noted is found again, and can be now."""
        record, complete = self._writer.record, frozenset(self._writer.complete)
        before = self._shelf.at(self.directory)
        if is_over or before is None or before.complete != complete:
            self._shelf.put(
                StoredCheckpoint(self._manifest, record.origin, complete, record.is_read)
            )

    def _dispatch(self) -> None:
        """Ask everybody who has time."""
        self._changed.set()
        for name, asked in list(self._asked.items()):
            while (piece := self._plan.next(name)) is not None:
                work = self._ask(name, asked, piece)
                spawn(work, f"fetch {piece.tensor}", among=asked.tasks)

    async def _ask(self, name: str, asked: _Asked, piece: Piece) -> None:
        async with self._room:
            data = await self._read(name, asked, piece)
            if data is None:
                return
            # Whoever gave it may be sent away meanwhile: what came is dealt with all the same.
            work = self._keep(piece, data)
            keeping = spawn(work, f"keep {piece.tensor}", among=self._keeping)
            self._dispatch()
            await asyncio.shield(keeping)

    async def _read(self, name: str, asked: _Asked, piece: Piece) -> Parts | None:
        """The bytes, when they are news."""
        loop = asyncio.get_running_loop()
        try:
            await self._pace.take(piece.size)
            began = loop.time()
            data = await as_mesh_error(
                asked.source.read(piece.tensor, piece.start, piece.stop), "the fetch"
            )
        except MeshError as error:
            if self._asked.get(name) is asked:
                self._asked.pop(name)
                self._failed[name] += 1
                self._leave_plan(name)
                asked.source.close()
                asked.on_error(error)
            return None
        is_news = self._plan.arrived(name, piece, loop.time() - began)
        del self._failed[name]
        self.meter.arrived(name, asked.source.name, piece.size, loop.time())
        if not is_news:
            self._dispatch()
        return data if is_news else None

    def _leave_plan(self, name: str) -> None:
        """What it had in hand goes to the others."""
        self._plan.leave(name)
        self._dispatch()

    async def _keep(self, piece: Piece, data: Parts) -> None:
        try:
            await as_mesh_error(self._put(piece, data), "keeping weights")
        except MeshError as error:
            self._error = self._error or error
        self._dispatch()

    async def _put(self, piece: Piece, data: Parts) -> None:
        outcome = await asyncio.to_thread(self._writer.put, piece.tensor, piece.start, data)
        if outcome is WriteOutcome.WRONG:
            self._expel(self._plan.wrong(piece.tensor), piece.tensor)
        elif outcome is WriteOutcome.COMPLETE:
            differing = await asyncio.to_thread(self._writer.differing, piece.tensor)
            starts = [index * PIECE_BYTES for index in differing]
            self._expel(self._plan.right(piece.tensor, starts), piece.tensor)

    def _expel(self, liars: set[str], tensor: str) -> None:
        for name in liars:
            logger.error("source=%s gave wrong bytes of %s; it is not asked again", name, tensor)
            self._on_lie(name, tensor)
            self.leave(name)


async def _opened(directory: Path) -> PartialWriter:
    """Whoever is cancelled meanwhile leaves no writer behind, which would keep out all others."""
    opening = asyncio.ensure_future(asyncio.to_thread(PartialWriter, directory))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        with suppress(MeshError, OSError):
            (await opening).close()
        raise


def _plan_for(writer: PartialWriter, manifest: Manifest, wanted: WantedLayers) -> PiecePicker:
    """What is missing; tensors whose pieces are all here from before are verified first. Blocks."""
    names = wanted.names(manifest)
    writer.require_room(names)
    missing: dict[str, tuple[list[Piece], list[Piece]]] = {}
    for name in names:
        left = writer.missing(name)
        if not left and writer.settle(name) is WriteOutcome.COMPLETE:
            continue
        pieces = [Piece(name, *place) for place in pieces_of(manifest.tensors[name].nbytes)]
        missing[name] = (pieces, [Piece(name, *place) for place in left] or pieces)
    return PiecePicker(missing)
