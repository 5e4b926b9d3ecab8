"""Connections that break, fall silent or dawdle under a running answer: the answer is the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from mesh.types import LayerRange
from tests.chaos.conftest import Row
from tests.chaos.lab import SPANS, Lab, ask
from tests.chaos.proxy import Proxy

pytestmark = pytest.mark.asyncio(loop_scope="session")

COUNT = 40
MOMENTS = ("prefill", 1, 7, 31, "last")
POSITIONS = ("first", "middle", "last")
FAULTS = ("cut", "silence", "slow loris", "byte by byte")
SHORT = (("cut", "first", "prefill"), ("silence", "middle", 7), ("slow loris", "last", 31))
GRID = [(f, p, m) for f in FAULTS for p in POSITIONS for m in MOMENTS if (f, p, m) not in SHORT]
ROUTE = {"a": "0-2", "b": "3-5", "c": "6-7"}
STAND_INS = {"x": "0-2", "y": "3-5", "z": "6-7"}

Reference = Callable[[list[int], int], list[int]]
Record = Callable[[Row], None]


def strike(fault: str, proxy: Proxy) -> None:
    match fault:
        case "cut":
            proxy.cut()
            proxy.refusing = True
        case "silence":
            proxy.silent = True
        case "slow loris":
            proxy.chunk_s = 1.0
        case "byte by byte":
            proxy.byte_s = 1.0


async def check(
    lab: Lab, one_machine: Reference, case: tuple[str, str, str | int], record: Record
) -> None:
    fault, position, moment = case
    rng = random.Random(str(case))
    prompt = [rng.randrange(5, 384) for _ in range(500 if moment == "prefill" else 20)]
    victim = list(ROUTE)[POSITIONS.index(position)]
    layers = {**ROUTE, **STAND_INS}
    at = {"prefill": 0, "last": COUNT - 1}.get(str(moment), moment)
    async with lab.nodes(**layers) as proxies:
        shards = [lab.advertise(n, span, proxies[n].port) for n, span in layers.items()]
        async with lab.asker(shards, stall_limit_s=0.75) as engine:
            warm = await ask(engine, [7, 8, 9], 12)
            assert warm.route() == list(ROUTE)
            began = asyncio.get_running_loop().time()
            told = await ask(
                engine, prompt, COUNT, at=int(at), after_s=rng.uniform(0.005, 0.05),
                act=lambda: strike(fault, proxies[victim]),
            )  # fmt: skip
            took_s = asyncio.get_running_loop().time() - began
            assert told.error is None, told.error
            same = told.tokens == one_machine(prompt, COUNT)
            verdict = "equal" if same else "DIFFERENT"
            record(Row("wires", fault, position, str(moment), told.failovers, verdict))
            assert same
            if at != 0 or told.failovers:  # a hop lost while it is opened is not a failover yet
                assert told.kinds == ["shard_status", "shard_failover", "done"], told.kinds
                assert told.failovers == 1
            for node, hop in told.hops().items():
                if node in ROUTE and at != 0:  # it kept its cache: no step was run twice
                    assert hop.steps == COUNT, (node, hop)
            # One chunk a second for the rest of the answer would have taken longer than this.
            assert took_s < 20, f"{took_s:.1f} s"
    assert await lab.streams_in_use() == 0


def name(case: tuple[str, str, str | int]) -> str:
    return "-".join(map(str, case)).replace(" ", "_")


@pytest.mark.slow
@pytest.mark.parametrize("case", SHORT, ids=name)
async def test_the_answer_survives(
    lab: Lab, one_machine: Reference, record: Record, case: tuple[str, str, str | int]
) -> None:
    await check(lab, one_machine, case, record)


@pytest.mark.chaos
@pytest.mark.parametrize("case", GRID, ids=name)
async def test_the_answer_survives_everything(
    lab: Lab, one_machine: Reference, record: Record, case: tuple[str, str, str | int]
) -> None:
    await check(lab, one_machine, case, record)


def draw_nodes(rng: random.Random) -> dict[str, str]:
    """Random nodes of which two covers can be made, so that any two may be lost one by one."""
    nodes: dict[str, str] = {}
    while min(sum(i in LayerRange.parse(s) for s in nodes.values()) for i in range(8)) < 3:
        nodes[f"n{rng.getrandbits(24):06x}"] = rng.choice(SPANS[:-1])
    return nodes


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(100))
async def test_any_topology_and_any_two_faults(
    lab: Lab, one_machine: Reference, record: Record, seed: int
) -> None:
    rng = random.Random(seed)
    nodes = draw_nodes(rng)
    prompts = [[rng.randrange(5, 384) for _ in range(rng.randint(1, 160))] for _ in range(3)]
    moments = [rng.randint(1, COUNT - 1) for _ in range(2)]
    faults = [rng.choice(FAULTS) for _ in range(2)]
    async with lab.nodes(**nodes) as proxies:
        shards = [lab.advertise(n, span, proxies[n].port) for n, span in nodes.items()]
        async with lab.asker(shards, stall_limit_s=0.75) as engine:

            def lose_one(fault: str) -> None:
                used = [h.node for g in engine.generations() for h in g.route]
                if used:
                    strike(fault, proxies[rng.choice(sorted(used))])

            told = await asyncio.gather(
                ask(engine, prompts[0], COUNT, at=moments[0], act=lambda: lose_one(faults[0])),
                ask(engine, prompts[1], COUNT, at=moments[1], act=lambda: lose_one(faults[1])),
                ask(engine, prompts[2], COUNT),
            )
            same = [t.tokens == one_machine(p, COUNT) for t, p in zip(told, prompts, strict=True)]
            failovers = sum(t.failovers for t in told)
            for fault, moment in zip(faults, moments, strict=True):
                verdict = "equal" if all(same) else "DIFFERENT"
                record(Row("wires, any", fault, "any", str(moment), failovers, verdict))
            assert all(same), [t.error or t.kinds for t in told]
    assert await lab.streams_in_use() == 0
