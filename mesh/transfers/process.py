"""The fetcher: ``python -m mesh.transfers.process``, one per node, started by the daemon.

Serves weights to trusted members and fetches those that this node needs, so that the daemon's loop
sees no byte of them. It runs at the lowest priority: whoever computes goes first. It says when it
has had nothing to do for a while; the daemon ends it then, and listens until another is needed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from mesh.accounts import allowances
from mesh.accounts.ledger import ResourceLedger
from mesh.clock import SystemClock, next_tick
from mesh.discovery.interfaces import Reach
from mesh.errors import (
    BadRequest,
    InternalError,
    MeshError,
    ModelInUse,
    ModelNotFound,
)
from mesh.models.hashing import fingerprint
from mesh.models.hub_cache import hub_snapshot
from mesh.models.manifest import read_manifest
from mesh.models.partial import RECORD, read_partial
from mesh.models.partial_writer import remove_partial
from mesh.models.rounded import sweep_rounded
from mesh.paths import quantised_dir
from mesh.processes.child import listener_of_parent
from mesh.processes.dialing import connect_to
from mesh.processes.heap import give_back, keep_buffers
from mesh.processes.messages import Handlers
from mesh.processes.worker import Worker
from mesh.transfers import documents
from mesh.transfers.asking import WeightsLink
from mesh.transfers.commands import (
    Damaged,
    Ensure,
    FetchHeaders,
    Holds,
    Idle,
    LocalCheckpoint,
    MakeWay,
    Moves,
    PeerHolding,
    Peers,
    PullRepository,
    RemoveCheckpoint,
    Reread,
    ServeCheckpoint,
    StartFetcher,
    Transfer,
    WithdrawCheckpoint,
)
from mesh.transfers.fetches import Fetches, FetchSettings, scan
from mesh.transfers.hub import origin_of
from mesh.transfers.outside import CLAIM_PATIENCE, HubClaims, Outside
from mesh.transfers.pacing import CpuShare, Pace
from mesh.transfers.rereading import Rereading, left_damaged
from mesh.transfers.serving import WeightsServer
from mesh.transfers.shelf import Shelf, StoredCheckpoint
from mesh.types import NodeId
from mesh.wire.connection import WebSocketLink
from mesh.wire.limits import WEIGHTS_LIMITS
from mesh.wire.link import LinkHandler
from mesh.wire.websocket import Doorkeeper, LinkServer, place_of, serve

logger = logging.getLogger(__name__)

_TELL_S = 0.5


@dataclass(frozen=True, slots=True)
class _Parts:
    """What there is from the start on."""

    start: StartFetcher
    fetches: Fetches
    outside: Outside


Order = Ensure | PullRepository | FetchHeaders | RemoveCheckpoint


class FetcherProcess(Worker):
    """What this node has of weights, for others and from others."""

    most_at_once = 64

    def __init__(self, rereading: type[Rereading] = Rereading, shelf: type[Shelf] = Shelf) -> None:
        super().__init__()
        self._shelf = shelf()
        self._rereading = rereading(self._shelf, self._damaged)
        self._parts: _Parts | None = None
        self._offered_early: list[LocalCheckpoint] = []
        """While it starts, by a daemon that did not know of them when it was told to."""
        self._listener: LinkServer | None = None
        self._accounts = ResourceLedger(SystemClock(), allowances.LINKS)
        self._share = CpuShare()
        self._serving_pace, self._fetching_pace = Pace(self._share), Pace(self._share)
        self._peers = Peers(())
        self._moves: Moves | None = None
        self._holds: Holds | None = None
        self._holds_of = -1
        self._telling_holdings = asyncio.Lock()
        """Of two who tell at once in two threads the older could be heard last."""
        self._sent_bytes = 0
        self._busy_at = 0.0
        self._was_asked = False
        self._adding = 0

    def commands(self) -> Handlers:
        return {
            StartFetcher: self._start,
            Ensure: self._order,
            PullRepository: self._order,
            FetchHeaders: self._order,
            RemoveCheckpoint: self._order,
            Reread: self._reread,
            Peers: self._hear,
            MakeWay: lambda command: self._share.make_way(command.is_on),
            ServeCheckpoint: self._offer,
            WithdrawCheckpoint: lambda command: self._shelf.remove(command.place),
        }

    def unforeseen(self, error: Exception) -> MeshError:
        return InternalError(f"The fetcher failed: {error}.", fix="See the log.")

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()

    # Commands

    async def _start(self, command: StartFetcher) -> int:
        keep_buffers()
        rate = command.bytes_per_s or math.inf
        self._serving_pace.limit(rate)
        self._fetching_pace.limit(rate)
        settings = FetchSettings(command.models_dir, command.patience_s)
        fetches = Fetches(settings, self._shelf, self._dial, self._fetching_pace, self.say)
        fetches.update(self._peers.peers, self._peers.neighbours, self._peers.liars)
        claims = HubClaims(
            NodeId(command.hello.node_id), self._shelf, fetches,
            patience_s=CLAIM_PATIENCE * command.patience_s,
        )  # fmt: skip
        outside = Outside(command.models_dir, self._shelf, fetches, claims, self._fetching_pace)
        fetches.outside = outside.feed
        self._parts = _Parts(command, fetches, outside)
        for model in (*command.models, *self._offered_early):
            await self._add(model)
        for kept in await asyncio.to_thread(scan, command.models_dir):
            await self._put(kept)
        await asyncio.to_thread(sweep_rounded, command.cache_dir)
        # Whoever has knocked already is answered with all that is here.
        listener = await self._listen(command)
        await self._tell_holdings()
        self.keep(self._report(), "tell what is here")
        return listener.port

    async def _listen(self, command: StartFetcher) -> LinkServer:
        host = command.listen_host
        interfaces = [host] if command.interfaces is None else command.interfaces
        listener = self._listener = await serve(
            Reach.of(interfaces, host) or host,
            0,
            accept=Doorkeeper(self.members.identify, self._accept),
            hello=command.hello,
            limits=replace(WEIGHTS_LIMITS, accounts=self._accounts),
            ssl=self.members.tls.server,
            sock=listener_of_parent(),
        )
        await self.follow_members(self._keep_only)
        return listener

    async def _order(self, order: Order) -> Path:
        directory = await self._obey(order)
        await self._tell_holdings()  # who hears that it is done finds what is here told
        return directory

    async def _obey(self, order: Order) -> Path:
        parts = self._started
        match order:
            case Ensure():
                return await parts.fetches.ensure(order)
            case PullRepository():
                return await parts.outside.pull(order)
            case FetchHeaders():
                return await parts.outside.headers(order, parts.start.cache_dir)
            case RemoveCheckpoint():
                return await self._delete(order.directory)

    async def _reread(self, command: Reread) -> int:
        found = await self._rereading.all(command.weights_sha256)
        await self._tell_holdings()
        return found

    def _damaged(self, found: Damaged) -> None:
        """What was rounded of it may have been so when it had changed already."""
        self.spawn(self._forget_rounded(found.weights_sha256), f"rounded of {found.model_id}")
        self.say(found)

    async def _forget_rounded(self, weights_sha256: str) -> None:
        rounded = quantised_dir(self._started.start.cache_dir, weights_sha256)
        await asyncio.to_thread(shutil.rmtree, rounded, ignore_errors=True)

    def _hear(self, command: Peers) -> None:
        self._peers = command
        if self._parts is not None:
            self._parts.fetches.update(command.peers, command.neighbours, command.liars)

    def _offer(self, command: ServeCheckpoint) -> None:
        if self._parts is None:
            self._offered_early.append(command.model)
            return
        self.spawn(self._add(command.model), f"offer {command.model.model_id}")

    async def _delete(self, directory: Path) -> Path:
        start, fetches = self._started.start, self._started.fetches
        if directory.parent != start.models_dir:
            raise ModelInUse(
                f"{directory} was not put there by hearthnet.",
                fix=f"`hearthnet pull --cancel {directory}` has it offered no longer; delete it"
                " yourself, once no node serves it.",
            )
        if not (directory / RECORD).exists():
            raise ModelNotFound(f"{directory} holds no model.", fix="See `hearthnet list`.")
        if fetches.is_fetching(directory):
            raise ModelInUse(f"{directory} is being fetched.", fix="Wait until that has ended.")
        kept = self._shelf.at(directory)
        # First: who fetches it again while the files go is neither told that it is here, nor has
        # what comes taken off the shelf at the end.
        self._shelf.remove(directory)
        try:
            await asyncio.to_thread(remove_partial, directory)
        except (MeshError, OSError):
            if kept is not None and self._shelf.at(directory) is None:
                self._shelf.put(kept)
            raise
        if kept is not None and not self._shelf.of(kept.manifest.weights_sha256):
            await self._forget_rounded(kept.manifest.weights_sha256)
        return directory

    @property
    def _started(self) -> _Parts:
        if self._parts is None:
            raise BadRequest("The fetcher has not started.", fix="Wait.")
        return self._parts

    # What is here

    async def _add(self, model: LocalCheckpoint) -> None:
        cache_dir = self._started.start.cache_dir
        self._adding += 1
        try:
            await self._put(await asyncio.to_thread(_kept, model, cache_dir))
        except MeshError as error:
            logger.warning("model=%s is not served to others: %s", model.model_id, error)
        finally:
            self._adding -= 1

    async def _put(self, kept: StoredCheckpoint) -> None:
        self._shelf.put(kept)
        if (left := await asyncio.to_thread(left_damaged, kept)) is not None:
            self.say(left)

    async def _report(self) -> None:
        is_kept = False
        self._busy_at = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(next_tick(_TELL_S) - asyncio.get_running_loop().time())
            await asyncio.to_thread(self._shelf.look)
            for gone in self._shelf.outdated():
                self._offer(ServeCheckpoint(LocalCheckpoint(gone.manifest.model_id, gone.place)))
            await self._tell_holdings()
            rows = self._rows()
            moves = Moves(rows, self._sent_bytes)
            if rows or moves != self._moves:
                self.say(moves)
                self._moves, is_kept = moves, True
            elif is_kept:  # nothing moves any more
                give_back()
                is_kept = False
            self._tell_idleness()

    def _tell_idleness(self) -> None:
        start, now = self._started.start, asyncio.get_running_loop().time()
        listener = self._listener
        if self.exchange.tasks or (listener is not None and (listener.links or listener.half_open)):
            self._busy_at, self._was_asked = now, True
        elif self._adding:
            self._busy_at = now
        elif now - self._busy_at >= (start.idle_s if self._was_asked else start.unasked_s):
            self._busy_at = now  # said again should the daemon have kept it
            self.say(Idle())

    async def _tell_holdings(self) -> None:
        async with self._telling_holdings:
            if self._holds_of == (version := self._shelf.version):
                return
            holds = Holds(tuple(await asyncio.to_thread(self._shelf.holdings)))
            if holds != self._holds:
                self.say(holds)
                self._holds = holds
            self._holds_of = version  # who is cancelled before has told nothing

    def _rows(self) -> tuple[Transfer, ...]:
        """A pull that is a fetch by now is told as that."""
        pulling, fetching = self._started.outside.rows(), self._started.fetches.rows()
        rows = {row.id: row for row in [*pulling, *fetching]}
        return tuple(rows.values())

    def _count(self, sent: int) -> None:
        self._sent_bytes += sent

    # Links

    async def _dial(self, peer: PeerHolding) -> WeightsLink:
        host, port = place_of(peer.held.endpoint)
        handler = WeightsLink(peer.node)
        link = await connect_to(
            peer.node, host, port, hello=self._started.start.hello, handler=handler,
            tls=self.members.tls, limits=WEIGHTS_LIMITS,
        )  # fmt: skip
        handler.attach(link)
        return handler

    def _accept(self, link: WebSocketLink) -> LinkHandler:
        self.members.require_trusted(link, "weights", "weights")
        return WeightsServer(link, self._shelf, self._rereading, self._serving_pace, self._count)

    def _keep_only(self, members: frozenset[NodeId]) -> None:
        for link in self._listener.links if self._listener is not None else ():
            if link.peer.node_id not in members:
                link.close("you are no longer trusted here")
        self._started.fetches.keep_only(members)


def _kept(model: LocalCheckpoint, cache_dir: Path) -> StoredCheckpoint:
    manifest = read_manifest(model.directory, model_id=model.model_id, cache_dir=cache_dir)
    partial, snapshot = read_partial(manifest.directory), hub_snapshot(manifest.directory)
    if partial is not None:
        record = partial.record
        return StoredCheckpoint(manifest, record.origin, partial.complete, record.is_read)
    file = "" if manifest.gguf is None else manifest.gguf.name
    origin = "" if snapshot is None else origin_of(snapshot.repo_id, snapshot.commit, file)
    seen = {file: fingerprint(file) for file in documents.weights_files(manifest)}
    return StoredCheckpoint(manifest, origin, None, snapshot is not None, seen)


def main(rereading: type[Rereading] = Rereading, shelf: type[Shelf] = Shelf) -> None:
    """Be the process, until told to stop or until the daemon is gone."""
    asyncio.run(FetcherProcess(rereading, shelf).run())


if __name__ == "__main__":
    main()
