"""What the signed log costs: folding, starting with a long log, gossip between three nodes."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mesh.events import apply as applying
from mesh.events.docket import Docket
from mesh.events.gossip import GossipSettings, LogGossip
from mesh.events.messages import LogMessage, from_dict, to_dict
from mesh.events.state import State
from mesh.events.types import MODEL_PUBLISHED, Event
from mesh.identity.membership import HearthRules
from mesh.types import NodeId
from tests.events.support import (
    HEARTH,
    Author,
    Node,
    Record,
    facts,
    household,
    open_node,
    received,
    reference,
    signed,
)

LOG_EVENTS = 100_000
DECISIONS = 1_000
GOSSIP_EVENTS = 1_000
_AT_ONCE = 64


def _apply(events: list[Event]) -> dict[str, float]:
    """Events per second into the state: singly, as they are appended, and in gossip's portions."""
    membership = reference(household(4)[2]).membership
    rates = {}
    for name, size in (("apply_singly_per_s", 1), ("apply_in_portions_per_s", _AT_ONCE)):
        state = State(membership)
        began = time.perf_counter()
        for start in range(0, len(events), size):
            state = applying.apply(state, events[start : start + size])
        rates[name] = len(events) / (time.perf_counter() - began)
    return rates


async def _take_in(path: Path, events: Sequence[Record]) -> float:
    """Events per second from a peer's pages to the disk, with every signature checked."""
    node = await open_node(path, 8)
    began = time.perf_counter()
    for start in range(0, len(events), 512):
        await node.log.ingest(received(events[start : start + 512]), NodeId("peer"))
    took = time.perf_counter() - began
    await node.log.close()
    return len(events) / took


async def _start(path: Path, events: Sequence[Record]) -> dict[str, float]:
    """Seconds until a log of many events can be used, from its snapshot."""
    await _take_in(path, events)
    began = time.perf_counter()
    node = await open_node(path, 8)
    from_snapshot = time.perf_counter() - began
    assert sum(seq for _, seq, _ in node.log.chains.heads().values()) == LOG_EVENTS
    await node.log.close()
    return {"start_s": from_snapshot, "megabytes": path.stat().st_size / 1e6}  # noqa: ASYNC240


async def _appends(node: Node, count: int) -> float:
    began = time.perf_counter()
    for number in range(count):
        await node.log.append(MODEL_PUBLISHED, {"model_id": str(number % 50)})
    return count / (time.perf_counter() - began)


def _judge() -> dict[str, float]:
    """Milliseconds per decision at the door, and for the roster, after so many before."""
    house, _, events = household(1)
    events += [house.add(Author(1000 + number)) for number in range(DECISIONS)]
    docket = Docket(HEARTH, HearthRules(HEARTH))
    docket.begin()
    began = time.perf_counter()
    docket.take([signed(event) for event in events])
    taken = time.perf_counter() - began
    began = time.perf_counter()
    docket.commit(docket.derive())
    derived = time.perf_counter() - began
    return {"decision_ms": 1e3 * taken / DECISIONS, "roster_ms": 1e3 * derived}


async def _converge(directory: Path) -> dict[str, float]:
    """Seconds from the first append at one node to the last event at the other two."""
    *_, founding = household(3)
    nodes = [await open_node(directory / f"{number}.db", number) for number in range(3)]
    gossips: dict[NodeId, LogGossip] = {}

    def sender(own: NodeId) -> Any:
        def send(peer: NodeId, message: LogMessage) -> None:
            wire = to_dict(message)
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: gossips[peer].receive(own, from_dict(wire)))

        return send

    for node in nodes:
        await node.log.ingest(received(founding), NodeId("pairing"))
        own = node.author.id
        gossips[own] = LogGossip(node.log, sender(own), GossipSettings())
    for own, gossip in gossips.items():
        gossip.start()
        for peer in gossips.keys() - {own}:
            gossip.peer_up(peer)
    changed = asyncio.Event()
    for node in nodes:
        node.log.on_change.append(lambda _: changed.set())
    began = time.perf_counter()
    rate = await _appends(nodes[0], GOSSIP_EVENTS)
    appended = time.perf_counter() - began
    while len({str(node.log.chains.heads()) for node in nodes}) > 1:
        changed.clear()
        await changed.wait()
    took = time.perf_counter() - began
    for gossip in gossips.values():
        await gossip.stop()
    for node in nodes:
        await node.log.close()
    return {"appends_per_s": rate, "converged_s": took, "converged_after_last_s": took - appended}


async def _measure(directory: Path) -> dict[str, float]:
    _, authors, events = household(4)
    said = facts(authors, LOG_EVENTS, random.Random(1))
    results = _apply(said)
    results["take_in_per_s"] = await _take_in(directory / "part.db", [*events, *said[:5_000]])
    results |= await _start(directory / "log.db", [*events, *said])
    results |= _judge()
    return results | await _converge(directory)


def measure() -> dict[str, float]:
    """Rates and seconds; see the names."""
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(_measure(Path(directory)))


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
