"""The honest members of a simulated hearth: real hearths, logs, gossip and shards on slow links."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import closing
from contextvars import copy_context
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mesh.accounts.ledger import Hold, Resource, ResourceLedger, of_peer
from mesh.discovery.advertisement import Advertisement
from mesh.errors import Busy, ConnectFailed, LinkLost, MeshError
from mesh.events import messages
from mesh.events.decision import decode
from mesh.hearth.hearth import Hearth
from mesh.hearth.record import HearthRecord
from mesh.identity.keys import NodeKey
from mesh.identity.roster import Roster
from mesh.pipeline.commands import EngineSettings, Offer, RouteLimits
from mesh.pipeline.engine import Engine
from mesh.pipeline.links import HopLink
from mesh.pipeline.model import AskerModel
from mesh.shard.settings import lease_of, leased
from mesh.types import NodeId, RouteHop, ShardHealth
from mesh.wire.frames import FrameType
from mesh.wire.limits import Limits
from mesh.wire.link import Link, LinkHandler
from mesh.wire.messages import Gossip, Hello, Message
from tests.fakes import no_judge
from tests.identity.deciding import party
from tests.pipeline.toy_mesh import HIDDEN, MODEL, PRIME, TOTAL_LAYERS, WEIGHTS, ToyEnds, ToyText
from tests.simulation.members import bounds
from tests.simulation.members.casting import HONEST, VILLAIN, Cast
from tests.simulation.members.machine import LoopTime
from tests.simulation.members.meter import BYTE_US, FRAME_US, NODE, Meter
from tests.simulation.members.shard import LEASE_S, descriptor, service
from tests.simulation.world import SlowLink

REDIAL_S = 1.0
RECORD_OVERHEAD = 128
"""Of a row beside its body: signature, digest, key."""

_SIZES = """
SELECT author, SUM(LENGTH(body) + 128) FROM events GROUP BY author
UNION ALL SELECT author, SUM(LENGTH(body) + 128) FROM orphans GROUP BY author
UNION ALL SELECT author, LENGTH(first_body) + LENGTH(second_body) FROM forks
"""
_MODEL = AskerModel(MODEL, WEIGHTS, TOTAL_LAYERS, HIDDEN, PRIME, 4096, ToyEnds(), ToyText())


@dataclass
class Stored:
    """What a file has of one author."""

    size_bytes: int = 0
    fact_bytes: int = 0
    decisions: int = 0


class HouseLink(SlowLink):
    """One end of a link; what arrives is its owner's work, and a turn of its loop.

    `deaf`: it takes nothing more off the wire, so that what is sent to it stays with the sender.
    """

    def __init__(
        self, owner: str, hello: Hello, limits: Limits, delay: Callable[[], float], meter: Meter
    ) -> None:
        super().__init__(hello, delay, limits)
        self.owner = owner
        self.deaf = False
        self.holds: list[Hold] = []
        self.unread: list[bytes] = []
        self._meter = meter
        self.context = copy_context()
        self.context.run(NODE.set, owner)

    def count(self, accounts: ResourceLedger, links: int) -> None:
        """As a server does with a link that opens. Raises Busy."""
        peer = of_peer(self.peer.node_id)
        self.holds.append(accounts.hold(peer, Resource.LINKS, links))
        self.holds.append(accounts.hold(peer, Resource.BYTES_BUFFERED))
        self.session.count_on(self.holds[-1])

    @property
    def held_bytes(self) -> int:
        """What is in memory for this link."""
        return 0 if self.is_closed else self.session.held_bytes + self.session.queued_bytes

    def send(self, message: Message) -> None:
        before = self.session.queued_bytes
        super().send(message)
        self._meter.charge("send", BYTE_US * max(0, self.session.queued_bytes - before))

    def emit(self, kind: FrameType, *parts: bytes) -> None:
        """Send a frame as no honest end would."""
        outbox = self.session._outbox
        outbox.in_flight += 1
        outbox._emit(kind, 0, *parts)
        self._pump()

    @property
    def is_crowded(self) -> bool:
        """Whether so much waits for the other end that it is not read meanwhile."""
        return self.session.ready_bytes > self.session.limits.unread_bytes

    def lose(self, error: MeshError | None) -> None:
        for hold in self.holds:
            hold.close()
        self.holds.clear()
        super().lose(error)

    def deliver(self) -> None:
        other = self._other
        if isinstance(other, HouseLink) and other.deaf:
            self._pumping = False
            return
        super().deliver()
        if isinstance(other, HouseLink) and not self.is_crowded:
            other.send_late(self)

    def _arrive(self, other: object, frame: bytes) -> None:
        assert isinstance(other, HouseLink)
        if self.silent or other.is_closed:
            return
        if other.is_crowded or self.unread:
            if not self.unread:
                self._loop.call_later(other.session.limits.silence_s, other.not_heard, self)
            self.unread.append(frame)
        else:
            other.context.run(other.arrived, frame)

    def send_late(self, other: HouseLink) -> None:
        """The other end reads again."""
        unread, self.unread = self.unread, []
        for frame in unread:
            other.context.run(other.arrived, frame)

    def not_heard(self, other: HouseLink) -> None:
        """As `WebSocketLink` with a peer that it could not read for so long."""
        if other.unread:
            self.lose(LinkLost("Nothing was heard.", fix="Connect again."))
            other.lose(None)

    def arrived(self, frame: bytes) -> None:
        self._meter.charge("frame", FRAME_US + BYTE_US * len(frame))
        self.take(frame)
        self._meter.turn()


class Node:
    """One honest member."""

    def __init__(self, name: str, hearth: Hearth, accounts: ResourceLedger) -> None:
        self.name = name
        self.hearth = hearth
        self.accounts = accounts
        self.links: dict[NodeId, HouseLink] = {}
        self.ends: list[HouseLink] = []
        """Every end of a link here that is open."""
        self.fell: Callable[[NodeId], None] = lambda peer: None
        self._background: set[asyncio.Task[None]] = set()
        hearth.on_roster.append(self._follow)

    @property
    def id(self) -> NodeId:
        return self.hearth.key.node_id

    @property
    def key(self) -> NodeKey:
        return self.hearth.key

    def memory_bytes(self) -> dict[str, int]:
        """What buffers and waiting rooms hold, by the names in `bounds.MEMORY_BYTES`."""
        self.ends = [end for end in self.ends if not end.is_closed]
        log = self.hearth.log
        links = {"control": 0, "tensors": 0}
        for end in self.ends:
            links[end.session.hello.purpose] += end.held_bytes
        return {
            "decisions that wait": log.docket.waiting_bytes,
            "events that wait": log.chains.pending.size_bytes,
            "control links": links["control"],
            "tensor links": links["tensors"],
        }

    def trusts(self, peer: NodeId) -> bool:
        return self.hearth.tls.trusts(peer)

    def up(self, peer: NodeId, link: HouseLink) -> None:
        """A control link is open: of several to one peer the newest counts."""
        before = self.links.get(peer)
        self.links[peer] = link
        self.ends.append(link)
        link.attach(_Door(self, peer, link))
        if before is not None:
            before.close("replaced")
        self.hearth.peer_up(peer)

    def down(self, peer: NodeId, link: HouseLink) -> None:
        if self.links.get(peer) is link:
            del self.links[peer]
            task = asyncio.ensure_future(self.hearth.peer_down(peer))
            self._background.add(task)
            task.add_done_callback(self._background.discard)
            self.fell(peer)

    def say(self, peer: NodeId, message: messages.LogMessage) -> None:
        link = self.links.get(peer)
        if link is None:
            raise LinkLost(f"There is no link to {peer}.", fix="It is dialled again.")
        link.send(Gossip(messages.to_dict(message)))

    def _follow(self, before: Roster, after: Roster) -> None:
        """As `Peering.follow_members`."""
        for peer, link in list(self.links.items()):
            if not self.trusts(peer):
                link.close("not a member of this hearth")
                self.down(peer, link)


class _Door:
    def __init__(self, node: Node, peer: NodeId, link: HouseLink) -> None:
        self._node, self._peer, self._link = node, peer, link

    def message(self, message: Message) -> None:
        if isinstance(message, Gossip) and self._node.links.get(self._peer) is self._link:
            self._node.hearth.receive(self._peer, message.body)

    def closed(self, error: MeshError | None) -> None:
        self._node.down(self._peer, self._link)


class House:
    """The honest nodes, their links to each other, and the shard that ann serves."""

    def __init__(
        self, cast: Cast, logs: Path, rng: random.Random, delay_s: tuple[float, float], meter: Meter
    ) -> None:
        self.cast = cast
        self.nodes: dict[str, Node] = {}
        self.parted: set[frozenset[str]] = set()
        """Pairs of honest nodes that cannot reach each other."""
        self.meter = meter
        self._logs = logs
        self._rng = rng
        self._delay_s = delay_s
        self._closing = False
        self._works: list[asyncio.Task[None]] = []
        self.service, self.server = service(party("ann").id, "ann")

    def delay(self) -> float:
        return self._rng.uniform(*self._delay_s)

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        for name in HONEST:
            context = copy_context()
            context.run(NODE.set, name)
            self.nodes[name] = await loop.create_task(self._open(name), context=context)
        for name in HONEST:
            for other in HONEST:
                if name < other:
                    self.connect(name, other)

    async def _open(self, name: str) -> Node:
        cast, key, logs = self.cast, party(name).key, self._logs / name
        cast.copy(logs)
        accounts = ResourceLedger(LoopTime(), bounds.DAEMON)
        record = HearthRecord(cast.hearth, "Home")
        hearth = await Hearth.open(key, record, logs, LoopTime(), lambda report: None, accounts)
        node = Node(name, hearth, accounts)
        hearth.start_gossip(node.say, random.Random(self._rng.random()))
        node.fell = lambda peer: self._fell(name, peer)
        return node

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Eve's: it goes on until the house closes."""
        context = copy_context()
        context.run(NODE.set, VILLAIN)
        self._works.append(asyncio.get_running_loop().create_task(work, context=context))

    async def close(self) -> None:
        self._closing = True
        for work in self._works:
            work.cancel()
        await asyncio.gather(*self._works, return_exceptions=True)
        for node in self.nodes.values():
            for link in list(node.links.values()):
                link.close("goodbye")
        for node in self.nodes.values():
            await node.hearth.close()

    def stored(self, name: str) -> dict[str, Stored]:
        """What a node's file has of each author."""
        found: dict[str, Stored] = defaultdict(Stored)
        file = self._logs / name / f"{self.cast.hearth}.db"
        with closing(sqlite3.connect(file)) as rows:
            for author, size in rows.execute(_SIZES):
                found[author].size_bytes += size
                found[author].fact_bytes += size
            for body, signature in rows.execute("SELECT body, signature FROM decisions"):
                author = decode(body, signature).author
                found[author].size_bytes += len(body) + RECORD_OVERHEAD
                found[author].decisions += 1
        return found

    # Links between daemons

    def connect(self, name: str, other: str) -> None:
        """A link between two honest nodes, if they can reach and trust each other."""
        one, two = self.nodes[name], self.nodes[other]
        if self._closing or frozenset((name, other)) in self.parted or two.id in one.links:
            return
        if not (one.trusts(two.id) and two.trusts(one.id)):
            asyncio.get_running_loop().call_later(REDIAL_S, self.connect, name, other)
            return
        near = self._end(name, one.id, "control", bounds.CONTROL_LINKS)
        far = self._end(other, two.id, "control", bounds.CONTROL_LINKS)
        near.wire_to(far)
        far.wire_to(near)
        near.count(one.accounts, 0)
        far.count(two.accounts, 1)
        for node, peer, end in ((one, two.id, near), (two, one.id, far)):
            end.context.copy().run(node.up, peer, end)

    def part(self, names: frozenset[str]) -> None:
        """Two honest nodes lose sight of each other."""
        self.parted.add(names)
        one, two = (self.nodes[name] for name in sorted(names))
        for node, peer in ((one, two), (two, one)):
            link = node.links.get(peer.id)
            if link is not None:
                link.cut()

    def join(self, names: frozenset[str]) -> None:
        """And find each other again."""
        self.parted.discard(names)
        self.connect(*sorted(names))

    def let_in(self, name: str, handler: LinkHandler, limits: Limits) -> HouseLink | None:
        """A control link from eve to a node; None when that one refuses it."""
        node, eve = self.nodes[name], party(VILLAIN).id
        if not node.trusts(eve):
            return None
        near = self._end(VILLAIN, eve, "control", limits)
        far = self._end(name, node.id, "control", bounds.CONTROL_LINKS)
        near.wire_to(far)
        far.wire_to(near)
        try:
            far.count(node.accounts, 1)
        except Busy:
            far.lose(None)
            return None
        near.attach(handler)
        far.context.copy().run(node.up, eve, far)
        return near

    def _fell(self, name: str, peer: NodeId) -> None:
        for other, node in self.nodes.items():
            if node.id == peer:
                asyncio.get_running_loop().call_later(
                    REDIAL_S, self.connect, *sorted((name, other))
                )

    def _end(self, owner: str, node: NodeId, purpose: str, limits: Limits) -> HouseLink:
        hello = Hello(node, owner, purpose, "sim")
        return HouseLink(owner, hello, limits, self.delay, self.meter)

    # Links to the shard

    def enter_shard(self, name: str, handler: LinkHandler, limits: Limits) -> HouseLink:
        """A tensor link to ann's shard. Raises Busy."""
        near = self._end(name, party(name).id, "tensors", limits)
        hello = leased(Hello(party("ann").id, "ann", "tensors", "sim"), LEASE_S)
        far = HouseLink("ann", hello, bounds.TENSOR_LINKS, self.delay, self.meter)
        near.wire_to(far)
        far.wire_to(near)
        try:
            far.count(self.service.accounts, 1)
        except Busy:
            far.lose(None)
            raise
        near.attach(handler)
        far.attach(self.service.handler(far))
        self.nodes["ann"].ends.append(far)
        return near

    def asker(self, name: str, seed: int) -> Engine:
        """The product's asker at a node, which knows of ann's shard."""

        async def dial(host: str, port: int, line: HopLink) -> Link:
            await asyncio.sleep(3 * self.delay())
            try:
                link = self.enter_shard(name, line, bounds.TENSOR_LINKS)
            except Busy as full:
                raise ConnectFailed(full.message, fix=full.fix) from full
            line.lease_s = lease_of(link.peer)
            return link

        async def nowhere() -> tuple[RouteHop, ...]:
            return ()

        settings = EngineSettings(
            RouteLimits(4, allow_self_as_first=False), stall_limit_s=10.0, activation_dtype="fp32",
            cache_dir="", fallback_to_local=False, fallback_after=2, spot_check_probability=0.0,
        )  # fmt: skip
        engine = Engine(_MODEL, party(name).id, settings, nowhere, no_judge, dial)
        engine.spot_checks.rng = random.Random(seed)
        shard = descriptor(party("ann").id, "ann")
        seen = datetime(2000, 1, 1, tzinfo=UTC)
        health = ShardHealth(True, seen, 0.0, 0.0, 0, 0)
        engine.shards.replace([Offer(Advertisement(shard, health))])
        return engine
