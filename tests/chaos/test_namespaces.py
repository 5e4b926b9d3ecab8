"""Shard processes behind real interfaces: cables that are pulled and put back, delay, loss."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from mesh.pipeline.commands import Offer
from mesh.types import Endpoint
from tests.chaos import bad_cable
from tests.chaos.conftest import Row
from tests.chaos.home import home
from tests.chaos.lab import Lab, ask
from tests.chaos.namespaces import Namespace, why_not
from tests.chaos.proxy import Proxy

COUNT = 40
PROMPT = [31, 7, 250, 99, 12]
HOMES = {1: ("0-3",), 2: ("4-7",), 3: ("0-3", "4-7")}

Reference = Callable[[list[int], int], list[int]]
Record = Callable[[Row], None]

reason = functools.cache(why_not)

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(400),
]


@dataclass(frozen=True, slots=True)
class Home:
    """A shard process and the namespace it lives in."""

    space: Namespace
    port: int


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def homes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[int, Home]]:
    """Three shard processes, each in a namespace of its own."""
    if reason():
        pytest.skip(reason())
    directory: Path = tmp_path_factory.mktemp("spaces")
    async with AsyncExitStack() as stack:
        homes = {}
        for number, layers in HOMES.items():
            space = stack.enter_context(Namespace(number))
            port = await stack.enter_async_context(home(space, directory, *layers))
            homes[number] = Home(space, port)
        yield homes


def shards_of(lab: Lab, homes: dict[int, Home]) -> list[Offer]:
    """What the asker is told of the three."""
    told = []
    for number, layers in HOMES.items():
        home = homes[number]
        for span in layers:
            endpoint = Endpoint(f"wss://{home.space.there}:{home.port}")
            told.append(lab.advertise(f"home-{number}", span, home.port, endpoint=endpoint))
    return told


async def test_a_pulled_cable_is_noticed_and_a_healed_one_is_used_again(
    lab: Lab, homes: dict[int, Home], one_machine: Reference, record: Record
) -> None:
    expected = one_machine(PROMPT, COUNT)
    async with lab.asker(shards_of(lab, homes), stall_limit_s=1.0) as engine:
        first = await ask(engine, PROMPT, COUNT, at=9, act=homes[2].space.unplug)
        try:
            assert first.error is None, first.error
            assert first.tokens == expected
            assert first.failovers == 1
            assert first.route() == ["home-1", "home-3"]
        finally:
            homes[2].space.plug()
        record(Row("namespaces", "cable out", "last", "9", first.failovers, "equal"))
        # Now the stand-in goes: who was lost before has to be good enough again.
        second = await ask(engine, PROMPT[::-1], COUNT, at=9, act=homes[3].space.unplug)
        try:
            assert second.error is None, second.error
            assert second.tokens == one_machine(PROMPT[::-1], COUNT)
            assert second.route() == ["home-1", "home-2"]
        finally:
            homes[3].space.plug()
        record(Row("namespaces", "healed", "last", "9", second.failovers, "equal"))


async def test_three_milliseconds_each_way_change_nothing_but_the_time(
    lab: Lab, homes: dict[int, Home], one_machine: Reference, record: Record
) -> None:
    async with AsyncExitStack() as stack:
        shards = []
        for number, span in ((1, "0-3"), (2, "4-7")):
            home = homes[number]
            proxy = Proxy(home.port, host=home.space.there)
            proxy.delay_s = 0.003
            await stack.enter_async_context(proxy)
            shards.append(lab.advertise(f"far-{number}", span, proxy.port))
        async with lab.asker(shards) as engine:
            loop = asyncio.get_running_loop()
            began = loop.time()
            told = await ask(engine, PROMPT, COUNT)
            took_s = loop.time() - began
    assert told.tokens == one_machine(PROMPT, COUNT)
    assert told.failovers == 0
    assert took_s >= COUNT * 2 * 2 * 0.003, "each token waits for four one-way trips"
    record(Row("namespaces", "3 ms delay", "all", "all", 0, "equal"))


async def test_one_percent_loss_changes_nothing_but_the_time(
    lab: Lab, homes: dict[int, Home], one_machine: Reference, record: Record
) -> None:
    if reason := bad_cable.why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        cables = [
            stack.enter_context(bad_cable.lossy(homes[n].space, loss=0.01, delay_s=0.003, seed=n))
            for n in (1, 2)
        ]
        async with lab.asker(shards_of(lab, homes), stall_limit_s=30.0) as engine:
            asked = [await ask(engine, [*PROMPT, n], COUNT) for n in range(5)]
    for number, told in enumerate(asked):
        assert told.tokens == one_machine([*PROMPT, number], COUNT)
        assert told.failovers == 0
    assert all(cable.lost > 0 for cable in cables)
    record(Row("namespaces", "1 % loss", "all", "all", 0, "equal"))
