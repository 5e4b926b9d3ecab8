"""A member that lies: what it says about the log and itself, over a real link to a real daemon."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
import pytest

from mesh.cli.local_node import LocalNode
from mesh.discovery.greeting import PeerHello, to_hello
from mesh.errors import MeshError
from mesh.events import decision
from mesh.events.decision import DecisionDraft, DecisionId
from mesh.events.docket import Signed
from mesh.events.intake import Received
from mesh.events.messages import Ask, Heads, Page, Probe, Probed, Pull, from_dict, to_dict
from mesh.events.types import GENESIS, Draft, Event, EventId, seal
from mesh.hearth.record import read_record
from mesh.identity.keys import NodeKey, load_or_create
from mesh.identity.tls import TlsContexts, TlsMaterial
from mesh.paths import StatePaths
from mesh.types import NodeId
from mesh.wire.link import Link
from mesh.wire.messages import Advertise, Gossip, Message
from mesh.wire.websocket import connect
from tests.mesh_e2e.conftest import StartNode
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EVENTS = 10_000
MEMORY_BYTES = 64 << 20
CPU_S = 5.0


class Lies:
    """Bad events and decisions without end: forged, foreign, replayed, malformed, void."""

    def __init__(self, key: NodeKey, hearth: str, victim: NodeId, stored: list[Signed]) -> None:
        self._key = key
        self._hearth = hearth
        self._victim = victim
        self._stored = stored
        self._rng = random.Random(5)
        self.sent = 0

    def __iter__(self) -> Iterator[Signed]:
        kinds: cycle[Callable[[], Signed]] = cycle(
            [self._forged, self._foreign, self._replayed, self._random, self._truncated]
        )
        for kind in kinds:
            self.sent += 1
            yield kind()

    def page(self, number: int, count: int) -> Page:
        lies = iter(self)
        events = tuple(next(lies) for _ in range(count))
        return Page.of(number, Received(events, decisions=self._decisions(count // 8)))

    def _decisions(self, count: int) -> tuple[Signed, ...]:
        """That nobody may take, who never was an anchor, after what nobody else has seen."""
        made = []
        for _ in range(count):
            author = self._rng.choice([self._key.node_id, self._victim])
            parent = DecisionId(self._rng.randbytes(32))
            payload = {"node_id": self._victim, "generation": 1, "seq": 1, "hash": bytes(32)}
            draft = DecisionDraft(
                self._hearth, author, self._rng.randrange(2, 99), 0, "member.revoked", payload,
                (parent,),
            )  # fmt: skip
            lie = decision.seal(draft, self._key.sign)
            made.append((lie.body, lie.signature))
        return tuple(made)

    def _event(self, hearth: str, author: NodeId) -> Event:
        prev = EventId(self._rng.randbytes(32)) if self._rng.random() < 0.5 else GENESIS
        seq = 1 if prev == GENESIS else self._rng.randrange(2, 50)
        payload = {"model_id": f"lie-{self.sent}"}
        draft = Draft(hearth, author, 1, seq, prev, seq, 0, "model.published", payload)
        return seal(draft, self._key.sign)

    def _forged(self) -> Signed:
        event = self._event(self._hearth, self._victim)
        return event.body, event.signature

    def _foreign(self) -> Signed:
        event = self._event("hh1elsewhere", self._key.node_id)
        return event.body, event.signature

    def _replayed(self) -> Signed:
        return self._rng.choice(self._stored)

    def _random(self) -> Signed:
        return self._rng.randbytes(self._rng.randrange(400)), self._rng.randbytes(64)

    def _truncated(self) -> Signed:
        body, signature = self._rng.choice(self._stored)
        return body[: self._rng.randrange(len(body))], signature


class Liar:
    """Answers whatever it is asked about the log with lies."""

    def __init__(self, lies: Lies, victim: NodeId) -> None:
        self.lies = lies
        self._victim = victim
        self.link: Link | None = None
        self.asked = asyncio.Event()
        self.ended: MeshError | None = None
        self.number = 0

    def message(self, message: Message) -> None:
        if not isinstance(message, Gossip) or self.link is None:
            return
        question = from_dict(message.body)
        self.number = question.number
        match question:
            case Ask(number):
                heads = {self._victim: (1, 10**6, bytes(8))}
                answer: Heads | Page | Probed = Heads(number, heads, tips=(DecisionId(bytes(32)),))
            case Pull(number):
                answer = self.lies.page(number, 256)
                self.asked.set()
            case Probe(number, author, _, seqs):
                answer = Probed(number, author, {seq: bytes(8) for seq in seqs})
            case _:
                return
        self.link.send(Gossip(to_dict(answer)))

    def closed(self, error: MeshError | None) -> None:
        self.ended = error


def stored(node: LocalNode) -> list[tuple[bytes, bytes]]:
    """All events and decisions of the daemon's log, as they lie on its disk."""
    (file,) = StatePaths(node.state_dir).events_dir.glob("*.db")
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
        query = (
            "SELECT body, signature FROM events UNION ALL "
            "SELECT body, signature FROM decisions ORDER BY body"
        )
        return connection.execute(query).fetchall()


def warnings(node: LocalNode) -> set[str]:
    return {warning["code"] for warning in node.get("/mesh/v1/status")["warnings"]}


def decided(node: LocalNode) -> dict[str, Any]:
    """Its hearth, but for who of it is seen just now."""
    view: dict[str, Any] = node.get("/mesh/v1/hearth")
    for member in view["members"]:
        del member["state"], member["last_seen"]
    return view


async def test_ten_thousand_bad_events_change_nothing(own_node: StartNode, tmp_path: Path) -> None:
    attic = await asyncio.to_thread(own_node, "attic", "--layers", "none")
    await asyncio.to_thread(attic.wait_up)
    liar = LocalNode("liar", tmp_path / "liar")
    await asyncio.to_thread(liar.join, attic)
    paths = StatePaths(liar.state_dir)
    key = await asyncio.to_thread(load_or_create, paths.identity_key)
    record = await asyncio.to_thread(read_record, paths.hearth)
    assert record is not None
    view = await asyncio.to_thread(decided, attic)
    victim = NodeId(view["self"])
    before = await asyncio.to_thread(stored, attic)

    certificates = [member.certificate for member in record.members]
    tls = await asyncio.to_thread(TlsContexts, TlsMaterial.of(key, certificates))
    me = PeerHello(key.node_id, "liar", "test", record.hearth_id, "run", 1, "127.0.0.1:9")
    handler = Liar(Lies(key, record.hearth_id, victim, before), victim)
    assert attic.process is not None
    daemon = psutil.Process(attic.process.pid)
    handler.link = link = await connect(
        "127.0.0.1", attic.record.port, hello=to_hello(me), handler=handler,
        ssl=tls.client(victim),
    )  # fmt: skip
    async with asyncio.timeout(60):
        await handler.asked.wait()
    await asyncio.to_thread(
        wait_until, lambda: "peer_muted" in warnings(attic), "it is not listened to any more"
    )
    rss, cpu = daemon.memory_info().rss, sum(daemon.cpu_times()[:2])
    while handler.lies.sent < EVENTS:
        link.send(Gossip(to_dict(handler.lies.page(handler.number, 256))))
        for number in range(50):
            link.send(Gossip({"kind": "nonsense", "number": number}))
        await link.drain(30)
    for number in range(200):
        link.send(Advertise(b"\x98" * 1000 + number.to_bytes(2, "big"), bytes(64)))
    await asyncio.to_thread(
        wait_until, lambda: "bad_advertisement" in warnings(attic), "all of it has arrived"
    )
    spent_s = sum(daemon.cpu_times()[:2]) - cpu
    print(f"{handler.lies.sent} bad events: {spent_s:.2f} s of the daemon's time")
    assert spent_s < CPU_S, "who lies is not listened to"

    assert handler.ended is None
    assert await asyncio.to_thread(stored, attic) == before
    assert await asyncio.to_thread(decided, attic) == view
    assert daemon.memory_info().rss - rss < MEMORY_BYTES
    said = await asyncio.to_thread(lambda: attic.log)
    assert len(said) < 100_000, "lies do not fill the disk with log lines"
    link.close()
    await asyncio.to_thread(wait_until, lambda: link.is_gone, "the connection is closed")
