"""The daemon's side of the shard process: starts it, tells it what to load, hears how it is doing.

One process serves all shards of one device (`mesh.shard.host`). A crash of it is those shards'
failure, not the node's: it is started again and loads the same shards. Imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from mesh.attempts import Attempts
from mesh.channel import ChannelMessage
from mesh.charge import Ending, SilenceLimits, ended
from mesh.errors import Busy, InternalError, MeshError, PortInUse, WeightsCorrupted, from_dict
from mesh.supervisor import Supervisor
from mesh.types import (
    Endpoint,
    LayerRange,
    ModelId,
    NodeId,
    ShardDescriptor,
    ShardHealth,
    ShardId,
    ShardMemory,
    shard_id,
)

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 5.0
_NOTABLE_MB = 64
"""A footprint that changed by more is advertised at once."""


@dataclass(frozen=True, slots=True)
class HostSpec:
    """The ``start`` command of the process and the ``load`` commands that follow it."""

    start: dict[str, Any] = field(repr=False)
    shards: tuple[dict[str, Any], ...]


@dataclass(slots=True)
class HostedShard:
    """One shard of this node: what is advertised of it and what loading it took."""

    descriptor: ShardDescriptor
    health: ShardHealth
    facts: dict[str, Any]


class ShardHost:
    """Runs the shard process and keeps the list of what it serves.

    `shards` are advertised; `private` ones were loaded with `ensure`, for this node alone.
    `sessions` says who has which session open here, as `ShardService.sessions`, and `accounts` who
    holds what, as `ShardService.reports`.
    """

    def __init__(
        self,
        spec: HostSpec,
        on_change: Callable[[], None],
        limits: SilenceLimits | None = None,
        module: str = "mesh.shard.host",
    ) -> None:
        """`module` is what the process runs, something that calls `mesh.shard.host.main`."""
        self.spec = spec
        self.process = Supervisor("the shards' process", module, self, limits)
        self.shards: dict[ShardId, HostedShard] = {}
        self.private: dict[ShardId, HostedShard] = {}
        self.failed: dict[ShardId, MeshError] = {}
        self.reasons: list[str] = []
        self.sessions: list[dict[str, Any]] = []
        self.accounts: list[dict[str, Any]] = []
        self.port: int | None = None
        self._on_change = on_change
        self._settled = asyncio.Event()
        self._revoked: list[str] = []
        self.memory: dict[str, Any] | None = None
        """What is free on the device, as `Headroom`, and ``ram_mb`` of main memory."""
        self._attempts = Attempts()
        self._loading: dict[ShardId, asyncio.Future[HostedShard]] = {}

    def start(self) -> None:
        """Begin to run, once; `wait_settled` tells when every shard has loaded or failed."""
        self.process.start()

    @property
    def is_running(self) -> bool:
        """Whether the process was started and is to run."""
        return self.process.is_to_run

    @property
    def serving(self) -> list[HostedShard]:
        """What may be offered now: nothing while the process does not answer."""
        return list(self.shards.values()) if self.process.is_up else []

    async def wait_settled(self) -> None:
        """Until every shard has loaded or failed. Raises the first failure."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S + LOAD_TIMEOUT_S):
                await self._settled.wait()
        except TimeoutError:
            raise InternalError("the shards did not load in time.", fix="See the log.") from None
        for error in self.failed.values():
            raise error

    async def ensure(self, shard: dict[str, Any]) -> HostedShard:
        """A shard that this node may use: loaded now, for it alone, unless it is here already.

        One of those it is to serve is waited for, and served as well. Raises what loading raises,
        InternalError when it takes too long, or Busy when the process is being stopped.
        """
        name = _id_of(shard)
        here = self._here(name)
        if here is not None:
            return here
        if self.process.is_stopping:  # a second process would take the port of the one that drains
            raise Busy("this node is stopping.", fix="Ask another node, or start this one again.")
        self.start()
        if (refusal := self._why_not(name)) is not None:
            raise refusal
        try:
            async with asyncio.timeout(START_TIMEOUT_S + LOAD_TIMEOUT_S):
                await self.process.wait_up()
                here = self._here(name)
                return here if here is not None else await asyncio.shield(self._load(shard))
        except TimeoutError:
            raise InternalError(f"{name} did not load in time.", fix="See the log.") from None

    def wanted(self) -> list[ShardId]:
        """The shards this node is configured to serve."""
        return [_id_of(shard) for shard in self.spec.shards]

    def knows(self, name: ShardId) -> bool:
        """Whether a wanted shard has loaded or failed."""
        return name in self.shards or name in self.failed

    def try_again(self) -> None:
        """Load what did not load, whatever happened when that was tried."""
        self._attempts.forget()
        self._load_missing()

    def pause(self, paused: bool) -> None:
        """Ask whoever has a session here to move it elsewhere; False takes that back."""
        self.process.tell({"op": "pause", "paused": paused})

    def trust(self, members: Sequence[bytes]) -> None:
        """The certificates of those who may use the shards from now on; all others are cut off."""
        tls = {**self.spec.start.get("tls", {}), "members": list(members)}
        self.spec = replace(self.spec, start={**self.spec.start, "tls": tls})
        self.process.tell({"op": "tls", "members": list(members)})

    def revoke_tokens(self, token_ids: Sequence[str]) -> None:
        """Exactly these tokens are revoked: sessions that were opened with one of them end."""
        self._revoked = list(token_ids)
        self.process.tell({"op": "tokens", "revoked": self._revoked})

    async def drain(self, grace_s: float) -> None:
        """Have running sessions move elsewhere; wait up to `grace_s` until the last has ended.

        New sessions are refused from now on. The process ends by itself afterwards.
        """
        self.process.tell({"op": "stop", "grace_s": grace_s})
        await self.process.finish(grace_s + STOP_TIMEOUT_S)

    async def stop(self) -> None:
        """End the process and wait for it."""
        await self.drain(0.0)

    # Charge

    def process_started(self) -> None:
        """See `Charge.process_started`."""
        start = dict(self.spec.start)
        if self.port is not None:
            # Peers know the old endpoint; coming back on it spares them an advertisement.
            start["listen_port"] = self.port
        self.process.tell({"op": "tokens", "revoked": self._revoked})
        self.process.tell({"op": "start", **start})

    def process_ended(self, ending: Ending) -> None:
        """See `Charge.process_ended`."""
        self.shards.clear()
        self.private.clear()
        self.sessions, self.accounts = [], []
        self.memory = None
        if ending.loading is not None:
            error = self._attempts.died(ending.loading, ending, _now())
            self._did_not_load(ShardId(ending.loading.name), error)
        for name in list(self._loading):
            self._not_loaded(name, ended(self.process.name, ending))
        self._on_change()

    def why_not_start(self, free_mb: int) -> MeshError | None:
        """See `Charge.why_not_start`."""
        return None

    def process_changed(self) -> None:
        """See `Charge.process_changed`."""
        self._on_change()

    def process_said(self, message: ChannelMessage) -> None:
        """See `Charge.process_said`."""
        match message["op"]:
            case "listening":
                self.port = message["port"]
                self.reasons = message["reasons"]
                self.process.ready()
                self._load_missing()
                self._note_settled()
            case "loaded":
                self._loaded(_hosted(message))
            case "failed":
                self._failed(message)
            case "withdrawn":
                self._withdrawn(ShardId(message["shard_id"]), from_dict(message["error"]))
            case "health":
                self.sessions, self.memory = message["sessions"], message["memory"]
                self.accounts = message["accounts"]
                notable = [self._health(fields) for fields in message["shards"]]
                if any(notable):
                    self._on_change()
                self._load_missing()

    # Private

    def _here(self, name: ShardId) -> HostedShard | None:
        if not self.process.is_up:
            return None
        return self.shards.get(name) or self.private.get(name)

    def _why_not(self, name: ShardId) -> MeshError | None:
        """Why a shard is not to be loaded now, after what happened when it was."""
        free_mb = 0 if self.memory is None else self.memory["ram_mb"]
        return self._attempts.why_not(name, _now(), free_mb)

    def _load_missing(self) -> None:
        """Ask for every wanted shard that is not here and may be tried."""
        for shard in self.spec.shards:
            name = _id_of(shard)
            if self._here(name) is None and self._why_not(name) is None and self.process.is_up:
                self._load(shard)

    def _load(self, shard: dict[str, Any]) -> asyncio.Future[HostedShard]:
        """Ask for it unless that was done: asked twice, the process refuses what it just loaded."""
        name = _id_of(shard)
        if name not in self._loading:
            self._loading[name] = asyncio.get_running_loop().create_future()
            if self._why_not(traces_of(name)) is not None:  # its weights once more were too many
                shard = {**shard, "max_tap_sessions": 0}
            because = self.failed.get(name)
            why = because.message if isinstance(because, WeightsCorrupted) else None
            self.process.tell({"op": "load", "shard": shard, "because": why})
        return self._loading[name]

    def _loaded(self, hosted: HostedShard) -> None:
        name = hosted.descriptor.shard_id
        self._attempts.succeeded(name)
        loading = self._loading.pop(name, None)
        if loading is not None:
            loading.set_result(hosted)
        if name not in self.wanted():
            self.private[name] = hosted
            return
        self.shards[name] = hosted
        self.failed.pop(name, None)
        self._note_settled()

    def _failed(self, message: ChannelMessage) -> None:
        error = from_dict(message["error"])
        shard = message.get("shard")
        if isinstance(error, PortInUse):
            self.process.replace()  # without a listener it is of no use
            if self.port is not None:
                logger.warning("%s The shards move to another port.", error.message)
                self.port = None
                return
        if shard is not None:
            self._attempts.failed(_id_of(shard), error, _now())
        for name in self.wanted() if shard is None else [_id_of(shard)]:
            self._did_not_load(name, error)

    def _did_not_load(self, name: ShardId, error: MeshError) -> None:
        self._not_loaded(name, error)
        if name in self.wanted():
            self.failed[name] = error
            logger.error("shard=%s failed: %s", name, error)
            self._note_settled()

    def _withdrawn(self, name: ShardId, error: MeshError) -> None:
        """The process serves it no longer: its weights have changed."""
        error = self._attempts.corrupted(name, error)
        self.private.pop(name, None)
        if self.shards.pop(name, None) is not None:
            self.failed[name] = error
        logger.error("shard=%s withdrawn: %s", name, error)
        self._on_change()
        self._load_missing()

    def _not_loaded(self, name: ShardId, error: MeshError) -> None:
        loading = self._loading.pop(name, None)
        if loading is not None:
            loading.set_exception(error)
            loading.exception()  # often nobody waits, which is no error of its own

    def _health(self, fields: dict[str, Any]) -> bool:
        """Take note of it; whether others should know before the next heartbeat."""
        hosted = self.shards.get(fields["shard_id"]) or self.private.get(fields["shard_id"])
        if hosted is None:
            return False
        before, now = hosted.health.memory, ShardMemory(**fields["memory"])
        hosted.health = ShardHealth(
            shard_id=hosted.descriptor.shard_id,
            online=fields["online"],
            last_seen=datetime.now(UTC),
            p50_latency_ms=fields["p50_latency_ms"],
            p95_latency_ms=fields["p95_latency_ms"],
            queue_depth=fields["queue_depth"],
            active_streams=fields["active_streams"],
            memory=now,
        )
        hosted.facts.update(fields)
        return before is None or abs(before.total_mb - now.total_mb) > _NOTABLE_MB

    def _note_settled(self) -> None:
        if len(self.shards) + len(self.failed) >= len(self.spec.shards):
            self._settled.set()
        self._on_change()


def traces_of(name: ShardId) -> ShardId:
    """What the weights are called that a shard loads once more, for interventions."""
    return ShardId(f"{name} for traces")


def _now() -> float:
    return asyncio.get_running_loop().time()


def _id_of(shard: dict[str, Any]) -> ShardId:
    return shard_id(ModelId(shard["model_id"]), LayerRange.parse(shard["layers"]))


def _hosted(message: ChannelMessage) -> HostedShard:
    fields = dict(message["descriptor"])
    layers = LayerRange.parse(fields["layer_range"])
    descriptor = ShardDescriptor(
        shard_id=ShardId(fields["shard_id"]),
        model_id=ModelId(fields["model_id"]),
        weights_sha256=fields["weights_sha256"],
        layer_range=layers,
        total_layers=fields["total_layers"],
        vram_required_mb=fields["vram_required_mb"],
        max_concurrent_streams=fields["max_concurrent_streams"],
        host=NodeId(fields["host"]),
        node_name=fields["node_name"],
        endpoint=Endpoint(fields["endpoint"]),
        dtype=fields["dtype"],
        determinism_class=fields["determinism_class"],
        advertised_at=datetime.now(UTC),
    )
    health = ShardHealth(descriptor.shard_id, True, datetime.now(UTC), 0.0, 0.0, 0, 0)
    facts: dict[str, Any] = {
        key: message[key] for key in ("bytes_read", "load_ms", "reasons") if key in message
    }
    return HostedShard(descriptor, health, facts)
