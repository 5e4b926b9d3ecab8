"""The daemon's side of the fetcher: what it has and fetches, and the way to have it fetch.

A crash of it costs a piece: what was asked for is asked again of the next one. Imports no torch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs, to_builtins

from mesh.clock import set_within
from mesh.discovery.interfaces import Reach
from mesh.discovery.weights import HeldWeights
from mesh.errors import BadValue, MeshError, ProcessLost
from mesh.processes.lifecycle import ChildEnding, ProcessState
from mesh.processes.messages import Handlers, Request
from mesh.processes.resting import RestingSupervisor
from mesh.transfers.commands import (
    Damaged,
    Ensure,
    FetchHeaders,
    Holds,
    Idle,
    Lied,
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
from mesh.transfers.hub import HubSettings, hub_settings
from mesh.transfers.repairs import Repairs
from mesh.transfers.shelf import Holding
from mesh.types import LayerRange, ModelId, NodeId
from mesh.wire.websocket import ANY_ADDRESS, BACKLOG

logger = logging.getLogger(__name__)

LOOK_PATIENCE_S = 10.0
"""So long those wait at most who want to know what is here; hashing a new checkpoint takes
longer."""
MAX_LIARS = 1024
"""That are remembered; those found first are forgotten first."""

OnOrder = Callable[[str], None]
Notify = Callable[[str, dict[str, Any]], None]

_A = TypeVar("_A")


class FetcherSupervisor(RestingSupervisor):
    """Runs the fetcher. `on_change` says that what is here, how far fetches are, or where it
    listens, has changed; `notify` gets the type and fields of events for people."""

    def __init__(
        self,
        start: StartFetcher | None,
        on_change: Callable[[], None] = lambda: None,
        notify: Notify = lambda kind, fields: None,
        hub: Callable[[], HubSettings] = hub_settings,
        is_used: Callable[[], bool] = lambda: False,
        module: str = "mesh.transfers.process",
    ) -> None:
        """`hub` is asked in a thread, whenever it is needed, and `is_used`, while weights move,
        whether somebody is answered on this machine. `module` calls `mesh.transfers.process.main`.
        """
        super().__init__("the fetcher", module, start)
        self.holdings: tuple[Holding, ...] = ()
        """What is here, by checkpoint."""
        self.transfers: tuple[Transfer, ...] = ()
        """What is under way, as it was said last."""
        self.sent_bytes = 0
        """By all fetchers since this node started."""
        self._sent_before = 0
        self.port: int | None = None
        self._on_change = on_change
        self._hub = hub
        self._notify = notify
        self._is_used = is_used
        self._makes_way = False
        self._peers = Peers(())
        self._advertised: tuple[Sequence[PeerHolding], int] = ((), 0)
        self._liars: dict[tuple[NodeId, str], tuple[Lied, HeldWeights]] = {}
        """Who gave wrong bytes, of which checkpoint, and what it offered of it: of that it is asked
        no more before it has withdrawn some of it, as who finds that its disk has changed it does.
        """
        self.repairs = Repairs(
            lambda damaged: self.ensure(
                damaged.model_id, damaged.weights_sha256, damaged.layers, ends=damaged.ends
            ),
            self.reread,
        )
        self._numbers = itertools.count(1)
        self._has_looked = asyncio.Event()
        self._orders = 0
        """How many wait for what they have ordered."""

    async def ensure(
        self,
        model_id: ModelId,
        weights_sha256: str,
        layers: Sequence[LayerRange] | None = None,
        *,
        ends: bool = True,
        sources: tuple[NodeId, ...] = (),
        on_order: OnOrder = lambda name: None,
    ) -> Path:
        """The directory of a checkpoint of which these layers (None: all there is) and perhaps the
        ends are here, once they are; how far that is, is in `transfers`, under the id that
        `on_order` is told. Where `sources` are named, nothing comes from anybody else.

        Raises TransferFailed when nobody has them, DiskFull, BadCheckpoint, and Busy when this node
        is stopping. Cancelling ends the fetch; what came is kept.
        """
        spans = None if layers is None else tuple(layers)
        hub = await asyncio.to_thread(self._hub)
        on_order(name := str(next(self._numbers)))
        return await self._order(Ensure(name, model_id, weights_sha256, spans, ends, hub, sources))

    async def pull(
        self,
        repository: str,
        layers: Sequence[LayerRange] | None = None,
        *,
        revision: str = "main",
        ends: bool = True,
        drop: bool = False,
        hub_alone: bool = False,
        on_order: OnOrder = lambda name: None,
    ) -> Path:
        """The same for a repository of the hub, from neighbours as far as they have it.

        Where nobody knows the hashes of its tensors, all of it is read once, by one node of the
        hearth, and kept for the others unless what is not wanted is to `drop`. With `hub_alone`
        nobody's word is taken for the hashes but that of the hub's bytes. Raises HubRefused and
        ModelNotFound beside what `ensure` raises.
        """
        spans = None if layers is None else tuple(layers)
        hub = await asyncio.to_thread(self._hub)
        on_order(name := str(next(self._numbers)))
        return await self._order(
            PullRepository(name, repository, revision, spans, ends, hub, drop, hub_alone)
        )

    async def headers(self, repository: str) -> Path:
        """A directory with the config of a repository of the hub and its weights' headers, and no
        weights: for a manifest that is not hashed.

        Raises HubRefused, ModelNotFound, BadCheckpoint, UnsupportedFamily, and TransferFailed.
        """
        hub = await asyncio.to_thread(self._hub)
        return await self._order(FetchHeaders(repository, hub))

    async def remove(self, directory: Path) -> None:
        """Delete a checkpoint that was fetched. Raises ModelInUse, ModelNotFound."""
        await self._order(RemoveCheckpoint(directory))
        self.repairs.forget(directory)

    async def reread(self, weights_sha256: str = "") -> int:
        """Have what is here compared with its hashes once more: all of it, in a small part of the
        time, or this checkpoint, at once. How many tensors have changed: they are said, and fetched
        again where that is possible. Raises MeshError."""
        return await self._order(Reread(weights_sha256))

    async def has_looked(self) -> None:
        """Once it is known what is here, which the first process finds out as it starts, or after
        `LOOK_PATIENCE_S`."""
        if self.is_to_run:
            await set_within(self._has_looked, LOOK_PATIENCE_S)

    def offer(self, model: LocalCheckpoint) -> None:
        """Give this to others as well."""
        start = self.first_command
        if isinstance(start, StartFetcher) and model not in start.models:
            self.first_command = structs.replace(start, models=(*start.models, model))
            self.tell(ServeCheckpoint(model))
            self.wake()

    def withdraw(self, place: Path) -> None:
        """Give what lies there to others no longer."""
        start = self.first_command
        if isinstance(start, StartFetcher):
            others = tuple(each for each in start.models if each.directory != place)
            self.first_command = structs.replace(start, models=others)
            self.tell(WithdrawCheckpoint(place))
            self.wake()  # or what it told last would stand

    @property
    def is_answering(self) -> bool:
        """Whether somebody who asks for weights is answered, perhaps by a fetcher to be started."""
        if self.is_up or self.ended_at_will:
            return True
        is_well = self.ending is None and self.state is not ProcessState.SILENT
        return self.port is not None and is_well

    async def stop(self) -> None:
        await self.repairs.close()
        await super().stop()
        if self.listener is not None:
            self.listener.close()

    def hear(self, peers: Sequence[PeerHolding], neighbours: int = 0) -> None:
        """What other nodes advertise now, and how many of those are up."""
        self._advertised = (peers, neighbours)
        offered = {(peer.node, peer.held.weights_sha256): peer.held for peer in peers}
        liars = self._liars = {
            key: (lied, before)
            for key, (lied, before) in self._liars.items()
            if key in offered and not _has_withdrawn(before, offered[key])
        }
        honest = [peer for peer in peers if (peer.node, peer.held.weights_sha256) not in liars]
        said = tuple(lied for lied, _ in liars.values())
        if self._peers != (now := Peers(tuple(honest), neighbours, said)):
            self._peers = now
            self.tell(now)

    def facts(self) -> dict[str, Any]:
        """For `status`, JSON-able."""
        return {
            "models": [model_facts(held) for held in self.holdings if held.weights_sha256],
            "transfers": to_builtins(self.transfers),
            "sent_bytes": self.sent_bytes,
        }

    # What a kind of process decides

    def answers(self) -> Handlers:
        """What the fetcher says."""
        return {
            Holds: self._holds,
            Moves: self._moves,
            Lied: self._lied,
            Damaged: self._damaged,
            Idle: self._idle,
        }

    def on_started(self) -> None:
        """Tell a new one who has what, and what was asked of the last."""
        super().on_started()
        self._makes_way = False
        self._look()
        self.tell(self._peers)

    def on_ready(self, answer: int) -> None:
        """It listens at this port, and has said what is here."""
        self.port = answer
        self._has_looked.set()
        self._on_change()

    def on_ended(self, ending: ChildEnding) -> None:
        """Nothing moves any more."""
        super().on_ended(ending)
        self.transfers, self._sent_before = (), self.sent_bytes
        self._on_change()

    def why_not_start(self, free_mb: int) -> MeshError | None:
        """It needs a socket to answer at, which stays open from one process to the next."""
        start = self.first_command
        if self.listener is None and isinstance(start, StartFetcher):
            try:
                self.listener = _listening_socket(start)
            except OSError as error:
                return BadValue(
                    f"Nobody can ask for weights at {start.listen_host}: {error.strerror}.",
                    fix="Name an interface of this machine.",
                    param="interface",
                )
        return None

    def on_changed(self) -> None:
        """It fell silent, was heard again or is gone."""
        self._on_change()

    # Private

    async def _order(self, order: Request[_A]) -> _A:
        """What one fetcher after the other is asked for until one answers. Raises its error, and
        Busy when there will be no other."""
        self._orders += 1
        try:
            while True:
                self.start()
                self.wake()
                self._look()
                await self.wait_up()
                try:
                    return await self.exchange.ask(order)
                except ProcessLost:
                    await asyncio.sleep(0)  # it is not up any more once its end is heard
        finally:
            self._orders -= 1

    def _holds(self, answer: Holds) -> None:
        self.holdings = answer.holdings
        self._on_change()

    def _moves(self, answer: Moves) -> None:
        self.transfers = answer.transfers
        self.sent_bytes = self._sent_before + answer.sent_bytes
        self._look()
        self._on_change()

    def _look(self) -> None:
        """Have weights make way, or not; looked at whenever some have moved."""
        if (now := self._is_used()) != self._makes_way and self.tell(MakeWay(now)):
            self._makes_way = now

    def _idle(self, _answer: Idle) -> None:
        """Whoever knocks, and whatever is to be fetched, starts another."""
        if not self._orders:
            logger.info("the fetcher rests")
            self.rest()

    def _lied(self, answer: Lied) -> None:
        logger.error("%s gave wrong bytes of %s", answer.node_name, answer.tensor)
        while len(self._liars) >= MAX_LIARS:
            del self._liars[next(iter(self._liars))]
        key = answer.node, answer.weights_sha256
        for peer in self._advertised[0]:
            if (peer.node, peer.held.weights_sha256) == key:
                self._liars[key] = answer, peer.held
        self.hear(*self._advertised)
        self._notify(
            "weights_lied",
            {
                "node_id": answer.node,
                "name": answer.node_name,
                "weights_sha256": answer.weights_sha256,
                "tensor": answer.tensor,
            },
        )

    def _damaged(self, answer: Damaged) -> None:
        if answer.is_old and answer.directory in self.repairs:
            return  # the fetcher that found it has said so
        error = answer.error
        logger.error("model=%s %s", answer.model_id, error)
        self._notify("warning", {"code": error.code, "message": error.message, "fix": error.fix})
        if answer.is_fetched:
            self.repairs.take(answer)


def _has_withdrawn(before: HeldWeights, now: HeldWeights) -> bool:
    """Whether somebody offers less of a checkpoint than before."""
    lost_ends = before.ends and not now.ends
    return lost_ends or any(span.lacking(now.layers) for span in before.layers)


def _listening_socket(start: StartFetcher) -> socket.socket:
    """At a free port: of the one address that was asked for, or of all, see `Reach`."""
    host = start.listen_host
    if Reach.of([host] if start.interfaces is None else start.interfaces, host) is not None:
        host = ANY_ADDRESS
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=BACKLOG)


def model_facts(holding: Holding) -> dict[str, Any]:
    """A checkpoint that is here, JSON-able; layers as ranges, inclusive."""
    return {
        "id": holding.model_id,
        "weights_sha256": holding.weights_sha256,
        "origin": holding.origin or None,
        "directory": str(holding.directory),
        "partial": holding.is_partial,
        "total_layers": holding.total_layers,
        "layers": [str(span) for span in holding.layers],
        "ends": holding.ends,
        "here_bytes": holding.here_bytes,
        "total_bytes": holding.total_bytes,
        "dtype": holding.dtype or None,
    }
