"""What this node says of itself in the log: its name, where it was let in by another, and what it
serves: one event when that begins, one when it ends.

What it serves is for the record only: routes are made from `mesh.discovery.notices`. A restart that
serves the same, a shard that is loading or was unloaded for a while, and every renewal write
nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from mesh.clock import set_within
from mesh.discovery.advertisement import Advertisement, encode
from mesh.discovery.directory import Offering
from mesh.errors import BadEvent, Busy, EventLogError
from mesh.events.log import LogChange
from mesh.events.state import Fact
from mesh.events.types import MODEL_PUBLISHED, NODE_NAMED, SHARD_ADVERTISED
from mesh.hearth.hearth import Hearth
from mesh.processes.tasks import end, spawn
from mesh.types import ShardId

logger = logging.getLogger(__name__)

_VOLATILE = ("endpoint", "health")
"""Fields of an advertisement that change from start to start; the record would be wrong at once."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What this node offers now, and the shards that it is configured to serve, loaded or not; None
    while it does not know yet which."""

    offers: Offering = field(default_factory=Offering)
    wanted: Collection[ShardId] | None = None


class Publisher:
    """`start`, then `look` whenever something may have changed, then `stop`."""

    def __init__(
        self,
        hearth: Hearth,
        serving: Callable[[], Serving],
        name: str,
        *,
        settle_s: float = 1.0,
        retry_s: float = 60.0,
    ) -> None:
        self._hearth = hearth
        self._serving = serving
        self._name: str | None = name
        """What others may still have to be told that this node is called."""
        self._begins_again = True
        self._settle_s = settle_s
        self._retry_s = retry_s
        self._due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to keep the record."""
        self._hearth.log.on_change.append(self._log_changed)
        self._task = spawn(self._keep(), "publish shards")

    async def stop(self) -> None:
        """Stop; the record stays as it is."""
        self._hearth.log.on_change.remove(self._log_changed)
        await end([self._task])

    def look(self) -> None:
        """What is served, or who may serve, may have changed."""
        self._due.set()

    def _log_changed(self, change: LogChange) -> None:
        if self._begins_again and self._hearth.key.node_id in change.state.frozen:
            self.look()

    async def _keep(self) -> None:
        await self._hearth.heard()
        while True:
            try:
                await self._publish_name()
                await self._begin_again()
                await self._publish()
                await self._due.wait()
            except (EventLogError, BadEvent, Busy) as error:
                # A node that has just joined is not in its own copy of the log yet.
                logger.info("not recorded yet: %s", error)
                await set_within(self._due, self._retry_s)
            self._due.clear()
            await asyncio.sleep(self._settle_s)

    async def _publish_name(self) -> None:
        """Once in a run: of two machines with one key each would take the other's name back."""
        own = self._hearth.key.node_id
        known = self._hearth.roster.members.get(own)
        if self._name is None or known is None:
            return
        if known.name != self._name:
            await self._hearth.publish(NODE_NAMED, {"node_id": own, "name": self._name})
        self._name = None

    async def _begin_again(self) -> None:
        """Say what counts for nobody, as this node has signed two histories: whatever it signs next
        is said with it. Once in a run, as two machines with one key would do so for ever."""
        own = self._hearth.key.node_id
        known = self._hearth.roster.members.get(own)
        if self._begins_again and known is not None and own in self._hearth.log.state.frozen:
            self._begins_again = False
            await self._hearth.publish(NODE_NAMED, {"node_id": own, "name": known.name})

    async def _publish(self) -> None:
        offers, wanted = (serving := self._serving()).offers, serving.wanted
        if wanted is None or not self._hearth.may_serve(self._hearth.key.node_id):
            return
        for shard in offers.shards:
            await self._publish_model(shard)
            if shard.descriptor.shard_id in wanted:
                await self._record(shard)
        for name, fact in self._hearth.own_facts(SHARD_ADVERTISED).items():
            if ShardId(name) not in wanted and not fact.payload.get("withdrawn"):
                payload = {**fact.payload, "withdrawn": True}
                await self._hearth.publish(SHARD_ADVERTISED, payload)

    async def _publish_model(self, shard: Advertisement) -> None:
        descriptor = shard.descriptor
        own = self._hearth.own_facts(MODEL_PUBLISHED)
        said = (
            own.get(descriptor.model_id),
            self._hearth.log.state.models().get(descriptor.model_id),
        )
        if not any(_same(fact, shard) for fact in said):
            payload = {
                "model_id": str(descriptor.model_id),
                "weights_sha256": descriptor.weights_sha256,
                "total_layers": descriptor.total_layers,
            }
            await self._hearth.publish(MODEL_PUBLISHED, payload)

    async def _record(self, shard: Advertisement) -> None:
        known = self._hearth.own_facts(SHARD_ADVERTISED).get(shard.descriptor.shard_id)
        if known is None or known.payload.get("withdrawn") or not _same(known, shard):
            fields: dict[str, Any] = encode(shard)
            kept = {key: value for key, value in fields.items() if key not in _VOLATILE}
            await self._hearth.publish(SHARD_ADVERTISED, {**kept, "withdrawn": False})


def _same(fact: Fact | None, shard: Advertisement) -> bool:
    """Whether a recorded fact is about the weights of this shard."""
    return (
        fact is not None and fact.payload.get("weights_sha256") == shard.descriptor.weights_sha256
    )
