"""A last hop that runs the head for an asker without one, and lies about what comes out of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from mesh.discovery.advertisement import Advertisement
from mesh.errors import NoRoute
from mesh.models.builtin import checkpoint_dir
from mesh.pipeline.checkpoint import load_asker
from mesh.pipeline.commands import AskerOptions, EngineSettings, Offer, RouteLimits
from mesh.pipeline.engine import Engine
from mesh.pipeline.model import AskerModel
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import (
    Done,
    Endpoint,
    GenerationRequest,
    ModelId,
    NodeId,
    RouteHop,
    SamplingParams,
)
from mesh.wire.messages import Message, Result, WireTensor
from mesh.wire.token_rows import Rows, top_from_wire, top_to_wire
from tests import secure
from tests.chaos.liar import Liar
from tests.fakes import no_judge
from tests.mesh_e2e.spread import hugging_face

MODEL = ModelId("builtin")
PROMPT = [40 + i for i in range(24)]
TOKENS = 40
HONEST_STEPS = 20

pytestmark = pytest.mark.asyncio(loop_scope="module")


class HeadLiar(Liar):
    """Twists the candidates of a hop from the 20th answer on, or each whole row."""

    def __init__(
        self, target: int, twist: Callable[[Rows], object] | None, factor: float = 1.0
    ) -> None:
        super().__init__(target, lambda honest: honest, after=HONEST_STEPS)
        self._twist, self._factor = twist, factor

    def twist(self, message: Message) -> Message:
        if not isinstance(message, Result):
            return message
        tensor = message.tensor
        if tensor.dtype == "fp32" and self._factor != 1.0:
            row = np.frombuffer(tensor.data, np.float32) * np.float32(self._factor)
            return replace(message, tensor=WireTensor("fp32", tensor.shape, row.tobytes()))
        self.results += 1
        if tensor.dtype == "int8" and self.results > self._after and self._twist is not None:
            rows = top_from_wire(tensor).copy()
            self._twist(rows)
            return replace(message, tensor=top_to_wire(rows))
        return message


def swapped(rows: Rows) -> None:
    """The second strongest as the strongest: as good a row as any other."""
    rows["ids"][:, [0, 1]] = rows["ids"][:, [1, 0]]


def unsorted(rows: Rows) -> None:
    rows["logits"] = rows["logits"][:, ::-1].copy()


def infinite(rows: Rows) -> None:
    rows["logits"][:, 0] = np.inf


def foreign(rows: Rows) -> None:
    rows["ids"][:, 3] = 1 << 20


def twice(rows: Rows) -> None:
    rows["ids"][:, 1] = rows["ids"][:, 0]


def unlikely(rows: Rows) -> None:
    """The candidates are more likely than certain."""
    rows["total"] -= 1.0


@dataclass
class House:
    """A shard process with both halves, and who asks it without the model's ends."""

    model: AskerModel
    host: ShardSupervisor
    expected: list[int]

    @asynccontextmanager
    async def asking(self, liar: Liar, **settings: Any) -> AsyncIterator[Engine]:
        """Over a host for the first half, and for the second the liar, who is nearer than two
        honest ones."""
        engine = Engine(
            self.model, NodeId("asker"),
            EngineSettings(RouteLimits(16, False), 30.0, "fp32", "", False, 99, **settings),
            _no_home, no_judge, secure.dial,
        )  # fmt: skip
        first, second = sorted(self.host.shards.values(), key=lambda s: s.descriptor.layers)
        places = [("attic", first, 1.0), ("barn", second, 1.5), ("cellar", second, 1.5)]
        offers = []
        for name, hosted, weight in [*places, ("liar", second, 1.0)]:
            said = replace(hosted.descriptor, host=NodeId(name), node_name=name)
            if name == "liar":
                said = replace(said, endpoint=Endpoint(f"wss://127.0.0.1:{liar.port}"))
            offers.append(Offer(Advertisement(said, hosted.health), hop_weight=weight))
        engine.shards.replace(offers)
        try:
            yield engine
        finally:
            await engine.close()


async def _no_home() -> list[RouteHop]:
    raise NoRoute("there is no home.", fix="None.")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    cache, directory = tmp_path_factory.mktemp("heads"), checkpoint_dir()
    expected, _ = await asyncio.to_thread(hugging_face, directory, PROMPT, TOKENS)
    loads = [
        {"directory": str(directory), "model_id": MODEL, "layers": layers, "dtype": "fp32",
         "advertise_host": "127.0.0.1"}
        for layers in ("0-3", "4-7")
    ]  # fmt: skip
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(secure.hosting(cache, *loads))
        options = AskerOptions("fp32", "cpu", 1, cache, thin="always")
        model, _ = await asyncio.to_thread(load_asker, directory, MODEL, options)
        yield House(model, host, expected)


async def answer(engine: Engine, **sampling: Any) -> Done:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **sampling)
    request = GenerationRequest("r", MODEL, prompt_ids=tuple(PROMPT), sampling=params, draft=False)
    async for frame in engine.chat(request):
        if isinstance(frame, Done):
            return frame
    raise AssertionError("the stream did not end")


def target(house: House) -> int:
    second = max(house.host.shards.values(), key=lambda s: s.descriptor.layers)
    return int(second.descriptor.endpoint.rpartition(":")[2])


@pytest.mark.parametrize("lie", [unsorted, infinite, foreign, twice, unlikely])
async def test_impossible_candidates_are_used_by_nobody(
    lie: Callable[[Rows], object], house: House
) -> None:
    async with HeadLiar(target(house), lie) as liar, house.asking(liar) as engine:
        done = await answer(engine)
        assert (list(done.token_ids), done.failovers) == (house.expected, 1)
        (event,) = engine.oversight.take_events()
        assert (event["type"], event["node"]) == ("shard_corrupt", "liar")


async def test_a_spot_check_catches_the_second_strongest_token_said_to_be_the_strongest(
    house: House,
) -> None:
    async with (
        HeadLiar(target(house), swapped) as liar,
        house.asking(liar, spot_check_probability=1.0) as engine,
    ):
        lied = await answer(engine)
        assert lied.token_ids[: HONEST_STEPS // 2] == tuple(house.expected[: HONEST_STEPS // 2])
        await engine.spot_checks.settled()
        (event,) = engine.oversight.take_events()
        assert (event["type"], event["node"]) == ("shard_lied", "liar")
        assert list((await answer(engine)).token_ids) == house.expected


async def test_honest_heads_are_never_accused(house: House) -> None:
    async with (
        HeadLiar(target(house), None) as proxy,
        house.asking(proxy, spot_check_probability=1.0) as engine,
    ):
        for sampling in ({}, {"temperature": 2.5, "seed": 3}):
            assert (await answer(engine, **sampling)).failovers == 0
            await engine.spot_checks.settled()
        assert engine.oversight.take_events() == []
        # Nobody else holds the first half.
        rows = [row for row in engine.oversight.rows() if row["host"] != "attic"]
        checks = [row["checks"] for row in rows]
        assert sum(count.get("agreed", 0) for count in checks) > 10
        assert all(set(count) == {"agreed"} for count in checks if count)


async def test_a_row_that_contradicts_its_own_candidates_is_used_by_nobody(house: House) -> None:
    """So hot that tokens beyond the candidates are drawn."""
    sampling = {"temperature": 2.5, "seed": 3}
    async with HeadLiar(target(house), None) as proxy, house.asking(proxy) as engine:
        expected = await answer(engine, **sampling)
    async with HeadLiar(target(house), None, factor=1.01) as liar, house.asking(liar) as engine:
        done = await answer(engine, **sampling)
        assert (done.token_ids, done.failovers) == (expected.token_ids, 1)
        (event,) = engine.oversight.take_events()
        assert (event["type"], event["node"]) == ("shard_corrupt", "liar")
