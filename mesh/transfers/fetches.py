"""The fetches of this node: for each checkpoint one at a time, others of it wait for their turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.clock import set_within
from mesh.errors import Busy, DiskFull, MeshError, UnsupportedFamily
from mesh.models.manifest import read_manifest
from mesh.models.partial import RECORD, partial_directory, read_record
from mesh.processes.tasks import end, spawn
from mesh.transfers.commands import Ensure, Lied, PeerHolding, Transfer
from mesh.transfers.fetching import Fetch, WantedLayers, fetching
from mesh.transfers.meter import Meter
from mesh.transfers.pacing import Pace
from mesh.transfers.peers import Dial, PeerSources, agreed_files, create, hear, nobody
from mesh.transfers.shelf import Shelf, StoredCheckpoint
from mesh.types import NodeId

logger = logging.getLogger(__name__)

_AGAIN_S = 1.0
_LONGER = 4
"""A tokenizer of 35 MB takes two minutes over a bad wireless link."""

FromOutside = Callable[[Ensure, Fetch], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class _Running:
    order: Ensure
    state: str = "waiting"
    note: str = ""
    directory: Path | None = None
    fetch: Fetch | None = None
    sources: PeerSources | None = None


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """`patience_s` is how long somebody who has what is missing is waited for. Of several who have
    a checkpoint each has `saying_s` to say what it is, and longer each time nobody did."""

    models_dir: Path
    patience_s: float = 60.0
    saying_s: float = 30.0


class Fetches:
    """`ensure` what is wanted; `update` says who has what. Use on one event loop."""

    def __init__(
        self,
        settings: FetchSettings,
        shelf: Shelf,
        dial: Dial,
        pace: Pace,
        on_lie: Callable[[Lied], None] = lambda lie: None,
    ) -> None:
        self._settings = settings
        self._shelf = shelf
        self._dial = dial
        self._pace = pace
        self._on_lie = on_lie
        self._peers: tuple[PeerHolding, ...] = ()
        self._liars: tuple[Lied, ...] = ()
        self.neighbours = 0
        """How many other nodes are up."""
        self.outside: FromOutside | None = None
        """What gives a fetch that runs whatever no peer has, from where the origin says."""
        self._changed = asyncio.Event()
        self._turns: dict[str, asyncio.Lock] = {}
        self._running: dict[str, _Running] = {}

    def update(
        self, peers: Sequence[PeerHolding], neighbours: int = 0, liars: Sequence[Lied] = ()
    ) -> None:
        """All that other nodes advertise now, how many are up, and who is not to be asked."""
        self._peers, self.neighbours, self._liars = tuple(peers), neighbours, tuple(liars)
        self._changed.set()
        self._changed = asyncio.Event()
        for running in self._running.values():
            if running.sources is not None:
                running.sources.update(self._asked(running.order))

    @property
    def peers(self) -> tuple[PeerHolding, ...]:
        """All that other nodes advertise now."""
        return self._peers

    async def news(self, timeout_s: float) -> None:
        """Until others advertise something else, or so long."""
        changed = self._changed
        await set_within(changed, timeout_s)

    def keep_only(self, members: frozenset[NodeId]) -> None:
        """Ask nobody else."""
        kept = [peer for peer in self._peers if peer.node in members]
        self.update(kept, self.neighbours, self._liars)

    def is_fetching(self, directory: Path) -> bool:
        """Whether something is being written there."""
        return any(running.directory == directory for running in self._running.values())

    async def ensure(self, order: Ensure) -> Path:
        """The directory in which what is wanted is, once it is.

        Raises TransferFailed when nobody has it, DiskFull, BadCheckpoint.
        """
        running = self._running[order.id] = _Running(order)
        turn = self._turns.setdefault(order.weights_sha256, asyncio.Lock())
        try:
            async with turn:
                return await self._fetch(running)
        finally:
            del self._running[order.id]

    def rows(self) -> list[Transfer]:
        """What is under way."""
        now = asyncio.get_running_loop().time()
        return [_row(running, now) for running in self._running.values()]

    # Private

    async def _fetch(self, running: _Running) -> Path:
        order, wanted = running.order, WantedLayers(running.order.layers, running.order.ends)
        here = await asyncio.to_thread(self._here, order, wanted)
        if here is not None:
            return here
        own = self._shelf.own(order.weights_sha256, order.model_id)
        models_dir = self._settings.models_dir
        directory = own or partial_directory(models_dir, order.model_id, order.weights_sha256)
        while True:
            running.state = "looking"
            if not await asyncio.to_thread((directory / RECORD).exists):
                await self._prepare(running, directory)
            running.directory, running.state, running.note = directory, "fetching", ""
            opening = fetching(
                directory, wanted, self._shelf, self._pace,
                lambda node, tensor: self._lied(order, NodeId(node), tensor),
            )  # fmt: skip
            try:
                async with opening as fetch, self._asking(running, fetch):
                    await fetch.run(self._settings.patience_s)
            except Busy as error:
                # Another node of this user: what it fetches is there for this one as well.
                running.directory, running.state, running.note = None, "waiting", error.message
                await asyncio.sleep(_AGAIN_S)
            else:
                return directory

    @asynccontextmanager
    async def _asking(self, running: _Running, fetch: Fetch) -> AsyncIterator[None]:
        sha256, running.fetch = running.order.weights_sha256, fetch
        for name, why in self._refused(sha256).items():
            fetch.note(name, why)
        sources = running.sources = PeerSources(sha256, fetch, self._dial)
        sources.update(self._asked(running.order))
        tasks = []
        if self.outside is not None and running.order.hub is not None and not running.order.sources:
            tasks.append(spawn(self.outside(running.order, fetch), "ask the hub"))
        try:
            yield
        finally:
            running.fetch = running.sources = None
            await end(tasks)
            await sources.close()

    async def _prepare(self, running: _Running, directory: Path) -> None:
        """Have one of the peers say what the checkpoint is."""
        sha256 = running.order.weights_sha256
        errors = self._refused(sha256)
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._settings.patience_s
        limit_s = self._settings.saying_s
        while True:
            having, asked, is_slow = self._having(sha256), self._asked(running.order), False
            for peer in asked:
                said = None
                try:
                    async with asyncio.timeout(limit_s if len(asked) > 1 else None):
                        said = await hear(sha256, peer, self._dial, agreed_files(having))
                    await asyncio.to_thread(create, directory, said)
                except TimeoutError:
                    is_slow, errors[peer.node_name] = True, f"It said too little in {limit_s:g} s."
                except MeshError as error:
                    if isinstance(error, UnsupportedFamily) or (
                        said and isinstance(error, DiskFull)
                    ):
                        raise  # no other peer's are of use
                    errors[peer.node_name] = error.message
                    logger.info("peer=%s does not say: %s", peer.node_name, error)
                else:
                    return
            if is_slow:
                limit_s *= _LONGER
                continue
            if loop.time() > give_up_at:
                raise nobody(running.order.model_id, errors)
            running.note = "no node that is up has it" if not errors else ""
            await self.news(_AGAIN_S)

    def _here(self, order: Ensure, wanted: WantedLayers) -> Path | None:
        """The place where all of it lies already."""
        for kept in self._shelf.of(order.weights_sha256, order.model_id):
            if not kept.place.exists():  # whoever offered it has deleted it
                self._shelf.remove(kept.place)
            elif kept.names.issuperset(wanted.names(kept.manifest)):
                return kept.place
        return None

    def _having(self, sha256: str) -> list[PeerHolding]:
        return [peer for peer in self._peers if peer.held.weights_sha256 == sha256]

    def _asked(self, order: Ensure) -> list[PeerHolding]:
        """Those of them that may be asked."""
        having = self._having(order.weights_sha256)
        return [peer for peer in having if not order.sources or peer.node in order.sources]

    def _refused(self, sha256: str) -> dict[str, str]:
        """Who is not asked for it, and why."""
        return {lied.node_name: lied.why for lied in self._liars if lied.weights_sha256 == sha256}

    def _lied(self, order: Ensure, node: NodeId, tensor: str) -> None:
        """Whoever hears it leaves that node out of what it tells from now on."""
        name = next((peer.node_name for peer in self._peers if peer.node == node), node)
        lied = Lied(node, name, order.weights_sha256, tensor)
        if (fetch := self._running[order.id].fetch) is not None:
            fetch.note(name, lied.why)
        self._on_lie(lied)


def scan(models_dir: Path) -> list[StoredCheckpoint]:
    """The partial checkpoints below a directory; those that cannot be used are said. Blocks."""
    found = []
    for file in sorted(models_dir.glob(f"*/{RECORD}")):
        try:
            found.append(kept_in(file.parent))
        except (MeshError, OSError, ValueError) as error:
            logger.warning("%s is not served: %s", file.parent, error)
    return found


def kept_in(directory: Path) -> StoredCheckpoint:
    """A partial checkpoint as it is on the disk. Raises BadCheckpoint. Blocks."""
    manifest = read_manifest(directory)
    complete = frozenset(name for name, entry in manifest.tensors.items() if entry.present)
    record = read_record(directory)
    return StoredCheckpoint(manifest, record.origin, complete, record.is_read)


def _row(running: _Running, now: float) -> Transfer:
    order, meter = running.order, Meter()
    if running.fetch is not None:
        running.fetch.count()
        meter = running.fetch.meter
    note = running.note or (running.fetch.stopped_by if running.fetch is not None else "")
    return Transfer(
        order.id, order.model_id, order.weights_sha256, running.state, meter.done, meter.total,
        meter.rate(now), meter.eta_s(now), tuple(meter.sources(now)), note,
    )  # fmt: skip
