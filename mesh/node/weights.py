"""A node's weights: its fetcher, what others are told of it, and what others tell.

Part of the composition root, like `mesh.node.node`, which owns it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mesh.config import Config
from mesh.discovery.directory import ShardStore
from mesh.discovery.weights import Arriving, HeldWeights
from mesh.errors import MeshError, WeightsDamaged
from mesh.health.eventstream import EventFeed
from mesh.identity.keys import NodeKey
from mesh.identity.tls import TlsMaterial
from mesh.node import wiring
from mesh.node.holdings import Holdings
from mesh.paths import StatePaths, cache_dir, models_dir
from mesh.processes.tasks import end, spawn
from mesh.transfers.commands import PeerHolding, Transfer
from mesh.transfers.names import meant
from mesh.transfers.pulls import PullContext, Pulls
from mesh.transfers.shelf import Holding
from mesh.transfers.supervisor import FetcherSupervisor
from mesh.types import Endpoint, ModelId, ShardId, host_port

logger = logging.getLogger(__name__)

TELL_BYTES_S = 2.0
"""Others are told so often, at most, how far a fetch is; of layers that are there, at once."""
REREAD_FIRST_S, REREAD_EVERY_S = 600.0, 86400.0
"""All that is here is read again so long after a start, and after it was the last time."""


class Weights:
    """`start`, then `look` whenever others may have said something else, then `stop`; `fetcher`
    does the rest, and `pulls` are the verbs."""

    def __init__(
        self,
        config: Config,
        key: NodeKey,
        held: Holdings,
        store: ShardStore,
        events: EventFeed,
        on_change: Callable[[], None],
        address: str,
    ) -> None:
        """`on_change` says that what others are told has changed; they come to `address`."""
        self._config = config
        self._key = key
        self._store = store
        self._held = held
        self._models = held.models
        self._damaged: frozenset[ShardId] = frozenset()
        """Shards whose weights had changed on the disk when they were loaded again."""
        self._rereading: set[asyncio.Task[None]] = set()
        self._address = address
        self._told: Sequence[HeldWeights] = ()
        self._told_at = -math.inf
        self._peers: Sequence[PeerHolding] = ()
        self._on_change = on_change
        self._events = events
        self.fetcher = FetcherSupervisor(
            None, self._changed, self._notify, is_used=lambda: held.is_used
        )
        self.fetcher.repairs.on_repaired = held.distrust
        around = PullContext(
            lambda: self._peers, self._in_use, self._notify, cache_dir(),
            config.models_dir or models_dir(), StatePaths(config.state_dir).begun_pulls,
        )  # fmt: skip
        self.pulls = Pulls(self.fetcher, around)

    async def start(self, tls: TlsMaterial) -> None:
        """Begin to serve, where this node belongs to a hearth, and go on with what was pulled;
        other fetching begins when asked for."""
        models = list(self._models.values())
        start = wiring.start_fetcher(self._config, self._key, models, self._address, tls)
        self.fetcher.first_command = start
        if self._config.is_distributed:
            self.fetcher.start()
        await self.pulls.go_on()
        spawn(self._reread_all(), "read weights again", among=self._rereading)

    async def stop(self) -> None:
        """End what is fetched; what has come stays on the disk."""
        await end(self._rereading)
        await self.pulls.close()
        await self.fetcher.stop()

    def held(self) -> tuple[HeldWeights, ...]:
        """What others are told: nothing while nobody would be answered."""
        port = self.fetcher.port
        if port is None or not self.fetcher.is_answering:
            return ()
        endpoint = Endpoint(f"wss://{host_port(self._address, port)}")
        moving = self.fetcher.transfers
        held = {  # once: what it is called here means nothing to whoever knows its hash
            each.weights_sha256 or each.origin: each
            for each in sorted(self.fetcher.holdings, key=lambda each: each.here_bytes)
        }
        return tuple(_said(each, endpoint, _arriving(each, moving)) for each in held.values())

    def look(self) -> None:
        """Tell the fetcher what other nodes have."""
        others = [
            view
            for view in self._store.nodes()
            if view.online and view.info.node_id != self._key.node_id
        ]
        heard = self._peers = [
            PeerHolding(view.info.node_id, view.info.name, held)
            for view in others
            for held in view.offers.weights
        ]
        self.fetcher.hear(heard, len(others))

    def shards_changed(self) -> None:
        """Have a checkpoint read again of which a shard has found that it has changed on the disk:
        what has is fetched again, and the shard loads with it."""
        host = self._held.host
        failed = {name for name, why in host.failed.items() if isinstance(why, WeightsDamaged)}
        for name in failed - self._damaged:
            model = self._models.get(host.wanted[name].model_id)
            if model is not None:
                work = self._reread(model.weights_sha256)
                spawn(work, f"read {name} again", among=self._rereading)
        self._damaged = frozenset(failed)

    def known(self, model: str) -> tuple[ModelId, str] | None:
        """The checkpoint that is meant by a name, of those of which this node or another has
        something. Raises BadRequest when there are several."""
        return meant(model, self._peers, self.fetcher.holdings)

    async def _reread_all(self) -> None:
        await asyncio.sleep(REREAD_FIRST_S)
        while True:
            await self._reread("")
            await asyncio.sleep(REREAD_EVERY_S)

    async def _reread(self, weights_sha256: str) -> None:
        try:
            await self.fetcher.reread(weights_sha256)
        except MeshError as error:
            logger.warning("weights are not read again: %s", error)

    def _in_use(self) -> set[Path]:
        return {Path(model.directory) for model in self._models.values()}

    def _notify(self, kind: str, fields: dict[str, Any]) -> None:
        self._events.emit(kind, **fields)

    def _changed(self) -> None:
        """Tell others, of mere bytes now and then."""
        held, now_s = self.held(), time.monotonic()
        is_news = _lasting(held) != _lasting(self._told)
        if is_news or (held != self._told and now_s - self._told_at >= TELL_BYTES_S):
            self._told, self._told_at = held, now_s
            self._on_change()


def _said(holding: Holding, endpoint: Endpoint, arriving: Arriving | None) -> HeldWeights:
    return HeldWeights(
        holding.model_id, holding.weights_sha256, holding.total_layers, holding.layers,
        holding.ends, endpoint, holding.origin, holding.files_sha256, arriving,
    )  # fmt: skip


def _arriving(holding: Holding, moving: Sequence[Transfer]) -> Arriving | None:
    """How far all fetches of it are together."""
    of_it = [each for each in moving if each.total_bytes and _is_of(each, holding)]
    if not of_it:
        return None
    return Arriving(
        sum(each.done_bytes for each in of_it),
        sum(each.total_bytes for each in of_it),
        round(sum(each.bytes_per_s for each in of_it)),
    )


def _is_of(transfer: Transfer, holding: Holding) -> bool:
    """A repository that is read for its hash has one model, or several that are named below it."""
    if transfer.weights_sha256 != holding.weights_sha256:
        return False
    is_below = not transfer.weights_sha256 and holding.model_id.startswith(f"{transfer.model_id}/")
    return transfer.model_id == holding.model_id or is_below


def _lasting(held: Sequence[HeldWeights]) -> list[tuple[HeldWeights, bool]]:
    """Without bytes that come, but with whether any do."""
    return [(each.without_bytes(), each.arriving is None) for each in held]
