"""The shard process: ``python -m mesh.shard.process``, one per device, started by the daemon.

Takes commands from the daemon's channel, loads one after the other, and serves askers on its own
listener. Its event loop serves nothing but hops, so that a short decode step may be computed on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import psutil

from mesh.capacity import device_name
from mesh.clock import SteadyClock, SystemClock, next_tick, set_by
from mesh.discovery.interfaces import Reach
from mesh.errors import (
    BadRequest,
    DeviceLost,
    LinkLost,
    MeshError,
    WeightsCorrupted,
)
from mesh.models.hashing import require_unchanged
from mesh.processes.messages import Handlers
from mesh.processes.worker import Worker
from mesh.shard.commands import (
    Distrust,
    Health,
    KeepResident,
    Listening,
    Load,
    Loaded,
    Pause,
    RevokeTokens,
    ShardReport,
    StartShards,
    Unload,
    Withdrawn,
    ends_of,
    traces_of,
)
from mesh.shard.device import headroom, memory_budget, occupy
from mesh.shard.failures import device_failed
from mesh.shard.load_plan import HostedOn, LoadPlan, plan_shard
from mesh.shard.loading import HeldShard, LoadedShard, load_shard
from mesh.shard.memory import release_memory
from mesh.shard.permits import Permits, dated
from mesh.shard.recording import HarvestShelf
from mesh.shard.room import Room
from mesh.shard.scheduler import Scheduler
from mesh.shard.server import ShardServer
from mesh.shard.service import ShardService
from mesh.shard.settings import leased
from mesh.shard.taps.server import TapServer, TapSettings
from mesh.shard.threads import kept_threads
from mesh.shard.unloading import withdraw
from mesh.shard.weight_watch import WeightWatch
from mesh.types import Endpoint, NodeId, ShardId, host_port
from mesh.wire.abilities import says_copies
from mesh.wire.connection import WebSocketLink
from mesh.wire.limits import DEFAULT_LIMITS
from mesh.wire.link import LinkHandler
from mesh.wire.messages import Drain
from mesh.wire.websocket import Doorkeeper, LinkServer, serve

logger = logging.getLogger(__name__)

_HEALTH_INTERVAL_S = 1.0
_CHANGES_TOGETHER_S = 0.05
_STUCK_S = 600.0
"""A visit to the device takes well under a second, on slow machines minutes; one that takes so long
will not end."""

LoadShard = Callable[[LoadPlan], LoadedShard]


@dataclass(frozen=True, slots=True)
class _Parts:
    """What there is from the start on."""

    place: HostedOn
    listener: LinkServer
    queue: Scheduler
    room: Room


class ShardProcess(Worker):
    """The shards of this process."""

    def __init__(self, load: LoadShard = load_shard, *, stuck_s: float = _STUCK_S) -> None:
        super().__init__()
        self._load_shard = load
        self._stuck_s = stuck_s
        self._turn = asyncio.Lock()
        """What changes which shards are here is done one after the other, in the order it came."""
        self._service = ShardService()
        self._changed = asyncio.Event()
        self._parts: _Parts | None = None
        self._held: dict[ShardId, HeldShard] = {}
        self._watches: dict[ShardId, asyncio.Task[None]] = {}
        self._watchers_turn = asyncio.Lock()
        self._is_paused = False
        self._revoked: frozenset[str] = frozenset()
        self._resident: frozenset[ShardId] = frozenset()

    def commands(self) -> Handlers:
        """See `Worker`: who may come in, which tokens hold, what stays, and that sessions have to
        leave, is not put behind a shard that takes its time to load."""
        return {
            StartShards: self._start,
            Load: self._load,
            Unload: self._unload,
            Distrust: self._distrust,
            RevokeTokens: self._revoke,
            KeepResident: self._keep_resident,
            Pause: self._pause,
        }

    def unforeseen(self, error: Exception) -> MeshError:
        """A model that cannot be loaded must not take those that can down with the process."""
        return device_failed(error)

    async def drain(self, grace_s: float) -> None:
        """See `Worker`: no new sessions; running ones get `grace_s`."""
        self.exchange.drop(Load)  # a shard that is still loading is not served any more
        servers = self._service.servers
        for server in servers:
            self._service.remove(server.descriptor.shard_id)
        self._tell_askers(Drain("the node is stopping"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while any([(await server.health()).active_streams for server in servers]):
                    self._changed.clear()
                    await self._changed.wait()

    async def close(self) -> None:
        """Stop listening and computing."""
        if self._parts is not None:
            await self._parts.listener.close()
            self._parts.queue.close()
        if self._service.shelf is not None:
            self._service.shelf.close()

    # Commands

    def _revoke(self, command: RevokeTokens) -> None:
        self._revoked = frozenset(command.token_ids)
        self._service.revoke(self._revoked)

    def _keep_resident(self, command: KeepResident) -> None:
        self._resident = frozenset(command.shard_ids)
        for name, held in self._held.items():
            held.server.keep_resident(name in self._resident)

    async def _pause(self, command: Pause) -> None:
        self._is_paused = command.paused
        self._tell_askers(Drain("the node goes to sleep" if command.paused else ""))

    async def _start(self, command: StartShards) -> Listening:
        device = await asyncio.to_thread(occupy, command.device)
        threads = await asyncio.to_thread(
            kept_threads, command.threads, device.value, command.threads_dir
        )
        hello, host = command.hello, command.listen_host
        own = NodeId(hello.node_id)
        clock = SteadyClock(SystemClock().now())
        self._service.permits = Permits(self.members.tls, clock)
        self._service.revoke(self._revoked)
        interfaces = [host] if command.interfaces is None else command.interfaces
        listener = await serve(
            Reach.of(interfaces, host) or host,
            command.listen_port,
            accept=Doorkeeper(self.members.identify, self._accept),
            hello=lambda: dated(leased(says_copies(hello), command.session_lease_s), clock),
            limits=replace(DEFAULT_LIMITS, accounts=self._service.accounts),
            ssl=self.members.tls.server,
        )
        queue = Scheduler(threads.value)
        queue.on_lost = self.end_failed
        budget = await asyncio.to_thread(memory_budget, command.caps, device.value)
        measure = partial(headroom, device.value)
        room = Room(measure, self._held.values, self.say_loading, budget)
        if command.harvest_dir is not None:
            limit_bytes = command.harvest_mb << 20
            self._service.shelf = HarvestShelf(command.harvest_dir, limit_bytes, own)
        endpoint = _endpoint(host, listener.port)
        place = HostedOn(
            own, hello.node_name, endpoint, device.value, threads.value,
            device_name(command.device, str(device.value)),
        )  # fmt: skip
        parts = self._parts = _Parts(place, listener, queue, room)
        self.keep(self._report(parts), "shard-health")
        await self.follow_members(self._keep_only)
        return Listening(listener.port, str(device.value), (device.reason, threads.reason))

    async def _load(self, command: Load) -> Loaded:
        async with self._turn:
            if self._parts is None:
                raise BadRequest("The shard process has not started.", fix="Send start first.")
            try:
                return await self._serve(command, self._parts)
            except Exception:
                # Gigabytes may have been read before a load failed, and the process lives on.
                await self._parts.queue.load(release_memory)
                raise

    async def _serve(self, command: Load, parts: _Parts) -> Loaded:
        request, place, queue, room = command.request, parts.place, parts.queue, parts.room
        if request.advertise_host:
            endpoint = _endpoint(request.advertise_host, parts.listener.port)
            place = replace(place, endpoint=endpoint)
        self._service.require_absent(request.shard_id)
        plan = await queue.load(lambda: plan_shard(request, place))
        if command.because:  # what it was loaded from may have changed, too
            stored = plan.manifest.layer_tensors(plan.request.layers)
            await queue.load(lambda: require_unchanged(stored))
        room_for = partial(room.loading, plan.shard_id, plan.need, plan.progress)
        async with room_for():
            loaded = await queue.load(lambda: self._load_shard(plan))
        server = ShardServer(
            loaded.descriptor,
            loaded.load,
            request.settings,
            shape=loaded.shape,
            scheduler=queue,
            make_room=lambda: nullcontext() if loaded.is_spare() else room_for(),
        )
        server.weights.freed = partial(room.freed, plan.shard_id)
        if loaded.descriptor.embeds or loaded.descriptor.head:
            ends = ends_of(plan.shard_id)
            room_for_ends = partial(room.loading, ends, plan.ends_need)
            server.lend_ends(loaded.load_ends, room_for_ends, partial(room.freed, ends))
        server.on_change(self._changed.set)
        await server.start()
        server.keep_resident(plan.shard_id in self._resident)
        settings = TapSettings(
            request.max_tap_sessions,
            memory_bytes=request.tap_memory_mb << 20,
            positions=request.settings.kv_tokens,
        )
        room_for_traces = partial(room.loading, traces_of(plan.shard_id), plan.plain_need)
        taps = TapServer(server, loaded.load_plain, queue, settings, room_for_traces)
        taps.weights_freed = partial(room.freed, traces_of(plan.shard_id))
        self._service.add(server, taps)
        self._held[plan.shard_id] = HeldShard(server, taps, plan.need)
        watch = WeightWatch(taps.weights, queue, self._watchers_turn)
        name = plan.shard_id
        self._watches[name] = self.keep(self._watch(name, watch), f"weights of {name}")
        self._changed.set()
        again = (f"loaded again: {command.because}",) if command.because else ()
        return Loaded(
            loaded.descriptor, loaded.bytes_read, loaded.load_ms, (*loaded.reasons, *again)
        )

    async def _unload(self, command: Unload) -> int:
        """It takes no new sessions from now on; loads behind it do not wait for those it has."""
        async with self._turn:
            held = self._held.pop(command.shard_id, None)
            if held is None:
                return 0
            self._watches.pop(command.shard_id).cancel()
            leaving = withdraw(self._service, held)
        left = await leaving.end(command.grace_s, is_paused=lambda: self._is_paused)
        self._changed.set()
        return left

    # Weights, memory, links

    async def _watch(self, name: ShardId, watch: WeightWatch) -> None:
        """Serve a shard no longer once its weights have changed."""
        weight = await watch.changed()
        error = WeightsCorrupted(
            f"{name} was withdrawn: {weight} in memory is not what was loaded.",
            fix="It is loaded again by itself.",
        )
        self._watches.pop(name, None)
        await self._withdraw(name, error)

    def _distrust(self, command: Distrust) -> None:
        if (watch := self._watches.pop(command.shard_id, None)) is not None:
            watch.cancel()
            withdrawing = self._withdraw(command.shard_id, command.error)
            self.spawn(withdrawing, f"withdraw {command.shard_id}")

    async def _withdraw(self, name: ShardId, error: MeshError) -> None:
        if (held := self._held.pop(name, None)) is None:
            return
        if not self.is_stopping:  # then none is served any more
            self._service.remove(name)
            self.say(Withdrawn(name, error))
        await held.server.evict(error)

    def _links(self) -> Iterable[WebSocketLink]:
        return self._parts.listener.links if self._parts is not None else ()

    def _keep_only(self, members: frozenset[NodeId]) -> None:
        for link in self._links():
            if link.peer.node_id not in members:
                link.close("you are no longer trusted here")

    def _tell_askers(self, notice: Drain) -> None:
        for link in self._links():
            with contextlib.suppress(LinkLost):  # then it needs no telling
                link.send(notice)

    async def _report(self, parts: _Parts) -> None:
        rss_mb, process = 0.0, psutil.Process()
        while True:
            if await set_by(self._changed, next_tick(_HEALTH_INTERVAL_S)):
                # What changes together is said together.
                await asyncio.sleep(_CHANGES_TOGETHER_S)
            self._changed.clear()
            self._require_progress(parts.queue)
            with contextlib.suppress(OSError):  # no descriptor is left to read it with
                rss_mb = process.memory_info().rss / 2**20
            shards = tuple([await _report_of(held) for held in self._held.values()])
            with contextlib.suppress(OSError):  # as above: what was known last has to do
                await parts.room.relieve()  # where little is free, an idle shard goes
            sessions, accounts = self._service.sessions(), self._service.reports()
            self.say(Health(shards, rss_mb, sessions, accounts, parts.room.memory))

    def _require_progress(self, queue: Scheduler) -> None:
        """End the process when its device does, which its loop knows nothing of."""
        if queue.busy_s > self._stuck_s:
            self.end_failed(
                DeviceLost(
                    f"The device has been at one step for {queue.busy_s:.0f} s.",
                    fix="The process starts again by itself; see its log if this repeats.",
                )
            )

    def _accept(self, link: WebSocketLink) -> LinkHandler:
        self.members.require_trusted(link, "shards", "tensors")
        return self._service.handler(link)


async def _report_of(held: HeldShard) -> ShardReport:
    health = replace(
        await held.server.health(),
        memory=held.memory, jobs=held.taps.sessions, jobs_so_far=held.taps.sessions_so_far,
    )  # fmt: skip
    return ShardReport(held.server.descriptor.shard_id, health, held.server.load_now())


def _endpoint(host: str, port: int) -> Endpoint:
    """Where askers dial."""
    return Endpoint(f"wss://{host_port(host, port)}")


def main(load: LoadShard = load_shard, *, stuck_s: float = _STUCK_S) -> None:
    """Be the process, until told to stop or until the daemon is gone."""
    faulthandler.enable()  # a write to a weight ends the process: where it was is in the log
    gc.freeze()  # what was imported stays: loading need not search it for garbage
    asyncio.run(ShardProcess(load, stuck_s=stuck_s).run())


if __name__ == "__main__":
    main()
