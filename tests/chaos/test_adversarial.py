"""Shards that lie or dawdle on purpose (the mesh specification's section 8.3).

The liar speaks the real protocol over a real socket in front of an honest shard. Whatever it says,
the answer is what one machine gives, and the liar is known for what it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh.errors import WeightsMismatch
from mesh.types import LayerRange, shard_id
from tests import secure
from tests.chaos import liar
from tests.chaos.conftest import Row
from tests.chaos.lab import MODEL, Lab, Told, ask
from tests.chaos.liar import Liar, Lie
from tests.chaos.proxy import Proxy
from tests.checkpoints import make_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

PROMPT = [11, 42, 97, 300, 12, 8, 77]
COUNT = 24
HONEST = {"a": "0-2", "c": "6-7", "y": "3-5"}
LIAR = "b"  # ranks before y, so that it is asked first

Reference = Callable[[list[int], int], list[int]]
Record = Callable[[Row], None]


async def teach(lab: Lab, shards: list[dict[str, Any]]) -> None:
    """Have it recorded what activations of this model look like; else the first answer does it."""
    async with lab.asker(shards) as teacher:
        await ask(teacher, [5, 6, 7], 2)


async def with_a_liar(lab: Lab, lie: Lie, *, after: int) -> tuple[Told, list[str], Liar]:
    """An answer over a route whose middle hop lies from its result `after` on."""
    async with lab.nodes(**HONEST) as proxies, Liar(lab.port, lie, after=after) as bad:
        shards = [lab.advertise(n, span, proxies[n].port) for n, span in HONEST.items()]
        await teach(lab, shards)
        shards.append(lab.advertise(LIAR, "3-5", bad.port))
        async with lab.asker(shards) as engine:
            told = await ask(engine, PROMPT, COUNT)
            events = [e["type"] for e in engine.oversight.take_events() if e["node"] == LIAR]
    assert await lab.streams_in_use() == 0
    return told, events, bad


@pytest.mark.parametrize("after", [0, 1, 9])
@pytest.mark.parametrize(
    "lie",
    [liar.nan, liar.infinity, liar.absurd_norm, liar.row_too_many, liar.narrower],
    ids=lambda lie: lie.__name__,
)
async def test_impossible_activations_are_caught_and_the_hop_is_replaced(
    lab: Lab, one_machine: Reference, record: Record, lie: Lie, after: int
) -> None:
    told, events, bad = await with_a_liar(lab, lie, after=after)
    same = told.tokens == one_machine(PROMPT, COUNT)
    verdict = "equal" if same else "DIFFERENT"
    record(Row("liars", lie.__name__, "middle", str(after), told.failovers, verdict))
    assert bad.lies == 1, "it was believed once"
    assert told.error is None, told.error
    assert same
    assert told.failovers == 1
    assert events == ["shard_corrupt"]


async def test_plausible_garbage_is_caught_by_a_spot_check(
    lab: Lab, one_machine: Reference, record: Record
) -> None:
    """Wrong until the check is in; then two honest hosts outvote the liar, who is left for good."""
    layers = {**HONEST, "z": "3-5"}
    async with lab.nodes(**layers) as proxies, Liar(lab.port, liar.plausible_garbage) as bad:
        shards = [lab.advertise(n, span, proxies[n].port) for n, span in layers.items()]
        await teach(lab, shards)
        shards.append(lab.advertise(LIAR, "3-5", bad.port))
        async with lab.asker(shards, spot_checks=1.0) as engine:
            told = await ask(engine, PROMPT, 300)
            events = engine.oversight.take_events()
            again = await ask(engine, PROMPT[::-1], COUNT)
    verdict = "equal after it" if again.tokens == one_machine(PROMPT[::-1], COUNT) else "DIFFERENT"
    record(Row("liars", "garbage", "middle", "0", told.failovers, verdict))
    lied = [event for event in events if event["type"] == "shard_lied"]
    assert [event["node"] for event in lied] == [LIAR]
    assert len(set(lied[0]["digests"].values())) == 2
    assert told.failovers >= 1, "it was left"
    assert again.tokens == one_machine(PROMPT[::-1], COUNT)
    assert LIAR not in again.route()


async def test_a_slowloris_shard_is_replaced(
    lab: Lab, one_machine: Reference, record: Record
) -> None:
    """One chunk a second, with the default limit of 30 s: noticed because it was quicker before."""
    layers = {**HONEST, LIAR: "3-5"}
    async with lab.nodes(**layers) as proxies:
        shards = [lab.advertise(n, span, proxies[n].port) for n, span in layers.items()]
        async with lab.asker(shards, stall_limit_s=30.0) as engine:
            await ask(engine, [5, 6, 7], 30)
            slow: Proxy = proxies[LIAR]
            loop = asyncio.get_running_loop()
            began = loop.time()
            told = await ask(engine, PROMPT, COUNT, at=4, act=lambda: setattr(slow, "chunk_s", 1.0))
            took_s = loop.time() - began
    same = told.tokens == one_machine(PROMPT, COUNT)
    verdict = "equal" if same else "DIFFERENT"
    record(Row("liars", "slowloris", "middle", "4", told.failovers, verdict))
    assert same
    assert told.failovers == 1
    assert took_s < 0.75 * COUNT, "to the end at one chunk a second takes longer"
    assert await lab.streams_in_use() == 0


async def test_shards_of_other_weights_only_are_a_weights_mismatch(lab: Lab) -> None:
    async with lab.nodes(a="0-7") as proxies:
        other = lab.advertise("a", "0-7", proxies["a"].port, weights_sha256="0" * 64)
        async with lab.asker([other]) as engine:
            told = await ask(engine, PROMPT, 3)
    assert isinstance(told.error, WeightsMismatch)
    assert "a (0-7" in told.error.message


async def test_a_shard_that_claims_our_weights_and_has_others_is_not_used(
    lab: Lab, one_machine: Reference, record: Record, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", layers=8)
    load = {"directory": str(other), "model_id": MODEL, "layers": "0-7", "dtype": "fp32"}
    async with secure.hosting(tmp_path, load) as host:
        theirs = host.shards[shard_id(MODEL, LayerRange(0, 8))].descriptor
        async with lab.nodes(**HONEST) as proxies:
            shards = [lab.advertise(n, span, proxies[n].port) for n, span in HONEST.items()]
            port = int(theirs.endpoint.rpartition(":")[2])
            shards.append(lab.advertise("b", "0-7", port))  # our hash, their weights
            async with lab.asker(shards) as engine:
                told = await ask(engine, PROMPT, COUNT)
    same = told.tokens == one_machine(PROMPT, COUNT)
    verdict = "equal" if same else "DIFFERENT"
    record(Row("liars", "other weights", "only", "open", told.failovers, verdict))
    assert same
    assert told.route() == ["a", "y", "c"]
