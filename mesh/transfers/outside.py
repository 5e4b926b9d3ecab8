"""The hub, asked by one node of the hearth at a time for the same repository.

Whoever wants to ask says so first (a claim, told with what it holds), waits until that has gone
round, and steps back when another of a smaller id did the same meanwhile. Everybody else waits, and
takes from whoever asked. Repositories whose tensors' hashes are known to somebody need no such
reading: what no neighbour has of them is asked for by ranges.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from mesh.errors import MeshError
from mesh.models.hub_cache import split_name
from mesh.models.manifest import read_tensors
from mesh.models.partial import read_record
from mesh.transfers.commands import (
    Ensure,
    FetchHeaders,
    PeerHolding,
    PullRepository,
    Transfer,
)
from mesh.transfers.fetches import Fetches, kept_in
from mesh.transfers.fetching import Fetch, WantedLayers
from mesh.transfers.hub import Hub, HubSource, Repository, parse_origin
from mesh.transfers.hub_files import HubModel, fetch_headers
from mesh.transfers.hub_gguf import fetch_gguf_headers, gguf_files
from mesh.transfers.hub_pull import HubPull
from mesh.transfers.meter import Meter
from mesh.transfers.pacing import Pace
from mesh.transfers.shelf import Shelf
from mesh.types import ModelId, NodeId

logger = logging.getLogger(__name__)

SETTLE_S = 2.5
"""A claim has reached every neighbour after so long."""
_LOOK_S = 1.0


@dataclass(slots=True)
class _Running:
    order: PullRepository
    meter: Meter
    state: str = "looking"
    note: str = ""


class HubClaims:
    """Which repositories this node asks the hub for, beside those that others do."""

    def __init__(self, own: NodeId, shelf: Shelf, fetches: Fetches) -> None:
        self._own = own
        self._shelf = shelf
        self._fetches = fetches

    def other(self, origin: str) -> PeerHolding | None:
        """Who else asks for it."""
        found = [p for p in self._fetches.peers if p.origin == origin and not p.weights_sha256]
        return min(found, key=lambda peer: peer.node) if found else None

    @asynccontextmanager
    async def made(self, origin: str, model_id: ModelId, directory: Path) -> AsyncIterator[bool]:
        """Claim it for as long as this is open; False when another was first."""
        if self.other(origin) is not None:
            yield False
            return
        self._shelf.claim(origin, model_id, directory)
        try:
            if self._fetches.neighbours:
                await asyncio.sleep(SETTLE_S)
            other = self.other(origin)
            yield other is None or self._own < other.node
        finally:
            self._shelf.unclaim(origin)


class Outside:
    """`pull` what is wanted of a repository. Use on one event loop."""

    def __init__(
        self, models_dir: Path, shelf: Shelf, fetches: Fetches, claims: HubClaims, pace: Pace
    ) -> None:
        self._models_dir = models_dir
        self._shelf = shelf
        self._fetches = fetches
        self._claims = claims
        self._pace = pace
        self._running: dict[str, _Running] = {}

    def rows(self) -> list[Transfer]:
        """What is under way."""
        now = asyncio.get_running_loop().time()
        return [_row(running, now) for running in self._running.values()]

    async def pull(self, order: PullRepository) -> Path:
        """The directory in which what is wanted is, once it is. Raises MeshError."""
        running = self._running[order.id] = _Running(order, Meter())
        hub = Hub(order.hub)
        try:
            model = await _found(hub, order.repository, order.revision)
            while True:
                known = await self._known(model.origin)
                if known is not None:
                    running.state = "fetching"
                    return await self._fetches.ensure(
                        Ensure(order.id, model.model_id, known, order.layers, order.ends, order.hub)
                    )
                if not await self._alone(running, hub, model):
                    await self._fetches.news(_LOOK_S)
        finally:
            del self._running[order.id]
            await hub.close()

    async def headers(self, order: FetchHeaders, cache_dir: Path) -> Path:
        """What is a checkpoint without its weights, see `fetch_headers`. Raises MeshError."""
        hub = Hub(order.hub)
        try:
            model = await _found(hub, order.repository)
            if model.gguf:
                return await fetch_gguf_headers(hub, model.repository, model.gguf, cache_dir)
            return await fetch_headers(hub, model.repository, cache_dir)
        finally:
            await hub.close()

    async def feed(self, order: Ensure, fetch: Fetch) -> None:
        """Give a fetch whatever no neighbour has, while no other node does so for itself.

        Ends when the hub refuses, or when it is not known where the checkpoint came from.
        """
        record = await asyncio.to_thread(read_record, fetch.directory)
        place = parse_origin(record.origin)
        if order.hub is None or order.hub.offline or place is None:
            return
        hub = Hub(order.hub)
        try:
            while True:
                await self._fetches.news(_LOOK_S)
                if fetch.lacking:
                    model_id = ModelId(record.model_id)
                    claim = self._claims.made(record.origin, model_id, fetch.directory)
                    async with claim as is_first:
                        if is_first:
                            repository = await hub.repository(*place)
                            await self._give(fetch, hub, repository)
        except MeshError as error:
            logger.warning("the hub gives nothing of %s: %s", record.model_id, error)
        finally:
            await hub.close()

    async def _give(self, fetch: Fetch, hub: Hub, repository: Repository) -> None:
        """Be a source until no more is lacking; raises what the hub raised."""
        tensors = await asyncio.to_thread(read_tensors, fetch.directory)
        places = {name: (entry.file.name, entry.offset) for name, entry in tensors.items()}
        failed: list[MeshError] = []
        source = HubSource(hub, repository, places)
        fetch.join("hub", source, frozenset(places), failed.append, is_spared=True)
        try:
            while fetch.lacking and not failed:  # noqa: ASYNC110 - a second more costs nothing
                await asyncio.sleep(_LOOK_S)
        finally:
            fetch.leave("hub")
        if failed:
            raise failed[0]

    async def _known(self, origin: str) -> str | None:
        """The hash of its weights, if somebody in the hearth has it, or this node."""
        here = [k for k in self._shelf.all() if k.origin == origin]
        if here:
            return here[0].manifest.weights_sha256
        for peer in self._fetches.peers:
            if peer.origin == origin and peer.weights_sha256:
                return peer.weights_sha256
        return None

    async def _alone(self, running: _Running, hub: Hub, model: HubModel) -> bool:
        """Read all of it, unless another node does; False then."""
        pull = HubPull(hub, model, self._models_dir, self._pace, running.meter)
        claim = self._claims.made(model.origin, model.model_id, pull.staging)
        async with claim as is_first:
            if not is_first:
                other = self._claims.other(model.origin)
                name = other.node_name if other is not None else "another node"
                running.state, running.note = "waiting", f"{name} fetches it from the hub"
                return False
            running.state, running.note = "hub", ""
            order = running.order
            wanted = WantedLayers(order.layers, order.ends)
            directory = await pull.run(wanted, drop=order.drop)
            self._shelf.put(await asyncio.to_thread(kept_in, directory))
            return True


async def _found(hub: Hub, named: str, revision: str = "main") -> HubModel:
    """The model of ``ORG/NAME`` or ``ORG/NAME/FILE.gguf``. Raises as `gguf_files`, and what the hub
    raises."""
    name, file = split_name(named)
    repository = await hub.repository(name, revision)
    model_id = ModelId(f"{repository.id}/{file}" if file else repository.id)
    return HubModel(repository, model_id, gguf_files(repository, file))


def _row(running: _Running, now: float) -> Transfer:
    order, meter = running.order, running.meter
    return Transfer(
        order.id, order.repository, "", running.state, meter.done, meter.total, meter.rate(now),
        meter.eta_s(now), tuple(meter.sources(now)), running.note,
    )  # fmt: skip
