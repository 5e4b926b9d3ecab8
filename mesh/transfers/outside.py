"""The hub, asked by one node of the hearth at a time for the same repository.

Whoever wants to ask says so first (a claim, told with what it holds), waits until that has gone
round, and steps back when another of a smaller id did the same meanwhile. Everybody else waits, and
takes from whoever asked. Repositories whose tensors' hashes are known to somebody need no such
reading: what no neighbour has of them is asked for by ranges.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from mesh.errors import MeshError, TransferFailed
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
from mesh.transfers.documents import small_names, weights_files
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
CLAIM_PATIENCE = 3
"""So many times the patience of a fetch a claim is respected of which nothing comes."""
_LOOK_S = 1.0
_AGAIN_S, _LONGEST_AGAIN_S = 10.0, 300.0
"""The waits for a hub that could not be reached, the second and later ones twice as long."""


@dataclass(slots=True)
class _Running:
    order: PullRepository
    meter: Meter
    state: str = "looking"
    note: str = ""


class HubClaims:
    """Which repositories this node asks the hub for, beside those that others do."""

    def __init__(self, own: NodeId, shelf: Shelf, fetches: Fetches, *, patience_s: float) -> None:
        """Another's claim counts while its bytes grow, and `patience_s` longer."""
        self._own = own
        self._shelf = shelf
        self._fetches = fetches
        self._patience_s = patience_s
        self._seen: dict[tuple[NodeId, str], tuple[int, float]] = {}
        """By node and origin: the bytes, and since when there are no more."""
        self._made: Counter[str] = Counter()
        """How often this node claims each origin now."""

    def other(self, origin: str) -> PeerHolding | None:
        """Who else asks for it."""
        now = asyncio.get_running_loop().time()
        claims = {
            (p.node, p.held.origin): p for p in self._fetches.peers if not p.held.weights_sha256
        }
        for key, peer in claims.items():
            if key not in self._seen or peer.arrived_bytes > self._seen[key][0]:
                self._seen[key] = (peer.arrived_bytes, now)
        self._seen = {key: seen for key, seen in self._seen.items() if key in claims}
        found = [
            peer
            for key, peer in claims.items()
            if peer.held.origin == origin and now - self._seen[key][1] < self._patience_s
        ]
        return min(found, key=lambda peer: peer.node, default=None)

    @asynccontextmanager
    async def made(self, origin: str, model_id: ModelId, directory: Path) -> AsyncIterator[bool]:
        """Claim it for as long as this is open; False when another was first."""
        if self.other(origin) is not None:
            yield False
            return
        self._shelf.claim(origin, model_id, directory)
        self._made[origin] += 1
        try:
            if self._fetches.neighbours:
                await asyncio.sleep(SETTLE_S)
            other = self.other(origin)
            yield other is None or self._own < other.node
        finally:
            self._made[origin] -= 1
            if not self._made[origin]:
                del self._made[origin]
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
        self._turns: dict[str, asyncio.Lock] = {}
        """By origin."""

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
            known = await self._hash(running, hub, model)
            running.state, running.note = "fetching", ""
            was_here = bool(self._shelf.of(known))
            directory = await self._fetches.ensure(
                Ensure(order.id, model.model_id, known, order.layers, order.ends, order.hub)
            )
            if not was_here:  # then neighbours' word is all there is
                await asyncio.to_thread(_require_the_hubs, model, directory)
            return directory
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

        Ends when the hub refuses, or when it is not known where the checkpoint came from. Where it
        cannot be reached it is tried again, after longer and longer waits.
        """
        record = await asyncio.to_thread(read_record, fetch.directory)
        place = parse_origin(record.origin)
        if order.hub is None or order.hub.offline or place is None:
            return
        hub, model_id, again_s = Hub(order.hub), ModelId(record.model_id), _AGAIN_S
        try:
            while True:
                await self._fetches.news(_LOOK_S)
                if not fetch.lacking:
                    continue
                claim = self._claims.made(record.origin, model_id, fetch.directory)
                try:
                    async with claim as is_first:
                        if is_first:
                            repository = await hub.repository(*place)
                            await self._give(fetch, hub, repository)
                            again_s = _AGAIN_S
                except MeshError as error:
                    logger.warning("the hub gives nothing of %s: %s", model_id, error)
                    fetch.note("the hub", f"{error.message} {error.fix}")
                    if not isinstance(error, TransferFailed):
                        return
                    await asyncio.sleep(again_s)
                    again_s = min(_LONGEST_AGAIN_S, 2 * again_s)
        finally:
            await hub.close()

    async def _give(self, fetch: Fetch, hub: Hub, repository: Repository) -> None:
        """Be a source until no more is lacking; raises what the hub raised."""
        tensors = await asyncio.to_thread(read_tensors, fetch.directory)
        names = {entry.file.name for entry in tensors.values()}
        files = {name: file.rfilename for name in names if (file := repository.named(name))}
        places = {
            name: (files.get(entry.file.name, entry.file.name), entry.offset)
            for name, entry in tensors.items()
        }
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

    def _known(self, origin: str, *, hub_alone: bool) -> str | None:
        """The hash of its weights, where this node has read it, or more than half of those say so
        who say one; None where it has to be read."""
        here = [k for k in self._shelf.all() if k.origin == origin]
        read = next((kept for kept in here if kept.is_read), None)
        if read is not None:
            return read.manifest.weights_sha256
        if hub_alone:
            return None
        peers = [p for p in self._fetches.peers if p.held.origin == origin]
        said = {p.node: p.held.weights_sha256 for p in peers}
        votes = Counter([*filter(None, said.values()), *(k.manifest.weights_sha256 for k in here)])
        sha256, count = votes.most_common(1)[0] if votes else ("", 0)
        return sha256 if 2 * count > votes.total() else None

    async def _hash(self, running: _Running, hub: Hub, model: HubModel) -> str:
        """The hash of its weights, once it is known; one pull here at a time asks for it."""
        turn = self._turns.setdefault(model.origin, asyncio.Lock())
        while True:
            if turn.locked():
                running.state, running.note = "waiting", "another pull here reads it from the hub"
            async with turn:
                known = self._known(model.origin, hub_alone=running.order.hub_alone)
                known = known or await self._alone(running, hub, model)
            if known is not None:
                return known
            await self._fetches.news(_LOOK_S)

    async def _alone(self, running: _Running, hub: Hub, model: HubModel) -> str | None:
        """The hash of its weights, after reading all of it; None where another node does that."""
        pull = HubPull(hub, model, self._models_dir, self._pace, running.meter)
        claim = self._claims.made(model.origin, model.model_id, pull.staging)
        async with claim as is_first:
            order = running.order
            if not is_first and not order.hub_alone:
                other = self._claims.other(model.origin)
                name = other.node_name if other is not None else "another node"
                running.state, running.note = "waiting", f"{name} fetches it from the hub"
                return None
            running.state, running.note = "hub", ""
            wanted = WantedLayers(order.layers, order.ends)
            return await pull.run(wanted, drop=order.drop, then=self._offered)

    def _offered(self, directory: Path) -> str:
        """Have what lies there on the shelf; its hash. Blocks."""
        kept = kept_in(directory)
        self._shelf.put(kept)
        return kept.manifest.weights_sha256


async def _found(hub: Hub, named: str, revision: str = "main") -> HubModel:
    """The model of ``ORG/NAME`` or ``ORG/NAME/FILE.gguf``. Raises as `gguf_files`, and what the hub
    raises."""
    name, file = split_name(named)
    repository = await hub.repository(name, revision)
    model_id = ModelId(f"{repository.id}/{file}" if file else repository.id)
    return HubModel(repository, model_id, gguf_files(repository, file))


def _require_the_hubs(model: HubModel, directory: Path) -> None:
    """Raise TransferFailed where files are not those of the repository, as far as they are whole.
    Blocks."""
    manifest, files = kept_in(directory).manifest, model.repository.files
    wrong = [
        name
        for name in small_names(manifest) & files.keys()
        if (file := directory / name).exists() and not files[name].is_content(file.read_bytes())
    ]
    partly = {entry.file for entry in manifest.tensors.values() if not entry.present}
    for file in weights_files(manifest):
        said = model.repository.named(file.name)
        lfs = said.lfs if said is not None else None
        if lfs is None or (file not in partly and _sha256(file) != lfs.sha256):
            wrong.append(file.name)
    if wrong:
        raise TransferFailed(
            f"{wrong[0]}, as neighbours have it, is not that of {model.repository.id} on the hub.",
            fix=f"Remove it (`hearthnet rm {model.model_id}`), then read it from the hub itself:"
            f" `hearthnet pull {model.model_id} --from hub`.",
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _row(running: _Running, now: float) -> Transfer:
    order, meter = running.order, running.meter
    return Transfer(
        order.id, order.repository, "", running.state, meter.done, meter.total, meter.rate(now),
        meter.eta_s(now), tuple(meter.sources(now)), running.note,
    )  # fmt: skip
