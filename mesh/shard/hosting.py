"""The daemon's side of the shard process: starts it, tells it what to load, hears how it is doing.

One process serves all shards of one device (`mesh.shard.host`). A crash of it is those shards'
failure, not the node's: it is started again and loads the same shards. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from mesh.errors import Busy, InternalError, LinkLost, MeshError, PortInUse, from_dict
from mesh.supervise import ChannelMessage, Child, run_again
from mesh.types import (
    Endpoint,
    LayerRange,
    ModelId,
    NodeId,
    ShardDescriptor,
    ShardHealth,
    ShardId,
    shard_id,
)

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 5.0


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

    def __init__(self, spec: HostSpec, on_change: Callable[[], None]) -> None:
        self.spec = spec
        self.shards: dict[ShardId, HostedShard] = {}
        self.private: dict[ShardId, HostedShard] = {}
        self.failed: dict[ShardId, MeshError] = {}
        self.reasons: list[str] = []
        self.sessions: list[dict[str, Any]] = []
        self.accounts: list[dict[str, Any]] = []
        self.port: int | None = None
        self._on_change = on_change
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()
        self._settled = asyncio.Event()
        self._listening = asyncio.Event()
        self._is_stopping = False
        self._revoked: list[str] = []
        self._loading: dict[ShardId, asyncio.Future[HostedShard]] = {}

    def start(self) -> None:
        """Begin to run, once; `wait_settled` tells when every shard has loaded or failed."""
        if self._task is not None:
            return
        self._task = asyncio.create_task(
            run_again(self._run_child, "shard host", lambda: self._is_stopping), name="shard host"
        )

    @property
    def is_running(self) -> bool:
        """Whether the process was started and is to run."""
        return self._task is not None and not self._is_stopping

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
        here = self.shards.get(name) or self.private.get(name)
        if here is not None:
            return here
        if self._is_stopping:  # a second process would take the port of the one that drains
            raise Busy("this node is stopping.", fix="Ask another node, or start this one again.")
        self.start()
        try:
            async with asyncio.timeout(START_TIMEOUT_S + LOAD_TIMEOUT_S):
                await self._listening.wait()
                here = self.shards.get(name) or self.private.get(name)
                return here if here is not None else await asyncio.shield(self._load(shard))
        except TimeoutError:
            raise InternalError(f"{name} did not load in time.", fix="See the log.") from None

    def wanted(self) -> list[ShardId]:
        """The shards this node is configured to serve."""
        return [_id_of(shard) for shard in self.spec.shards]

    def knows(self, name: ShardId) -> bool:
        """Whether a wanted shard has loaded or failed."""
        return name in self.shards or name in self.failed

    def pause(self, paused: bool) -> None:
        """Ask whoever has a session here to move it elsewhere; False takes that back."""
        self._tell({"op": "pause", "paused": paused})

    def trust(self, members: Sequence[bytes]) -> None:
        """The certificates of those who may use the shards from now on; all others are cut off."""
        tls = {**self.spec.start.get("tls", {}), "members": list(members)}
        self.spec = replace(self.spec, start={**self.spec.start, "tls": tls})
        self._tell({"op": "tls", "members": list(members)})

    def revoke_tokens(self, token_ids: Sequence[str]) -> None:
        """Exactly these tokens are revoked: sessions that were opened with one of them end."""
        self._revoked = list(token_ids)
        self._tell({"op": "tokens", "revoked": self._revoked})

    async def drain(self, grace_s: float) -> None:
        """Have running sessions move elsewhere; wait up to `grace_s` until the last has ended.

        New sessions are refused from now on. The process ends by itself afterwards.
        """
        task, self._task = self._task, None
        if task is None:
            return
        self._is_stopping = True
        child = self._child
        self._tell({"op": "stop", "grace_s": grace_s})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s + STOP_TIMEOUT_S):
                await self._gone.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if child is not None:
            # The task was most likely cancelled just while it waited for the process to end.
            await child.stop(STOP_TIMEOUT_S)

    async def stop(self) -> None:
        """End the process and wait for it."""
        await self.drain(0.0)

    # Private

    async def _run_child(self) -> None:
        self._gone.clear()
        try:
            await self._start_child()
            await self._gone.wait()
        finally:
            await self._end_child()

    async def _start_child(self) -> None:
        self._child = await Child.start(
            "mesh.shard.host", name="shards", on_message=self._message, on_closed=self._gone.set
        )
        start = dict(self.spec.start)
        if self.port is not None:
            # Peers know the old endpoint; coming back on it spares them an advertisement.
            start["listen_port"] = self.port
        self._tell({"op": "tokens", "revoked": self._revoked})
        self._tell({"op": "start", **start})

    async def _end_child(self) -> None:
        self.shards.clear()
        self.private.clear()
        self.sessions, self.accounts = [], []
        self._listening.clear()
        ended = InternalError("the shard process ended.", fix="It starts again; try again.")
        for name in list(self._loading):
            self._not_loaded(name, ended)
        self._on_change()
        if self._child is not None:  # until it has ended, `drain` may have to end it
            await self._child.stop(STOP_TIMEOUT_S)
            self._child = None

    def _message(self, message: ChannelMessage) -> None:
        match message["op"]:
            case "listening":
                self.port = message["port"]
                self.reasons = message["reasons"]
                for shard in self.spec.shards:
                    self._load(shard)
                self._listening.set()
                self._note_settled()
            case "loaded":
                self._loaded(_hosted(message))
            case "failed":
                self._failed(message)
            case "health":
                self.sessions = message["sessions"]
                self.accounts = message["accounts"]
                for fields in message["shards"]:
                    self._health(fields)

    def _load(self, shard: dict[str, Any]) -> asyncio.Future[HostedShard]:
        """Ask for it unless that was done: asked twice, the process refuses what it just loaded."""
        name = _id_of(shard)
        if name not in self._loading:
            self._loading[name] = asyncio.get_running_loop().create_future()
            self._tell({"op": "load", "shard": shard})
        return self._loading[name]

    def _loaded(self, hosted: HostedShard) -> None:
        name = hosted.descriptor.shard_id
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
            self._gone.set()  # without a listener the process is of no use; another one is started
            if self.port is not None:
                logger.warning("%s The shards move to another port.", error.message)
                self.port = None
                return
        for name in self.wanted() if shard is None else [_id_of(shard)]:
            self._not_loaded(name, error)
            if name in self.wanted():
                self.failed[name] = error
                logger.error("shard=%s failed: %s", name, error)
                self._note_settled()

    def _not_loaded(self, name: ShardId, error: MeshError) -> None:
        loading = self._loading.pop(name, None)
        if loading is not None:
            loading.set_exception(error)
            loading.exception()  # often nobody waits, which is no error of its own

    def _health(self, fields: dict[str, Any]) -> None:
        hosted = self.shards.get(fields["shard_id"]) or self.private.get(fields["shard_id"])
        if hosted is None:
            return
        hosted.health = ShardHealth(
            shard_id=hosted.descriptor.shard_id,
            online=fields["online"],
            last_seen=datetime.now(UTC),
            p50_latency_ms=fields["p50_latency_ms"],
            p95_latency_ms=fields["p95_latency_ms"],
            queue_depth=fields["queue_depth"],
            active_streams=fields["active_streams"],
        )
        hosted.facts.update(fields)

    def _note_settled(self) -> None:
        if len(self.shards) + len(self.failed) >= len(self.spec.shards):
            self._settled.set()
        self._on_change()

    def _tell(self, message: ChannelMessage) -> None:
        if self._child is not None:
            with contextlib.suppress(LinkLost):
                self._child.channel.send(message)


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
