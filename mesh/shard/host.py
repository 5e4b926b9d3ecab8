"""The shard process: ``python -m mesh.shard.host``, one per device, started by the daemon.

Takes commands from the daemon's channel, those that load or unload one after the other, and serves
askers on its own listener. Its event loop serves nothing but hops, so that a short decode step may
be computed on it.

Commands: ``start``, ``tls``, ``tokens``, ``load``, ``unload``, ``pause``, ``stop``. Answers:
``listening``, ``loaded``, ``unloaded``, ``paused``, ``failed``, and ``health`` every second and on
every change.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from mesh.clock import SteadyClock, SystemClock
from mesh.discovery.interfaces import Reach
from mesh.errors import BadRequest, LinkLost, MeshError, UntrustedPeer
from mesh.identity.tls import TlsContexts, TlsMaterial, require_node
from mesh.shard.batcher import DeviceQueue
from mesh.shard.device import choose_device
from mesh.shard.failures import foreseen
from mesh.shard.leases import leased
from mesh.shard.loading import HostedOn, LoadedShard, ShardRequest, load_shard
from mesh.shard.memory import release_memory
from mesh.shard.permits import Permits, dated
from mesh.shard.recording import HarvestShelf
from mesh.shard.server import ShardServer
from mesh.shard.service import ShardService
from mesh.shard.settings import ShardSettings
from mesh.shard.taps.server import TapServer, TapSettings
from mesh.shard.threads import kept_threads
from mesh.supervise import Channel, ChannelMessage, attach_to_parent
from mesh.types import Endpoint, LayerRange, ModelId, NodeId, ShardDescriptor, ShardId, shard_id
from mesh.wire.connection import WebSocketLink
from mesh.wire.limits import DEFAULT_LIMITS
from mesh.wire.link import LinkHandler
from mesh.wire.messages import Drain, Hello
from mesh.wire.websocket import LinkServer, serve

logger = logging.getLogger(__name__)

_HEALTH_INTERVAL_S = 1.0
_MEMBERS_RETRY_S = 1.0
_CHANGES_TOGETHER_S = 0.05
_MAX_COMMANDS = 64


class ShardProcess:
    """The shards of this process. Runs until it is told to stop."""

    def __init__(self) -> None:
        self._commands: asyncio.Queue[ChannelMessage] = asyncio.Queue(_MAX_COMMANDS)
        self._channel: Channel | None = None
        self._service = ShardService()
        self._changed = asyncio.Event()
        self._place: HostedOn | None = None
        self._cache_dir: str | None = None
        self._queue: DeviceQueue | None = None
        self._listener: LinkServer | None = None
        self._tls: TlsContexts | None = None
        self._members: list[bytes] | None = None
        self._revoked: frozenset[str] = frozenset()
        self._members_changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._grace_s = 0.0

    def receive(self, command: ChannelMessage) -> None:
        """One map from the daemon; more than a few unanswered ones are refused.

        Who may come in, which tokens hold, and that sessions have to leave, is not put behind a
        shard that takes its time to load.
        """
        match command.get("op"):
            case "tls":
                self._members = [bytes(der) for der in command["members"]]
                self._members_changed.set()
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
                background = [
                    group.create_task(self._report(), name="shard-health"),
                    group.create_task(self._follow_members(), name="shard-members"),
                ]
                obeying = group.create_task(self._obey_all(), name="shard-commands")
                await self._stopping.wait()
                obeying.cancel()  # a shard that is still loading is not served any more
                await self._drain(self._grace_s)
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
            self._say(_failed(command, error))

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
            answer = _failed(command, error)
        except (KeyError, TypeError, ValueError) as error:
            answer = _failed(command, BadRequest(f"Bad command: {error!r}.", fix="Fix its fields."))
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
        material = TlsMaterial.from_fields(command["tls"])
        self._tls = await asyncio.to_thread(TlsContexts, material)
        clock = SteadyClock(SystemClock().now())
        lease_s = float(command.get("session_lease_s") or ShardSettings().session_lease_s)
        self._service.permits = Permits(self._tls, clock)
        self._service.revoke(self._revoked)
        self._listener = await serve(
            Reach.of(command.get("interfaces", [host]), host) or host,
            port,
            accept=self._accept,
            hello=lambda: dated(leased(hello, lease_s), clock),
            limits=replace(DEFAULT_LIMITS, accounts=self._service.accounts),
            ssl=self._tls.server,
        )
        self._members_changed.set()
        self._queue = DeviceQueue(threads.value)
        self._service.shelf = _shelf(command, NodeId(hello.node_id))
        self._cache_dir = command.get("cache_dir")
        self._place = HostedOn(
            NodeId(hello.node_id),
            hello.node_name,
            Endpoint(_endpoint(host, self._listener.port)),
            device.value,
            threads.value,
        )
        return {
            "op": "listening",
            "port": self._listener.port,
            "device": str(device.value),
            "reasons": [device.reason, threads.reason],
        }

    async def _follow_members(self) -> None:
        """Let in those whom the daemon last named, and cut the links to everybody else."""
        while True:
            await self._members_changed.wait()
            self._members_changed.clear()
            if self._tls is None or self._members is None:
                continue  # the listener starts with newer ones
            try:
                await asyncio.to_thread(self._tls.update, self._members)
            except OSError:
                # Whoever left is not trusted any more all the same, and frees what was lacking.
                logger.exception("members not followed; again in %g s", _MEMBERS_RETRY_S)
                loop = asyncio.get_running_loop()
                loop.call_later(_MEMBERS_RETRY_S, self._members_changed.set)
            for link in self._listener.links if self._listener is not None else ():
                if not self._tls.trusts(link.peer.node_id):
                    link.close("you are no longer trusted here")

    async def _load(self, command: ChannelMessage) -> ChannelMessage:
        place, queue = self._started()
        asked = command["shard"]
        if asked.get("advertise_host") and self._listener is not None:
            endpoint = Endpoint(_endpoint(str(asked["advertise_host"]), self._listener.port))
            place = HostedOn(place.node_id, place.node_name, endpoint, place.device, place.threads)
        request = _shard_request(asked, self._cache_dir)
        self._service.require_absent(shard_id(request.model_id, request.layers))
        # A model that cannot be loaded must not take those that can down with the process.
        loaded = await foreseen(queue.load(lambda: load_shard(request, place)), "loading a shard")
        server = ShardServer(
            loaded.descriptor,
            loaded.load,
            request.settings,
            hidden_size=loaded.hidden_size,
            queue=queue,
        )
        server.on_change(self._changed.set)
        await server.start()
        taps = TapSettings.of(asked, request.settings.kv_tokens)
        self._service.add(server, TapServer(server, loaded.load_plain, queue, taps))
        self._changed.set()
        return _loaded(loaded)

    async def _unload(self, command: ChannelMessage) -> ChannelMessage:
        name = ShardId(str(command["shard_id"]))
        await self._service.remove(name).evict()
        self._changed.set()
        return {"op": "unloaded", "shard_id": name}

    def _pause(self, paused: bool) -> None:
        """Have askers move their sessions away, or take that back."""
        self._tell_askers(Drain("the node goes to sleep" if paused else ""))
        self._say({"op": "paused", "paused": paused})

    def _tell_askers(self, notice: Drain) -> None:
        for link in self._listener.links if self._listener is not None else ():
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
            with contextlib.suppress(OSError):  # no descriptor is left to read it with
                rss_mb = psutil.Process().memory_info().rss / 2**20
            shards = [await _health(server, rss_mb) for server in self._service.servers]
            health = {"sessions": self._service.sessions(), "accounts": self._service.reports()}
            self._say({"op": "health", "shards": shards, **health})

    def _accept(self, link: WebSocketLink) -> LinkHandler:
        require_node(link.peer_certificate, link.peer.node_id)
        if self._tls is None or not self._tls.trusts(link.peer.node_id):
            raise UntrustedPeer(  # put out between its handshake and its hello
                "This node does not trust you with its shards.", fix="See `hearthnet members`."
            )
        if link.peer.purpose != "tensors":
            raise BadRequest(
                f"A shard takes tensor links, not {link.peer.purpose!r}.",
                fix="Connect to the daemon's control port.",
            )
        return self._service.handler(link)

    def _started(self) -> tuple[HostedOn, DeviceQueue]:
        if self._place is None or self._queue is None:
            raise BadRequest("The shard process has not started.", fix="Send start first.")
        return self._place, self._queue

    def _say(self, message: ChannelMessage) -> None:
        if self._channel is not None:
            self._channel.send(message)


def _shelf(command: ChannelMessage, own: NodeId) -> HarvestShelf | None:
    directory = command.get("harvest_dir")
    limit_bytes = int(command.get("harvest_mb") or 0) << 20
    return HarvestShelf(Path(directory), limit_bytes, own) if directory else None


def _shard_request(asked: dict[str, Any], cache_dir: str | None) -> ShardRequest:
    defaults = ShardSettings()
    settings = {
        name: type(getattr(defaults, name))(asked[name])
        for name in ShardSettings.__dataclass_fields__
        if asked.get(name) is not None
    }
    return ShardRequest(
        Path(asked["directory"]),
        ModelId(str(asked["model_id"])),
        LayerRange.parse(str(asked["layers"])),
        str(asked.get("dtype") or "auto"),
        ShardSettings(**settings),
        Path(cache_dir) if cache_dir else None,
    )


def _loaded(shard: LoadedShard) -> ChannelMessage:
    return {
        "op": "loaded",
        "descriptor": descriptor_fields(shard.descriptor),
        "bytes_read": shard.bytes_read,
        "load_ms": shard.load_ms,
        "reasons": list(shard.reasons),
    }


def descriptor_fields(descriptor: ShardDescriptor) -> dict[str, Any]:
    """The descriptor as JSON-able fields: layers as ``lo-hi``, the time as ISO 8601."""
    return {
        **asdict(descriptor),
        "layer_range": str(descriptor.layer_range),
        "advertised_at": descriptor.advertised_at.isoformat(),
    }


async def _health(server: ShardServer, rss_mb: float) -> dict[str, Any]:
    health = await server.health()
    return {
        "shard_id": health.shard_id,
        "online": health.online,
        "p50_latency_ms": health.p50_latency_ms,
        "p95_latency_ms": health.p95_latency_ms,
        "queue_depth": health.queue_depth,
        "active_streams": health.active_streams,
        "rss_mb": rss_mb,
        **asdict(server.load_now()),
    }


async def _unknown(command: ChannelMessage) -> ChannelMessage:
    raise BadRequest(f"Unknown command {command.get('op')!r}.", fix="Update the daemon.")


def _failed(command: ChannelMessage, error: MeshError) -> ChannelMessage:
    return {"op": "failed", "shard": command.get("shard"), "error": error.to_dict()}


def _endpoint(host: str, port: int) -> str:
    return f"wss://[{host}]:{port}" if ":" in host else f"wss://{host}:{port}"


async def _main() -> None:
    process = ShardProcess()
    await process.run(await attach_to_parent(process.receive))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    gc.freeze()  # what was imported stays: loading need not search it for garbage
    asyncio.run(_main())
