"""Nodes and links of a simulated mesh: the real wire protocol, slow links, hosts that die.

A hop is the toy shard of `tests.pipeline.toy_mesh` behind a queue: its layers' arithmetic shows
every lost, repeated or swapped position in the tokens. What it must never see goes to the ledger.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

from mesh.errors import Busy, ConnectFailed, DeviceFailed, LinkLost, MeshError, SessionGone
from mesh.types import Endpoint, LayerRange, NodeId, ShardDescriptor, shard_id
from mesh.wire.limits import DEFAULT_LIMITS, Limits
from mesh.wire.link import Link, LinkHandler
from mesh.wire.messages import (
    Close,
    Drain,
    Failure,
    Hello,
    Message,
    Open,
    Opened,
    Park,
    Result,
    Resume,
    Step,
)
from tests.pipeline.toy_mesh import MODEL, PRIME, TOTAL_LAYERS, WEIGHTS, ToySession, decode, encode
from tests.simulation.ledger import Ledger
from tests.simulation.schedule import Lie, Node
from tests.wire.memory import MemoryLink

KEEPALIVE_S = 30.0
"""After so much silence a real link is closed by its own pings."""

CONNECT_TIMEOUT_S = 5.0
_ROW_S = 0.0001

HOME = Node("asker", LayerRange(0, TOTAL_LAYERS), streams=100, queue_depth=0, step_s=0.001)
"""The asker's own copy of the model, which nothing happens to."""

HOME_PORT = 999


class SlowLink(MemoryLink):
    """One end of a link whose frames are under way for a while, in order per direction."""

    def __init__(
        self, hello: Hello, delay: Callable[[], float], limits: Limits = DEFAULT_LIMITS
    ) -> None:
        super().__init__(hello, limits)
        self.silent = False
        self._delay = delay
        self._last_arrival = 0.0

    def deliver(self) -> None:
        self._pumping = False
        other, frame = self._other, self.session.next_frame()
        if other is None or frame is None:
            return
        arrival = max(self._last_arrival + 1e-6, self._loop.time() + self._delay())
        self._last_arrival = arrival
        self._loop.call_at(arrival, self._arrive, other, frame)
        self._pump()
        if not self._is_full:
            self._wake()

    def _arrive(self, other: MemoryLink, frame: bytes) -> None:
        if not self.silent:
            other.take(frame)


class Wire:
    """Both ends of one link."""

    def __init__(self, delay: Callable[[], float]) -> None:
        self.near = SlowLink(Hello("asker", "asker", "tensors", "sim"), delay)
        self.far = SlowLink(Hello("hop", "hop", "tensors", "sim"), delay)
        self.near.wire_to(self.far)
        self.far.wire_to(self.near)
        self._delay = delay

    def cut(self) -> None:
        """Both ends hear of it, each in its time."""
        lost = LinkLost("the connection broke.", fix="Use another hop.")
        loop = asyncio.get_running_loop()
        for end in (self.near, self.far):
            loop.call_later(self._delay(), end.lose, lost)

    def silence(self) -> None:
        """Nothing arrives any more, and nobody is told until the pings go unanswered."""
        self.near.silent = self.far.silent = True
        asyncio.get_running_loop().call_later(KEEPALIVE_S, self.cut)


class SimSession(ToySession):
    """A toy session that knows which request it belongs to and what it may be sent next."""

    def __init__(self, opened: Open) -> None:
        super().__init__(LayerRange(opened.start, opened.stop))
        self.request = opened.max_tokens
        self.last_step = 0
        self.may_cut = False
        self.refused = False


class SimHost:
    """One node: a shard, its links, and whether it lives, sleeps or hurries."""

    def __init__(self, node: Node, port: int, ledger: Ledger) -> None:
        self.node = node
        self.ledger = ledger
        self.descriptor = ShardDescriptor(
            shard_id(MODEL, node.layers), MODEL, WEIGHTS, node.layers, TOTAL_LAYERS, 1,
            node.streams, NodeId(node.name), node.name, Endpoint(f"wss://sim:{port}"), "fp32",
            "toy", datetime(2000, 1, 1, tzinfo=UTC),
        )  # fmt: skip
        self.alive = True
        self.reachable = True
        self.frozen = False
        self.refusing = False
        self.draining = False
        self.step_s = node.step_s
        self.sessions: dict[tuple[int, int], SimSession] = {}
        self.wires: list[Wire] = []
        self.on_message: Callable[[str], None] = lambda kind: None
        self.lie: Lie | None = None
        self.has_lied = False
        self._results = 0
        self._life = 0
        self._inbox: list[Callable[[], None]] = []
        self._busy_until = 0.0

    # What befalls it

    def die(self, *, noticed: bool) -> None:
        """Everything it held is gone; its peers hear of it only if `noticed`."""
        self._life += 1
        self.alive, self.reachable, self.frozen = False, noticed, False
        self.sessions.clear()
        self._inbox.clear()
        for wire in self.wires:
            if noticed:
                wire.cut()
            else:
                wire.silence()
        if noticed:
            self.wires.clear()

    def restart(self) -> None:
        """Back with nothing in memory; what the old one's peers still send is answered by RST."""
        if not self.alive:
            self.alive = self.reachable = True
            self.draining = False
            self._busy_until = 0.0
            self.cut_links()

    def cut_links(self) -> None:
        wires, self.wires = self.wires, []
        for wire in wires:
            wire.cut()

    def silence_links(self) -> None:
        for wire in self.wires:
            wire.silence()

    def freeze(self) -> None:
        self.frozen = self.alive

    def thaw(self) -> None:
        """Go on where it was: what came meanwhile is answered now, however late."""
        self.frozen = False
        waiting, self._inbox = self._inbox, []
        for act in waiting:
            self._when_awake(act)

    def forget(self) -> None:
        """Drop every session; their next step is answered with session_gone."""
        self.sessions.clear()

    def drain(self) -> None:
        """Ask every peer to move its sessions elsewhere, and let nobody new in."""
        self.draining = True
        for wire in self.wires:
            if not wire.far.is_closed:
                wire.far.send(Drain("maintenance"))

    # What it does

    def say(self, computed: list[list[int]]) -> list[list[int]]:
        """What it answers."""
        self._results += 1
        if self.lie is None or not self.lie.covers(self._results):
            return computed
        self.has_lied = True
        self.ledger.note(f"lie {self.node.name}")
        return [[(value + 1) % PRIME for value in row] for row in computed]

    def active(self) -> int:
        """Streams in use."""
        return sum(not session.parked for session in self.sessions.values())

    def receive(self, act: Callable[[], None]) -> None:
        """Something arrived on a link."""
        if self.alive:
            self._when_awake(act)

    def compute(self, rows: int, act: Callable[[], None]) -> None:
        """Do `act` when the device has worked through what came before and through `rows`."""
        loop = asyncio.get_running_loop()
        start = max(loop.time(), self._busy_until)
        self._busy_until = start + self.step_s + rows * _ROW_S
        loop.call_at(self._busy_until, self._in_life, self._life, act)

    def _in_life(self, life: int, act: Callable[[], None]) -> None:
        if life == self._life:
            self._when_awake(act)

    def _when_awake(self, act: Callable[[], None]) -> None:
        if self.frozen:
            self._inbox.append(act)
        else:
            act()


class Door:
    """One link into a host."""

    def __init__(self, host: SimHost, link: MemoryLink, number: int) -> None:
        self._host = host
        self._link = link
        self._number = number

    def message(self, message: Message) -> None:
        self._host.receive(partial(self._handle, message))

    def closed(self, error: MeshError | None) -> None:
        self._host.receive(self._forget_all)

    def _forget_all(self) -> None:
        for key in [key for key in self._host.sessions if key[0] == self._number]:
            del self._host.sessions[key]

    def _handle(self, message: Message) -> None:
        host, kind = self._host, type(message).__name__.lower()
        key = (self._number, getattr(message, "session", 0))
        host.ledger.note(f"{host.node.name} {kind} {getattr(message, 'step', '')}")
        host.on_message(kind)
        if not host.alive:
            return
        session = host.sessions.get(key)
        match message:
            case Open():
                self._open(key, message)
            case Resume():
                self._resume(session, message)
            case Step():
                self._step(key, session, message)
            case Park() if session is not None:
                session.parked = True
            case Close():
                host.sessions.pop(key, None)

    def _open(self, key: tuple[int, int], request: Open) -> None:
        host = self._host
        if key in host.sessions:
            host.ledger.broke(f"{host.node.name}: session {key[1]} was opened twice")
        if host.draining or host.active() >= host.node.streams:
            self._fail(Busy("full, or stopping.", fix="Elsewhere."), key[1])
            return
        host.sessions[key] = SimSession(request)
        self._say(Opened(request.session, request.max_tokens))

    def _resume(self, session: SimSession | None, request: Resume) -> None:
        if session is None:
            self._fail(SessionGone("gone.", fix="Replay."), request.session)
        elif self._host.active() >= self._host.node.streams:
            self._fail(Busy("full.", fix="Elsewhere."), request.session)
        else:
            session.parked, session.may_cut = False, True
            session.request = request.max_tokens
            self._say(Opened(request.session, request.max_tokens))

    def _step(self, key: tuple[int, int], session: SimSession | None, step: Step) -> None:
        if session is None:
            self._fail(SessionGone("gone.", fix="Replay."), step.session, step.step)
        elif self._host.refusing or session.refused:
            session.refused = True  # what was sent behind it has a hole before it now
            self._fail(DeviceFailed("out of memory.", fix="Elsewhere."), step.session, step.step)
        else:
            rows = step.tensor.shape[1]
            self._host.compute(rows, partial(self._run, key, session, step))

    def _run(self, key: tuple[int, int], session: SimSession, step: Step) -> None:
        host = self._host
        if host.sessions.get(key) is not session:
            return  # closed while the step waited
        held, name = len(session.sums), host.node.name
        if step.step != session.last_step + 1:
            host.ledger.broke(f"{name}: step {step.step} after step {session.last_step}")
        if step.position > held:
            host.ledger.broke(f"{name}: position {step.position}, but only {held} are held")
            return
        if step.position < held and not session.may_cut:
            host.ledger.broke(f"{name}: position {step.position} again, {held} are held")
        session.last_step, session.may_cut = step.step, False
        rows = decode(step.tensor)
        host.ledger.ran(session.request, session.layers, step.position, len(rows))
        out = encode(host.say(session.run(step.position, rows)))
        self._say(Result(step.session, step.step, out, compute_us=1, queue_us=0))

    def _fail(self, error: MeshError, session: int, step: int | None = None) -> None:
        self._say(Failure(error.to_dict(), session, step))

    def _say(self, message: Message) -> None:
        if not self._link.is_closed:
            self._link.send(message)


class World:
    """All hosts, and how to reach them."""

    def __init__(
        self, nodes: tuple[Node, ...], delay_s: tuple[float, float], seed: int, ledger: Ledger
    ) -> None:
        self.hosts = {node.name: SimHost(node, 1000 + i, ledger) for i, node in enumerate(nodes)}
        self.home = SimHost(HOME, HOME_PORT, ledger)
        self._by_port = {HOME_PORT: self.home} | {
            1000 + i: self.hosts[node.name] for i, node in enumerate(nodes)
        }
        self._rng = random.Random(seed + 1)
        self._delay_s = delay_s
        self._links = 0

    async def dial(self, host: str, port: int, handler: LinkHandler) -> Link:
        """As `mesh.wire.websocket.connect`: two hellos, or ConnectFailed."""
        node = self._by_port[port]
        await asyncio.sleep(3 * self._delay())
        waited = 0.0
        while node.frozen or not node.reachable:
            if waited >= CONNECT_TIMEOUT_S:
                break
            await asyncio.sleep(0.5)
            waited += 0.5
        if not node.alive or node.frozen:
            raise ConnectFailed(f"{host}:{port} does not answer.", fix="Use another hop.")
        wire = Wire(self._delay)
        self._links += 1
        wire.near.attach(handler)
        wire.far.attach(Door(node, wire.far, self._links))
        node.wires.append(wire)
        return wire.near

    def _delay(self) -> float:
        return self._rng.uniform(*self._delay_s)
