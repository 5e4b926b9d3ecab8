"""Nodes that gossip over real queues, with real files: news travel fast, partitions heal."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from mesh.errors import LinkLost
from mesh.events.gossip import GossipSettings, LogGossip
from mesh.events.intake import Received
from mesh.events.messages import MAX_AUTHORS, Ask, Heads, LogMessage, Page, Pull, from_dict, to_dict
from mesh.events.types import MODEL_PUBLISHED, decode
from mesh.types import NodeId
from tests.events.support import (
    Author,
    Node,
    facts,
    found,
    household,
    let_in,
    meaning,
    open_node,
    received,
    signed,
)

SETTINGS = GossipSettings(interval_s=0.2, answer_timeout_s=0.5, settle_s=0.001, max_backoff_s=0.2)


class Network:
    """Carries messages between nodes as a link would: later, as maps, or not at all."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, tuple[Node, LogGossip]] = {}
        self.cut: set[frozenset[NodeId]] = set()
        self.sent: list[tuple[NodeId, NodeId, LogMessage]] = []

    def add(self, node: Node) -> LogGossip:
        own = node.author.id
        gossip = LogGossip(
            node.log, lambda peer, message: self._send(own, peer, message), SETTINGS,
            random.Random(1),
        )  # fmt: skip
        gossip.start()
        for name, (_, other) in self.nodes.items():
            gossip.peer_up(name)
            other.peer_up(own)
        self.nodes[own] = (node, gossip)
        return gossip

    def _send(self, source: NodeId, target: NodeId, message: LogMessage) -> None:
        if frozenset((source, target)) in self.cut:
            raise LinkLost("The cable is out.", fix="Put it in.")
        self.sent.append((source, target, message))
        wire = from_dict(to_dict(message))
        asyncio.get_running_loop().call_soon(self.nodes[target][1].receive, source, wire)


@asynccontextmanager
async def hearth(tmp_path: Path, count: int) -> AsyncIterator[tuple[Network, list[Node]]]:
    """Nodes of one hearth, everybody linked with everybody."""
    network = Network()
    nodes = []
    for number in range(count):
        nodes.append(await open_node(tmp_path / f"{number}.db", number))
        network.add(nodes[-1])
    await found(nodes[0])
    for node in nodes[1:]:
        await let_in(nodes[0], node.author)
    try:
        yield network, nodes
    finally:
        for _, gossip in network.nodes.values():
            await gossip.stop()
        for node in nodes:
            await node.log.close()


async def until(condition: Callable[[], bool], nodes: list[Node]) -> None:
    """Wait for a condition that only a change of some log can bring about."""
    changed = asyncio.Event()
    for node in nodes:
        node.log.on_change.append(lambda _: changed.set())
    async with asyncio.timeout(20):
        while not condition():
            changed.clear()
            await changed.wait()


def equal(nodes: list[Node]) -> bool:
    heads = [(node.log.chains.heads(), set(node.log.docket.tips)) for node in nodes]
    return all(head == heads[0] for head in heads)


async def test_news_reach_everybody(tmp_path: Path) -> None:
    async with hearth(tmp_path, 3) as (_, nodes):
        await until(lambda: equal(nodes), nodes)
        for node in nodes:
            await node.log.append(MODEL_PUBLISHED, {"model_id": node.author.id})
        await until(lambda: equal(nodes) and len(nodes[0].log.state.models()) == 3, nodes)
        assert meaning(nodes[0].log.state) == meaning(nodes[2].log.state)


async def test_facts_of_more_authors_than_one_message_names_reach_everybody(
    tmp_path: Path,
) -> None:
    _, authors, decisions = household(MAX_AUTHORS + 40)
    network = Network()
    nodes = [await open_node(tmp_path / f"{number}.db", number) for number in (8, 9)]
    full, fresh = (node.log for node in nodes)
    await full.ingest(received(decisions), NodeId("loader"))
    await full.ingest(received([author.publish("model") for author in authors]), NodeId("loader"))
    gossips = [network.add(node) for node in nodes]
    await until(lambda: equal(nodes) and len(fresh.chains.heads()) == len(authors), nodes)
    await full.ingest(received([authors[-1].publish("news")]), NodeId("loader"))
    await until(lambda: "news" in fresh.state.models(), nodes)
    for gossip in gossips:
        await gossip.stop()


async def test_both_sides_of_a_partition_go_on_and_heal(tmp_path: Path) -> None:
    async with hearth(tmp_path, 3) as (network, nodes):
        await until(lambda: equal(nodes), nodes)
        lonely = nodes[2].author.id
        network.cut = {frozenset((lonely, node.author.id)) for node in nodes[:2]}
        await nodes[0].log.append(MODEL_PUBLISHED, {"model_id": "here"})
        await nodes[2].log.append(MODEL_PUBLISHED, {"model_id": "there"})
        await until(lambda: equal(nodes[:2]) and "here" in nodes[1].log.state.models(), nodes)
        assert "here" not in nodes[2].log.state.models()
        network.cut = set()
        await until(lambda: equal(nodes) and len(nodes[1].log.state.models()) == 2, nodes)


async def test_one_question_at_a_time_and_pages_are_bounded(tmp_path: Path) -> None:
    _, authors, events = household(2)
    events += facts(authors, 1400, random.Random(1))
    network = Network()
    full, fresh = await open_node(tmp_path / "full.db", 8), await open_node(tmp_path / "new.db", 9)
    for start in range(0, len(events), 100):
        part = tuple(map(signed, events[start : start + 100]))
        await full.log.ingest(Received(part), NodeId("loader"))
    gossips = [network.add(full), network.add(fresh)]
    await until(lambda: equal([full, fresh]), [fresh])
    for gossip in gossips:
        await gossip.stop()
    asked = 0
    for source, _, message in network.sent:
        if message.number == 0:
            continue
        if source == fresh.author.id and isinstance(message, Ask | Pull):
            asked += 1
        elif source == full.author.id and isinstance(message, Heads | Page):
            asked -= 1
        assert asked <= 1
        if isinstance(message, Page):
            assert len(message.received.events) <= 512
            orders = [decode(*event).order for event in message.received.events]
            assert orders == sorted(orders)
            assert sum(len(body) + len(sig) for body, sig in message.received.events) <= 256 << 10


async def test_only_the_answer_to_the_open_question_is_heard(tmp_path: Path) -> None:
    node = await open_node(tmp_path / "events.db", 9)
    sent: asyncio.Queue[LogMessage] = asyncio.Queue()
    gossip = LogGossip(node.log, lambda _, message: sent.put_nowait(message), SETTINGS)
    peer, (founder,) = NodeId("peer"), household(1)[1]
    event = founder.publish("m")
    heads = {founder.id: (1, 1, event.id[:8])}
    gossip.peer_up(peer)
    ask = await sent.get()
    for wrong in (ask.number + 1, 10**6):
        gossip.receive(peer, Heads(wrong, heads))
        gossip.receive(NodeId("nobody"), Heads(ask.number, heads))
    gossip.receive(peer, Heads(ask.number))
    again = await sent.get()
    assert isinstance(again, Ask)
    gossip.receive(peer, Heads(again.number, heads))
    assert isinstance(await sent.get(), Pull)
    await gossip.stop()


async def test_a_flood_of_requests_is_answered_within_bounds(tmp_path: Path) -> None:
    async with hearth(tmp_path, 2) as (network, nodes):
        await until(lambda: equal(nodes), nodes)
        gossip = network.nodes[nodes[1].author.id][1]
        network.sent.clear()
        for _ in range(1000):
            gossip.receive(nodes[0].author.id, Ask(77))
        await nodes[0].log.append(MODEL_PUBLISHED, {"model_id": "m"})
        await until(lambda: "m" in nodes[1].log.state.models(), nodes)
        answers = [message for _, _, message in network.sent if message.number == 77]
        assert 1 <= len(answers) <= 8
        answers = [m for _, _, m in network.sent if isinstance(m, Heads) and m.number == 77]
        assert len(answers) <= 16


@pytest.mark.parametrize("dribbles", [False, True])
async def test_a_peer_that_announces_more_than_it_shows_ties_nobody_up(
    dribbles: bool, tmp_path: Path
) -> None:
    """What it shows is one old event of its own, or one new one a page."""
    node, eve = await open_node(tmp_path / "events.db"), Author(1)
    await found(node)
    await let_in(node, eve)
    old = eve.publish("m")
    await node.log.ingest(received([old]), eve.id)
    asked: list[tuple[float, LogMessage]] = []
    third = asyncio.Event()
    loop = asyncio.get_running_loop()
    claimed = dict.fromkeys((node.author.id, eve.id), (1, 10**6, b"12345678"))

    def send(peer: NodeId, message: LogMessage) -> None:
        asked.append((loop.time(), message))
        answer: LogMessage = Heads(message.number, claimed)
        if isinstance(message, Pull):
            answer = Page.of(message.number, received([eve.publish("m") if dribbles else old]))
        if message.number == 3:
            third.set()
        loop.call_soon(gossip.receive, peer, answer)
        loop.call_soon(gossip.receive, peer, Heads(0, claimed))

    gossip = LogGossip(node.log, send, replace(SETTINGS, max_turns=16))
    gossip.peer_up(eve.id)
    async with asyncio.timeout(20):
        await third.wait()
    await gossip.stop()
    for number in (1, 2):
        questions = [message for _, message in asked if message.number == number]
        assert len(questions) == (16 if dribbles else 2)
    pauses = [after - before for (before, _), (after, _) in pairwise(asked)]
    assert min(pauses) > 0.9 / 64, "however fast the answers come"
