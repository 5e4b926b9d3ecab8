"""The shard process: ``python -m mesh.shard.host``, one per device, started by the daemon.

Takes commands from the daemon's channel, those that load or unload one after the other, and serves
askers on its own listener. Its event loop serves nothing but hops, so that a short decode step may
be computed on it.

Commands: ``start``, ``tls``, ``tokens``, ``load``, ``unload``, ``pause``, ``stop``. Answers:
``listening``, ``loaded``, ``unloaded``, ``withdrawn``, ``paused``, ``failed``, and ``health`` every
second and on every change.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from mesh.channel import Channel, ChannelMessage
from mesh.charge import Loading
from mesh.clock import SteadyClock, SystemClock
from mesh.discovery.interfaces import Reach
from mesh.errors import BadRequest, DeviceLost, LinkLost, MeshError, WeightsCorrupted
from mesh.identity.tls import TlsMaterial
from mesh.shard.batcher import DeviceQueue
from mesh.shard.device import choose_device, headroom
from mesh.shard.failures import foreseen
from mesh.shard.held import HeldShard
from mesh.shard.hosting import traces_of
from mesh.shard.leases import leased
from mesh.shard.loading import (
    HostedOn,
    LoadedShard,
    LoadPlan,
    ShardRequest,
    load_shard,
    plan_shard,
)
from mesh.shard.members import Members
from mesh.shard.memory import release_memory
from mesh.shard.permits import Permits, dated
from mesh.shard.recording import HarvestShelf
from mesh.shard.reports import endpoint_at, failed, health_of, loaded_shard
from mesh.shard.room import Room
from mesh.shard.server import ShardServer
from mesh.shard.service import ShardService
from mesh.shard.settings import ShardSettings
from mesh.shard.taps.server import TapServer, TapSettings
from mesh.shard.threads import kept_threads
from mesh.shard.weight_watch import WeightWatch, WeightWatches
from mesh.supervise import LOADING, attach_to_parent, end_failed
from mesh.types import Endpoint, NodeId, ShardId, shard_id
from mesh.wire.connection import WebSocketLink
from mesh.wire.limits import DEFAULT_LIMITS
from mesh.wire.link import LinkHandler
from mesh.wire.messages import Drain, Hello
from mesh.wire.websocket import LinkServer, serve

logger = logging.getLogger(__name__)

_HEALTH_INTERVAL_S = 1.0
_CHANGES_TOGETHER_S = 0.05
_MAX_COMMANDS = 64
_STUCK_S = 600.0
"""A visit to the device takes well under a second, on slow machines minutes; one that takes so long
will not end."""

Load = Callable[[LoadPlan], LoadedShard]


class ShardProcess:
    """The shards of this process. Runs until it is told to stop."""

    def __init__(self, load: Load = load_shard, *, stuck_s: float = _STUCK_S) -> None:
        self._load_shard = load
        self._stuck_s = stuck_s
        self._commands: asyncio.Queue[ChannelMessage] = asyncio.Queue(_MAX_COMMANDS)
        self._channel: Channel | None = None
        self._service = ShardService()
        self._changed = asyncio.Event()
        self._place: HostedOn | None = None
        self._cache_dir: str | None = None
        self._queue: DeviceQueue | None = None
        self._room: Room | None = None
        self._held: dict[ShardId, HeldShard] = {}
        self._listener: LinkServer | None = None
        self._members = Members()
        self._revoked: frozenset[str] = frozenset()
        self._stopping = asyncio.Event()
        self._grace_s = 0.0
        self._watches = WeightWatches(self._withdraw)

    def receive(self, command: ChannelMessage) -> None:
        """One map from the daemon; more than a few unanswered ones are refused.

        Who may come in, which tokens hold, and that sessions have to leave, is not put behind a
        shard that takes its time to load.
        """
        match command.get("op"):
            case "tls":
                self._members.name(command["members"])
            case "tokens":
                self._revoked = frozenset(map(str, command["revoked"]))
                self._service.revoke(self._revoked)
            case "pause":
                self._pause(bool(command["paused"]))
            case "stop":
                self._grace_s = float(command.get("grace_s", 0.0))
                self._stopping.set()
            case _:
                self._enqueue(command)

    async def run(self, channel: Channel) -> None:
        """Serve until ``stop``. A background task that fails ends it: the daemon starts another."""
        self._channel = channel
        try:
            async with asyncio.TaskGroup() as group:
                self._watches.group = group
                background = [
                    group.create_task(self._report(), name="shard-health"),
                    group.create_task(self._members.follow(self._links), name="shard-members"),
                ]
                obeying = group.create_task(self._obey_all(), name="shard-commands")
                await self._stopping.wait()
                obeying.cancel()  # a shard that is still loading is not served any more
                await self._drain(self._grace_s)
                self._watches.stop_all()
                for task in background:
                    task.cancel()
        finally:
            if self._listener is not None:
                await self._listener.close()
            if self._queue is not None:
                self._queue.close()
            if self._service.shelf is not None:
                self._service.shelf.close()

    def _enqueue(self, command: ChannelMessage) -> None:
        try:
            self._commands.put_nowait(command)
        except asyncio.QueueFull:
            error = BadRequest("The shard process has too many commands waiting.", fix="Wait.")
            self._say(failed(command, error))

    async def _obey_all(self) -> None:
        while True:
            await self._obey(await self._commands.get())

    async def _obey(self, command: ChannelMessage) -> None:
        obey: dict[str, Callable[[ChannelMessage], Awaitable[ChannelMessage]]] = {
            "start": self._start,
            "load": self._load,
            "unload": self._unload,
        }
        try:
            answer = await obey.get(str(command.get("op")), _unknown)(command)
        except MeshError as error:
            answer = failed(command, error)
        except (KeyError, TypeError, ValueError) as error:
            bad = BadRequest(f"Bad command: {error!r}.", fix="Fix its fields.")
            answer = failed(command, bad)
        except Exception:
            # Not one of ours: the daemon restarts the process, which is the safest answer.
            logger.exception("command failed op=%s", command.get("op"))
            raise
        self._say(answer)
        if answer["op"] == "failed" and self._queue is not None:
            # Gigabytes may have been read before a load failed, and the process lives on.
            await self._queue.load(release_memory)

    async def _start(self, command: ChannelMessage) -> ChannelMessage:
        if self._place is not None:
            raise BadRequest("The shard process has started already.", fix="Send start once.")
        device = await asyncio.to_thread(choose_device, str(command.get("device") or "auto"))
        threads = await asyncio.to_thread(
            kept_threads,
            int(command.get("threads") or 0),
            device.value,
            Path(command["threads_dir"]) if command.get("threads_dir") else None,
        )
        said = command["hello"]
        hello = Hello(
            str(said["node_id"]), str(said["node_name"]), "tensors", str(said["software"])
        )
        host, port = str(command["listen_host"]), int(command["listen_port"])
        tls = await self._members.start(TlsMaterial.from_fields(command["tls"]))
        clock = SteadyClock(SystemClock().now())
        lease_s = float(command.get("session_lease_s") or ShardSettings().session_lease_s)
        self._service.permits = Permits(tls, clock)
        self._service.revoke(self._revoked)
        self._listener = await serve(
            Reach.of(command.get("interfaces", [host]), host) or host,
            port,
            accept=self._accept,
            hello=lambda: dated(leased(hello, lease_s), clock),
            limits=replace(DEFAULT_LIMITS, accounts=self._service.accounts),
            ssl=tls.server,
        )
        self._queue = DeviceQueue(threads.value)
        self._queue.on_lost = self._end
        self._room = Room(
            partial(headroom, device.value), lambda: list(self._held.values()), self._say_loading
        )
        self._service.shelf = _shelf(command, NodeId(hello.node_id))
        self._cache_dir = command.get("cache_dir")
        self._place = HostedOn(
            NodeId(hello.node_id),
            hello.node_name,
            Endpoint(endpoint_at(host, self._listener.port)),
            device.value,
            threads.value,
        )
        return {
            "op": "listening",
            "port": self._listener.port,
            "device": str(device.value),
            "reasons": [device.reason, threads.reason],
        }

    def _links(self) -> Iterable[WebSocketLink]:
        return self._listener.links if self._listener is not None else ()

    async def _load(self, command: ChannelMessage) -> ChannelMessage:
        place, queue, room = self._started()
        asked = command["shard"]
        if asked.get("advertise_host") and self._listener is not None:
            endpoint = Endpoint(endpoint_at(str(asked["advertise_host"]), self._listener.port))
            place = replace(place, endpoint=endpoint)
        request = ShardRequest.of(asked, self._cache_dir)
        self._service.require_absent(shard_id(request.model_id, request.layers))
        # A model that cannot be loaded must not take those that can down with the process.
        reading = queue.load(lambda: plan_shard(request, place))
        plan = await foreseen(reading, "reading a checkpoint")
        room_for = partial(room.loading, plan.shard_id, plan.need)
        async with room_for():
            loaded = await foreseen(queue.load(lambda: self._load_shard(plan)), "loading a shard")
        server = ShardServer(
            loaded.descriptor,
            loaded.load,
            request.settings,
            hidden_size=loaded.hidden_size,
            queue=queue,
            make_room=lambda: nullcontext() if loaded.is_spare() else room_for(),
        )
        server.on_change(self._changed.set)
        await server.start()
        settings = TapSettings.of(asked, request.settings.kv_tokens)
        room_for_traces = partial(room.loading, traces_of(plan.shard_id), plan.plain_need)
        taps = TapServer(server, loaded.load_plain, queue, settings, room_for_traces)
        self._service.add(server, taps)
        self._held[plan.shard_id] = HeldShard(server, taps, plan.need)
        watch = WeightWatch(taps.weights, queue)
        self._watches.start(plan.shard_id, watch)
        self._changed.set()
        return loaded_shard(loaded, command.get("because"))

    async def _withdraw(self, name: ShardId, error: WeightsCorrupted) -> None:
        """Serve a shard no longer whose weights have changed."""
        if (held := self._held.pop(name, None)) is None:
            return  # the process is stopping
        self._service.remove(name)
        self._say({"op": "withdrawn", "shard_id": name, "error": error.to_dict()})
        await held.server.evict(error)

    async def _unload(self, command: ChannelMessage) -> ChannelMessage:
        name = ShardId(str(command["shard_id"]))
        server = self._service.remove(name)
        self._watches.stop(name)
        await server.evict()
        self._held.pop(name, None)
        self._changed.set()
        return {"op": "unloaded", "shard_id": name}

    def _pause(self, paused: bool) -> None:
        """Have askers move their sessions away, or take that back."""
        self._tell_askers(Drain("the node goes to sleep" if paused else ""))
        self._say({"op": "paused", "paused": paused})

    def _tell_askers(self, notice: Drain) -> None:
        for link in self._links():
            with contextlib.suppress(LinkLost):  # then it needs no telling
                link.send(notice)

    async def _drain(self, grace_s: float) -> None:
        """Take no new sessions; give running ones `grace_s` to end."""
        servers = self._service.servers
        for server in servers:
            self._service.remove(server.descriptor.shard_id)
        self._tell_askers(Drain("the node is stopping"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while any([(await server.health()).active_streams for server in servers]):
                    self._changed.clear()
                    await self._changed.wait()

    async def _report(self) -> None:
        rss_mb = 0.0
        while True:
            # Not `wait_for`: before Python 3.12 it loses a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HEALTH_INTERVAL_S):
                    await self._changed.wait()
                # What changes together is said together.
                await asyncio.sleep(_CHANGES_TOGETHER_S)
            self._changed.clear()
            self._require_progress()
            with contextlib.suppress(OSError):  # no descriptor is left to read it with
                rss_mb = psutil.Process().memory_info().rss / 2**20
            shards = [await health_of(shard, rss_mb) for shard in self._held.values()]
            memory = await self._look_after_room()
            sessions, accounts = self._service.sessions(), self._service.reports()
            health = {"shards": shards, "sessions": sessions, "accounts": accounts}
            self._say({"op": "health", **health, "memory": memory})

    async def _look_after_room(self) -> dict[str, Any] | None:
        """What is free now; where that is little, an idle shard goes."""
        if self._room is None:
            return None
        with contextlib.suppress(OSError):  # as above: what was known last has to do
            await self._room.relieve()
        memory = self._room.memory
        return None if memory is None else {**asdict(memory.device), "ram_mb": memory.ram_mb}

    def _say_loading(self, load: Loading | None) -> None:
        self._say({"op": LOADING, "load": None if load is None else asdict(load)})

    def _require_progress(self) -> None:
        """End the process when its device does, which its loop knows nothing of."""
        if self._queue is not None and self._queue.busy_s > self._stuck_s:
            self._end(
                DeviceLost(
                    f"The device has been at one step for {self._queue.busy_s:.0f} s.",
                    fix="The process starts again by itself; see its log if this repeats.",
                )
            )

    def _end(self, error: DeviceLost) -> None:
        if self._channel is not None:
            end_failed(self._channel, error)

    def _accept(self, link: WebSocketLink) -> LinkHandler:
        self._members.require(link)
        if link.peer.purpose != "tensors":
            raise BadRequest(
                f"A shard takes tensor links, not {link.peer.purpose!r}.",
                fix="Connect to the daemon's control port.",
            )
        return self._service.handler(link)

    def _started(self) -> tuple[HostedOn, DeviceQueue, Room]:
        if self._place is None or self._queue is None or self._room is None:
            raise BadRequest("The shard process has not started.", fix="Send start first.")
        return self._place, self._queue, self._room

    def _say(self, message: ChannelMessage) -> None:
        if self._channel is not None:
            self._channel.send(message)


def _shelf(command: ChannelMessage, own: NodeId) -> HarvestShelf | None:
    directory = command.get("harvest_dir")
    limit_bytes = int(command.get("harvest_mb") or 0) << 20
    return HarvestShelf(Path(directory), limit_bytes, own) if directory else None


async def _unknown(command: ChannelMessage) -> ChannelMessage:
    raise BadRequest(f"Unknown command {command.get('op')!r}.", fix="Update the daemon.")


async def _serve(process: ShardProcess) -> None:
    await process.run(await attach_to_parent(process.receive))


def main(load: Load = load_shard, *, stuck_s: float = _STUCK_S) -> None:
    """Be the process, until told to stop or until the daemon is gone."""
    faulthandler.enable()  # a write to a weight ends the process: where it was is in the log
    gc.freeze()  # what was imported stays: loading need not search it for garbage
    asyncio.run(_serve(ShardProcess(load, stuck_s=stuck_s)))


if __name__ == "__main__":
    main()
