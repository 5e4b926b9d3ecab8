"""The local read model of the mesh: which nodes there are and which shards they advertise.

Fed by whoever holds the links. Time is the injected monotonic clock: an entry lives for `expiry_s`
after it arrived, whatever the sender's wall clock says. Knows nothing of sockets or routing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from mesh.capacity import Capacity
from mesh.clock import Clock, set_within
from mesh.codec import MAX_TEXT
from mesh.discovery.advertisement import (
    MAX_SHARDS_PER_NODE,
    Advertisement,
)
from mesh.discovery.neighbours import MAX_NEIGHBOURS, LinkedPeer
from mesh.discovery.progress import NodeProgress
from mesh.discovery.weights import MAX_WEIGHTS_PER_NODE, HeldWeights
from mesh.errors import BadAdvertisement
from mesh.types import ModelId, NodeId

MAX_NODES = 256


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node as people see it. `address` is ``HOST:PORT`` of its control port."""

    node_id: NodeId
    name: str
    address: str
    software: str


@dataclass(frozen=True, slots=True)
class Offering:
    """What a node offers: the shards that it serves, what of weights is on its disk, what its
    devices hold, how far it is with what it is to hold, and whom it is linked to; None where it
    does not say."""

    shards: tuple[Advertisement, ...] = ()
    weights: Annotated[tuple[HeldWeights, ...], Meta(max_length=MAX_WEIGHTS_PER_NODE)] = ()
    capacity: Capacity | None = None
    progress: NodeProgress | None = None
    neighbours: Annotated[tuple[LinkedPeer, ...], Meta(max_length=MAX_NEIGHBOURS)] = ()


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node, whether its control link is up, how old its last word is, and what that was."""

    info: NodeInfo
    online: bool
    age_s: float
    offers: Offering


@dataclass(frozen=True, slots=True)
class ModelView:
    """One checkpoint that routable shards advertise."""

    model_id: ModelId
    weights_sha256: str
    total_layers: int
    shards: tuple[Advertisement, ...]


@dataclass(slots=True)
class _Entry:
    info: NodeInfo
    offers: Offering
    arrived: float
    ttl_s: float
    online: bool = True


class ShardStore:
    """The directory. One owner feeds it (`update`, `offline`, `remove`, `sweep`), all may read.

    A shard is routable while its node is online, it calls itself online and its advertisement has
    not expired; readers never see any other, also between two sweeps. All weights of a model are
    kept apart (see `conflicts`).
    """

    def __init__(self, clock: Clock, *, expiry_s: float) -> None:
        self._clock = clock
        self._expiry_s = expiry_s
        self._nodes: dict[NodeId, _Entry] = {}
        self._subscribers: set[Subscription] = set()

    def update(self, info: NodeInfo, offers: Offering, ttl_s: float = math.inf) -> None:
        """All that `info.node_id` offers now; replaces what it said and puts it online.

        It holds for `ttl_s` at most, and never longer than this store's `expiry_s`.
        Order of arrival decides what is newest: no wall clock is compared. Raises BadAdvertisement
        when the node is a new one beyond MAX_NODES, offers more than MAX_SHARDS_PER_NODE, speaks
        for another node or has an unusable name.
        """
        self._check(info, offers.shards)
        served = {s.descriptor.shard_id: s for s in offers.shards}
        offers = replace(offers, shards=tuple(served.values()))
        entry = _Entry(info, offers, self._now(), min(ttl_s, self._expiry_s))
        before = self._nodes.get(info.node_id)
        was_seen = before is not None and before.online and not self._expired(before)
        self._nodes[info.node_id] = entry
        if before is None or not was_seen or _differs(before, entry):
            self._changed()

    def offline(self, node_id: NodeId) -> None:
        """The link to a node was lost: none of its shards is routable until the next `update`."""
        entry = self._nodes.get(node_id)
        if entry is not None and entry.online:
            entry.online = False
            self._changed()

    def remove(self, node_id: NodeId) -> None:
        """The node said goodbye."""
        if self._nodes.pop(node_id, None) is not None:
            self._changed()

    def sweep(self) -> list[NodeId]:
        """Forget the nodes whose last word has expired; returns their ids."""
        gone = [node_id for node_id, entry in self._nodes.items() if self._expired(entry)]
        for node_id in gone:
            del self._nodes[node_id]
        if gone:
            self._changed()
        return gone

    def shards(self, model_id: ModelId, weights_sha256: str | None = None) -> list[Advertisement]:
        """The routable shards of a model, of one checkpoint when given, by first layer and host."""
        found = [
            shard
            for entry in self._nodes.values()
            for shard in self._routable(entry)
            if shard.descriptor.model_id == model_id
            and weights_sha256 in (None, shard.descriptor.weights_sha256)
        ]
        return sorted(found, key=lambda s: (s.descriptor.layers, s.descriptor.host))

    def models(self) -> list[ModelView]:
        """Every (model, weights) that has a routable shard, by model id."""
        indexed: dict[tuple[ModelId, str], list[Advertisement]] = {}
        for entry in self._nodes.values():
            for shard in self._routable(entry):
                key = (shard.descriptor.model_id, shard.descriptor.weights_sha256)
                indexed.setdefault(key, []).append(shard)
        return [
            ModelView(model, weights, max(s.descriptor.total_layers for s in shards), tuple(shards))
            for (model, weights), shards in sorted(indexed.items())
        ]

    def conflicts(self, model_id: ModelId) -> dict[str, list[Advertisement]]:
        """The routable shards by weights when a model has more than one checkpoint; else empty."""
        by_weights: dict[str, list[Advertisement]] = {}
        for shard in self.shards(model_id):
            by_weights.setdefault(shard.descriptor.weights_sha256, []).append(shard)
        return by_weights if len(by_weights) > 1 else {}

    def nodes(self) -> list[NodeView]:
        """Every node that has not expired, online or not, by id."""
        known = map(self.node, sorted(self._nodes))
        return [view for view in known if view is not None]

    def node(self, node_id: NodeId) -> NodeView | None:
        """One of them."""
        entry = self._nodes.get(node_id)
        if entry is None or self._expired(entry):
            return None
        return NodeView(entry.info, entry.online, self._now() - entry.arrived, entry.offers)

    def subscribe(self) -> Subscription:
        """Be told of changes from now on; `Subscription.close` ends it."""
        subscription = Subscription(self._subscribers.discard)
        self._subscribers.add(subscription)
        return subscription

    def _check(self, info: NodeInfo, shards: Sequence[Advertisement]) -> None:
        if info.node_id not in self._nodes and len(self._nodes) >= MAX_NODES:
            self.sweep()
            if len(self._nodes) >= MAX_NODES:
                raise _refusal("node", f"there are already {MAX_NODES} nodes")
        if len(shards) > MAX_SHARDS_PER_NODE:
            raise _refusal("shards", f"{len(shards)} shards, more than {MAX_SHARDS_PER_NODE}")
        if any(shard.descriptor.host != info.node_id for shard in shards):
            raise _refusal("host", "it speaks for another node")
        for field, text in (("name", info.name), ("software", info.software)):
            if not 0 < len(text) <= MAX_TEXT or not text.isprintable():
                raise _refusal(field, f"it must be 1 to {MAX_TEXT} printable characters")

    def _routable(self, entry: _Entry) -> list[Advertisement]:
        if not entry.online or self._expired(entry):
            return []
        return [shard for shard in entry.offers.shards if shard.health.online]

    def _expired(self, entry: _Entry) -> bool:
        return self._now() - entry.arrived >= entry.ttl_s

    def _now(self) -> float:
        return self._clock.monotonic()

    def _changed(self) -> None:
        for subscription in tuple(self._subscribers):
            subscription.notify()


class Subscription:
    """Tells one reader that the store changed; any number of changes between two waits are one."""

    def __init__(self, on_close: Callable[[Subscription], None]) -> None:
        self._on_close = on_close
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Something changed."""
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Whether something changed since the last wait, waiting up to `timeout_s` for it."""
        if is_news := await set_within(self._event, timeout_s):
            self._event.clear()
        return is_news

    def close(self) -> None:
        """Stop being told."""
        self._on_close(self)


def _differs(before: _Entry, after: _Entry) -> bool:
    """Whether a reader would see more than a newer time of arrival, other free memory, and how
    far a fetch is."""
    return _lasting(before) != _lasting(after)


def _lasting(entry: _Entry) -> tuple[object, ...]:
    weights = [held.without_bytes() for held in entry.offers.weights]
    return entry.info, entry.offers.shards, weights, entry.offers.capacity is None


def _refusal(field: str, why: str) -> BadAdvertisement:
    return BadAdvertisement(
        f"The advertisement was refused: {why}.",
        fix="Check what runs on the node that sent it.",
        param=field,
    )
