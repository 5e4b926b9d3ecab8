"""What counting costs a decode step: the same over two links to one shard, one of them counted.

Real sockets, the built-in model, one thread; the links take turns step by step and who goes first
alternates, so that what else the machine does hits both. `alone` is the plain cost of the ledger's
operations.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import timeit
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import torch

from mesh.accounts import allowances
from mesh.accounts.ledger import Resource, ResourceLedger, of_peer
from mesh.clock import SystemClock
from mesh.models import builtin
from mesh.shard.commands import ShardRequest
from mesh.shard.load_plan import HostedOn, plan_shard
from mesh.shard.loading import LoadedShard, load_shard
from mesh.shard.scheduler import Scheduler
from mesh.shard.server import ShardServer
from mesh.shard.service import ShardService
from mesh.shard.settings import ShardSettings
from mesh.types import Endpoint, LayerRange, ModelId, NodeId
from mesh.wire.connection import WebSocketLink
from mesh.wire.limits import DEFAULT_LIMITS
from mesh.wire.messages import Hello
from mesh.wire.websocket import connect, serve
from tests.shard.asker import Asker

STEPS = 400
ROUNDS = 6
PROMPT_ROWS = 32
_MODEL = ModelId("builtin")
_HOST = NodeId("n" * 52)


def measure() -> dict[str, float]:
    """Microseconds per decode step, counted and not, and their ratio; of single operations."""
    return {**asyncio.run(_run()), **_alone()}


def _alone() -> dict[str, float]:
    ledger = ResourceLedger(SystemClock(), allowances.DAEMON)
    peer = of_peer("p" * 52)
    hold = ledger.hold(peer, Resource.BYTES_BUFFERED)

    def step() -> None:
        """What one step does on the serving side: looked at, held, answered, written."""
        hold.fits(8192)
        hold.charge(8192)
        hold.require(8192)
        hold.charge(-8192)
        hold.charge(8192)
        hold.charge(-8192)

    def hold_and_close() -> None:
        ledger.hold(peer, Resource.LINKS, 1).close()

    def spend() -> None:
        ledger.charge(peer, Resource.EVENT_BYTES_PER_MINUTE, 1)

    count = 50_000
    return {
        f"{work.__name__} us": min(timeit.repeat(work, number=count, repeat=5)) / count * 1e6
        for work in (step, hold_and_close, spend)
    }


async def _run() -> dict[str, float]:
    torch.set_num_threads(1)
    directory = Path(builtin.__file__).parent / "checkpoint"
    layers = LayerRange(0, json.loads((directory / "config.json").read_text())["num_hidden_layers"])
    place = HostedOn(_HOST, "bench", Endpoint("wss://127.0.0.1:1"), torch.device("cpu"), 1)
    loaded = load_shard(plan_shard(ShardRequest(directory, _MODEL, layers), place))
    queue = Scheduler()
    server = ShardServer(
        loaded.descriptor,
        loaded.load,
        ShardSettings(),
        shape=loaded.shape,
        scheduler=queue,
    )
    await server.start()
    service = ShardService()
    service.add(server)
    listener = await serve(
        "127.0.0.1", 0, accept=service.handler, hello=Hello(_HOST, "bench", "tensors", "bench"),
        limits=replace(DEFAULT_LIMITS, accounts=service.accounts),
    )  # fmt: skip
    steps: dict[str, Callable[[], Awaitable[float]]] = {}
    for name in ("counted", "not counted"):
        asker = Asker()
        link = await connect(
            "127.0.0.1", listener.port, hello=Hello(name, name, "tensors", "bench"), handler=asker
        )
        asker.use(link)
        if name == "not counted":
            _uncount(next(each for each in listener.links if each.peer.node_id == name))
        steps[name] = await _decoding(asker, loaded)
    ratios, times = [], {name: list[float]() for name in steps}
    for turn in range(ROUNDS):
        taken = {name: list[float]() for name in steps}
        for index in range(STEPS):
            for name in list(steps)[:: 1 if (index + turn) % 2 else -1]:
                taken[name].append(await steps[name]())
        middle = {name: statistics.median(values) for name, values in taken.items()}
        ratios.append(middle["counted"] / middle["not counted"])
        for name, value in middle.items():
            times[name].append(value)
    await listener.close()
    queue.close()
    found = {f"{name} us": statistics.median(values) * 1e6 for name, values in times.items()}
    return {**found, "ratio": statistics.median(ratios), "ratio lowest": min(ratios)}


def _uncount(link: WebSocketLink) -> None:
    session = link._session
    session._account = session._inbox.account = None


async def _decoding(asker: Asker, loaded: LoadedShard) -> Callable[[], Awaitable[float]]:
    shard = loaded.descriptor
    await asker.open(
        model_id=_MODEL, weights_sha256=shard.weights_sha256, start=shard.layers.start,
        stop=shard.layers.stop, max_tokens=1024,
    )  # fmt: skip
    await asker.step(0, 0, torch.randn(1, PROMPT_ROWS, loaded.shape.hidden_size))
    row = torch.randn(1, 1, loaded.shape.hidden_size)
    done = 0

    async def step() -> float:
        """At one position again and again: the cache stays as long as it is."""
        nonlocal done
        done += 1
        began = time.perf_counter()
        await asker.step(done, PROMPT_ROWS, row)
        return time.perf_counter() - began

    return step


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
