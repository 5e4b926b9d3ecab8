"""Getting into a hearth and keeping step with it: three whole nodes, real links, mutual TLS.

Pairing is counted from the code to the answer that the node is in, both sides in this process, the
password's stretching and the disk included. Gossip is counted from the first of many events that
one node signs to the last of them on the disks of the other two.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

from mesh.accounts import allowances
from mesh.accounts.ledger import ResourceLedger
from mesh.clock import SystemClock
from mesh.config import Config
from mesh.discovery.directory import ShardStore
from mesh.discovery.interfaces import choose
from mesh.events.types import MODEL_PUBLISHED
from mesh.hearth.joining import JoiningNode, join_hearth
from mesh.hearth.network import Network
from mesh.hearth.network_settings import NetworkHooks, NetworkSettings
from mesh.hearth.publishing import Serving
from mesh.identity.keys import load_or_create
from mesh.identity.roster import TrustLevel
from mesh.paths import StatePaths

EVENTS = 1_000
PAIRINGS = 7
_CLOCK = SystemClock()


def _node(name: str, directory: Path, peers: list[str], happened: asyncio.Event) -> Network:
    """One node without processes; the other parts of a daemon do nothing here."""
    paths = StatePaths(directory / name).create()
    key = load_or_create(paths.identity_key)
    config = Config(
        state_dir=paths.root, name=name, port=0, peer=tuple(peers), interface=("127.0.0.1",)
    )
    settings = NetworkSettings.of(config, key.node_id, "bench", "127.0.0.1")
    hooks = NetworkHooks(
        lambda: Serving(wanted=()), lambda event: happened.set(), lambda: None, lambda *_: None
    )
    store = ShardStore(_CLOCK, expiry_s=120.0)
    accounts = ResourceLedger(_CLOCK, allowances.DAEMON)
    return Network(key, paths, settings, store, _CLOCK, hooks, accounts)


async def _pair(first: Network, name: str, directory: Path) -> float:
    """Seconds that one more node took to get in."""
    paths = await asyncio.to_thread(StatePaths(directory / name).create)
    key = await asyncio.to_thread(load_or_create, paths.identity_key)
    window = await first.invite(TrustLevel.TRUSTED, 60.0)
    interfaces = (await asyncio.to_thread(choose, ["127.0.0.1"]))[0]
    joiner, place = JoiningNode(key, name, paths, _CLOCK), f"{window.host}:{window.port}"
    began = time.perf_counter()
    await join_hearth(joiner, window.invitation.code, place, interfaces)
    return time.perf_counter() - began


async def _converge(networks: list[Network]) -> dict[str, float]:
    hearths = [network.require_hearth() for network in networks]
    first, others = hearths[0], hearths[1:]
    changed = asyncio.Event()
    for hearth in others:
        hearth.log.on_change.append(lambda _: changed.set())
    began = time.perf_counter()
    for number in range(EVENTS):
        await first.publish(MODEL_PUBLISHED, {"model_id": str(number % 50)})
    appended = time.perf_counter() - began
    goal = first.end_of_facts(first.key.node_id)
    async with asyncio.timeout(120):
        while any(hearth.end_of_facts(first.key.node_id) != goal for hearth in others):
            changed.clear()
            await changed.wait()
    took = time.perf_counter() - began
    return {
        "appends_per_s": round(EVENTS / appended, 1),
        "converged_s": round(took, 3),
        "converged_after_last_s": round(took - appended, 3),
    }


async def _measure(directory: Path) -> dict[str, float]:
    async with AsyncExitStack() as stack:
        happened = asyncio.Event()
        first = await asyncio.to_thread(_node, "node-0", directory, [], happened)
        await first.start()
        stack.push_async_callback(first.stop)
        pairings = [await _pair(first, f"node-{n}", directory) for n in range(1, PAIRINGS + 1)]
        networks = [first]
        for name in ("node-1", "node-2"):
            places = [network.address or "" for network in networks]
            network = await asyncio.to_thread(_node, name, directory, places, happened)
            began = time.perf_counter()
            await network.start()
            stack.push_async_callback(network.stop)
            networks.append(network)
        while any(sum(p.state.value == "up" for p in n.peers()) < 2 for n in networks):
            happened.clear()
            await happened.wait()
        linked = time.perf_counter() - began
        results = await _converge(networks)
    return {
        "pairing_s": round(median(pairings), 3),
        "start_to_all_linked_s": round(linked, 3),
        **results,
    }


def measure() -> dict[str, float]:
    """Seconds and rates; see the names."""
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(_measure(Path(directory)))


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
