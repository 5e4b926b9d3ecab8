"""In-process daemons' discovery on loopback, and shards for them to advertise."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from mesh.accounts import allowances
from mesh.accounts.ledger import ResourceLedger
from mesh.capacity import Capacity
from mesh.clock import SystemClock
from mesh.discovery.advertisement import Advertisement
from mesh.discovery.dialing import DialSettings
from mesh.discovery.directory import Offering, ShardStore
from mesh.discovery.events import PeerEvent
from mesh.discovery.interfaces import InterfaceChoice, Reach, choose
from mesh.discovery.links import Said
from mesh.discovery.mdns import Mdns, MdnsSettings
from mesh.discovery.peering import Peering, PeeringSettings
from mesh.discovery.progress import NodeProgress
from mesh.errors import MeshError
from mesh.events.ephemera import Notice, seal_notice
from mesh.identity.certificates import make_certificate
from mesh.identity.keys import NodeKey, node_id
from mesh.identity.tls import TlsContexts, TlsMaterial
from mesh.types import (
    Endpoint,
    LayerRange,
    ModelId,
    NodeId,
    ShardDescriptor,
    ShardHealth,
    shard_id,
)
from mesh.wire.messages import Advertise, Message

PATIENCE_S = 20.0
MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
QUICK = DialSettings(first_s=0.05, most_s=0.3, refused_s=0.3, yield_s=0.1, timeout_s=2.0)
QUICK_MDNS = MdnsSettings(ttl_s=1, refresh_s=0.5, resolve_timeout_s=1.0, hear_self_s=5.0)


class FakeClock:
    """Time that moves when a test says so."""

    def __init__(self) -> None:
        self.time_s = 1000.0

    def monotonic(self) -> float:
        return self.time_s

    def now(self) -> datetime:
        return MOMENT + timedelta(seconds=self.time_s)


def new_id() -> NodeId:
    return node_id(secrets.token_bytes(32))


def advertised(
    host: NodeId,
    layers: str = "0-7",
    model: str = "tiny",
    weights: str = "a" * 64,
) -> Advertisement:
    """A shard of a 16-layer model."""
    span = LayerRange.parse(layers)
    identifier = shard_id(ModelId(model), span)
    return Advertisement(
        ShardDescriptor(
            shard_id=identifier,
            model_id=ModelId(model),
            weights_sha256=weights,
            layers=span,
            total_layers=16,
            vram_required_mb=12,
            max_concurrent_streams=4,
            host=host,
            node_name="kitchen",
            endpoint=Endpoint("wss://127.0.0.1:7701"),
            dtype="fp32",
            determinism_class="x86-fp32",
            advertised_at=MOMENT,
        ),
        ShardHealth(True, MOMENT, 1.5, 2.5, 0, 0),
    )


def loopback() -> list[InterfaceChoice]:
    return choose(["127.0.0.1"])[0]


class Village:
    """Everybody who is in a hearth, as its members trust each other; grows as tests go on."""

    def __init__(self) -> None:
        self._in: dict[str, dict[NodeId, TlsContexts]] = {}
        self._certificates: dict[str, dict[NodeId, bytes]] = {}

    async def enter(self, hearth: str, key: NodeKey) -> Trusting:
        """Make the key's node a member; all others trust it from now on."""
        certificates = self._certificates.setdefault(hearth, {})
        certificates[key.node_id] = make_certificate(key)
        material = TlsMaterial.of(key, certificates.values())
        own = await asyncio.to_thread(TlsContexts, material)
        others = self._in.setdefault(hearth, {})
        for contexts in others.values():
            await asyncio.to_thread(contexts.update, list(certificates.values()))
        others[key.node_id] = own
        return Trusting(own, key)


@dataclass(frozen=True)
class Trusting:
    """Trusts every member with everything, but for the `untrusted`."""

    tls: TlsContexts
    key: NodeKey
    untrusted: set[NodeId] = field(default_factory=set)
    accounts: ResourceLedger = field(
        default_factory=lambda: ResourceLedger(SystemClock(), allowances.LOG)
    )

    def may_serve(self, node: NodeId) -> bool:
        return self.tls.trusts(node) and node not in self.untrusted

    def sign(self, data: bytes) -> bytes:
        return self.key.sign(data)

    def verify(self, node: NodeId, data: bytes, signature: bytes) -> bool:
        public = KEYS.get(node)
        if public is None or not self.tls.trusts(node):
            return False
        try:
            Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
        except InvalidSignature:
            return False
        return True


VILLAGE = Village()


KEYS: dict[NodeId, bytes] = {}
"""The public keys of all nodes that `new_key` made."""

EPOCHS = itertools.count(1)
"""Each start of a node counts further."""


def new_key() -> NodeKey:
    key = NodeKey(Ed25519PrivateKey.generate())
    KEYS[key.node_id] = key.public_bytes
    return key


class Node:
    """One daemon's discovery: its peering, its directory and every event so far."""

    def __init__(
        self,
        settings: PeeringSettings,
        trust: Trusting,
        mdns: Mdns | None,
        on_message: Callable[[NodeId, Said], None] = lambda peer, message: None,
    ) -> None:
        self.id = settings.node_id
        self.trust = trust
        self.clock = SystemClock()
        self.store = ShardStore(self.clock, expiry_s=settings.shard_health_timeout_s * 4)
        self.serving: list[Advertisement] = []
        self.capacity: Capacity | None = None
        self.progress: NodeProgress | None = None
        self.events: list[PeerEvent] = []
        self._happened = asyncio.Event()
        self.mdns = mdns
        self.peering = Peering(
            settings,
            self.store,
            lambda: Offering(tuple(self.serving), capacity=self.capacity, progress=self.progress),
            self._record,
            trust=trust,
            on_message=on_message,
            mdns=mdns,
        )

    def _record(self, event: PeerEvent) -> None:
        self.events.append(event)
        self._happened.set()

    def serve(self, *shards: Advertisement) -> None:
        self.serving = list(shards)
        self.peering.advertise()

    def told(self, kind: str) -> list[PeerEvent]:
        return [event for event in self.events if event.type == kind]

    async def event(self, wanted: Callable[[PeerEvent], bool]) -> PeerEvent:
        """The first event that fits, waiting for it."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self._happened.clear()
                for event in self.events:
                    if wanted(event):
                        return event
                await self._happened.wait()

    async def until(self, condition: Callable[[ShardStore], bool]) -> None:
        """Wait for changes of the directory until the condition holds."""
        changes = self.store.subscribe()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition(self.store):
                    await changes.wait(PATIENCE_S)
        finally:
            changes.close()

    def online(self) -> set[NodeId]:
        return {view.info.node_id for view in self.store.nodes() if view.online}


@asynccontextmanager
async def running(
    hearth: str,
    *static_peers: str,
    key: NodeKey | None = None,
    mdns: Mdns | None = None,
    multicast: bool = True,
    port: int = 0,
    health_timeout_s: float = 30.0,
    answers_at: Reach | None = None,
    on_message: Callable[[NodeId, Said], None] = lambda peer, message: None,
) -> AsyncIterator[Node]:
    """A started node on 127.0.0.1, stopped with a goodbye at the end."""
    key = key or new_key()
    settings = PeeringSettings(
        node_id=key.node_id,
        name="kitchen",
        hearth=hearth,
        software="0.1",
        host="127.0.0.1",
        answers_at=answers_at,
        port=port,
        static_peers=static_peers,
        shard_health_timeout_s=health_timeout_s,
        epoch=next(EPOCHS),
        dial=QUICK,
    )
    if multicast and mdns is None:
        mdns = Mdns(loopback, settings=QUICK_MDNS)
    node = Node(settings, await VILLAGE.enter(hearth, key), mdns, on_message)
    try:
        await node.peering.start()
        yield node
    finally:
        await node.peering.stop()


def offline(shard: Advertisement) -> Advertisement:
    """The same shard, calling itself offline."""
    return replace(shard, health=replace(shard.health, online=False))


def signed(key: NodeKey, hearth: str, counter: int, shards: list[Any], **more: Any) -> Advertise:
    """What a node of this key would send; `more` replaces fields of the notice."""
    fields = {"epoch": 1, "ttl_ms": 120_000, "node": key.node_id, "key": "shards"}
    fields |= {"payload": {"shards": shards}, **more}
    notice = Notice(hearth_id=hearth, counter=counter, **fields)
    return Advertise(*seal_notice(notice, key.sign))


class Silent:
    """A link handler that does nothing."""

    def message(self, message: Message) -> None:
        """Ignored."""

    def closed(self, error: MeshError | None) -> None:
        """Ignored."""
