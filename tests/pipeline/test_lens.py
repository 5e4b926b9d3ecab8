"""A logit lens over toy hops: each layer's own word, whatever happens on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from mesh.errors import BadRequest, ContextTooLong, NoRoute, ShardCorrupt
from mesh.pipeline.lens import MAX_BYTES
from mesh.routing.cover import key_of
from mesh.types import LayerRange
from mesh.wire.messages import Step, WireTensor
from tests.health.watched import watched
from tests.pipeline.toy_mesh import (
    HIDDEN,
    TOTAL_LAYERS,
    ToyEnds,
    ToyNetwork,
    ToySession,
    ToyShard,
    toy_request,
)

PROMPT = [5, 11, 23, 42, 8, 61]


def expected(prompt: list[int]) -> list[str]:
    """Each layer's likeliest token, computed without any mesh."""
    ends, said = ToyEnds(), []
    rows = [[int(v) for v in row] for row in ends.embed(torch.tensor([prompt]), 0)[0]]
    for layer in range(TOTAL_LAYERS):
        rows = ToySession(LayerRange(layer, layer + 1)).run(0, rows)
        said.append(str(int(ends.logits(torch.tensor([rows[-1:]]).float()).argmax())))
    return said


def said(found: dict[str, Any]) -> list[str]:
    assert [layer["layer"] for layer in found["layers"]] == [*range(TOTAL_LAYERS)]
    return [layer["top"][0]["token"] for layer in found["layers"]]


def nodes(found: dict[str, Any]) -> list[str]:
    return [layer["node"] for layer in found["layers"]]


@pytest.mark.parametrize("length", [6, 300])
async def test_each_layer_says_what_it_would_as_the_last_one(length: int) -> None:
    network = ToyNetwork()
    network.add("0-2", name="low")
    network.add("3-7", name="high")
    prompt = (PROMPT * length)[:length]
    with watched(network) as mesh:
        found = await mesh.engine.lens(toy_request(prompt, 1), 3)
        assert said(found) == expected(prompt)
        assert nodes(found) == ["low"] * 3 + ["high"] * 5
        assert found["prompt_tokens"] == length
        assert {len(layer["top"]) for layer in found["layers"]} == {3}
        await network.until_free()
        await mesh.engine.close()


async def test_a_shard_needs_one_stream_however_many_layers_it_has() -> None:
    network = ToyNetwork()
    network.add("0-7", streams=1)
    with watched(network) as mesh:
        assert said(await mesh.engine.lens(toy_request(PROMPT, 1), 1)) == expected(PROMPT)
        await mesh.engine.close()


def dies_in(shard: ToyShard, layer: int) -> None:
    def before(_step: Step) -> bool:
        if any(session.layers.start == layer for session in shard.sessions.values()):
            shard.kill()
            return False
        return True

    shard.before_step = before


async def test_a_lost_node_is_replaced_where_it_was() -> None:
    network = ToyNetwork()
    low, spare = network.add("0-7", name="a"), network.add("0-7", name="b")
    dies_in(low, 3)
    with watched(network) as mesh:
        found = await mesh.engine.lens(toy_request(PROMPT, 1), 1)
        assert said(found) == expected(PROMPT)
        assert nodes(found) == ["a"] * 3 + ["b"] * 5
        assert len(spare.steps) == 5, "what was computed is not computed again"
        await mesh.engine.close()


async def test_without_another_node_it_says_so() -> None:
    network = ToyNetwork()
    dies_in(network.add("0-7"), 2)
    with watched(network) as mesh:
        with pytest.raises(NoRoute):
            await mesh.engine.lens(toy_request(PROMPT, 1), 1)
        await mesh.engine.close()


async def test_a_silent_node_is_given_up() -> None:
    network = ToyNetwork()
    silent = network.add("0-7", name="a")
    network.add("0-7", name="b")
    silent.before_step = lambda step: False
    with watched(network, stall_limit_s=0.2) as mesh:
        async with asyncio.timeout(20):
            found = await mesh.engine.lens(toy_request(PROMPT, 1), 1)
        assert nodes(found) == ["b"] * TOTAL_LAYERS
        await mesh.engine.close()


async def test_who_answers_something_else_is_left_out() -> None:
    network = ToyNetwork()
    wrong = network.add("0-7", name="a")
    network.add("0-7", name="b")
    wrong.answer = lambda step, out: WireTensor("fp32", (1, 1, 1), b"\0\0\0\0")
    with watched(network) as mesh:
        found = await mesh.engine.lens(toy_request(PROMPT, 1), 1)
        assert (said(found), set(nodes(found))) == (expected(PROMPT), {"b"})
        await mesh.engine.close()


async def test_what_a_liar_had_a_part_in_is_not_shown() -> None:
    network = ToyNetwork()
    liar, honest = network.add("0-3", name="a"), network.add("4-7", name="b")
    with watched(network) as mesh:

        def found_out(_step: Step) -> bool:
            mesh.engine.oversight.reputations.lied(key_of(liar.descriptor), "a lie")
            return True

        honest.before_step = found_out
        with pytest.raises(ShardCorrupt):
            await mesh.engine.lens(toy_request(PROMPT, 1), 1)
        await mesh.engine.close()


async def test_a_text_too_long_or_empty_is_refused() -> None:
    network = ToyNetwork()
    network.add("0-7")
    most = MAX_BYTES // (4 * HIDDEN * TOTAL_LAYERS)
    with watched(network) as mesh:
        refusal = rf"{most + 1} tokens; a lens over .* takes {most}"
        with pytest.raises(ContextTooLong, match=refusal):
            await mesh.engine.lens(toy_request([1] * (most + 1), 1), 1)
        with pytest.raises(BadRequest, match="no tokens"):
            await mesh.engine.lens(toy_request([], 1), 1)
        assert not network.shards[1000].reserved
        await mesh.engine.close()


async def test_who_leaves_frees_the_hop() -> None:
    network = ToyNetwork()
    slow = network.add("0-7")
    began = asyncio.Event()
    slow.before_step = lambda step: bool(began.set())
    with watched(network) as mesh:
        reading = asyncio.create_task(mesh.engine.lens(toy_request(PROMPT, 1), 1))
        await began.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await network.until_free()
        await mesh.engine.close()


async def test_noise_that_chats_get_is_added_here_too() -> None:
    network = ToyNetwork()
    shard = network.add("0-7")
    seen: list[WireTensor] = []
    shard.before_step = lambda step: bool(seen.append(step.tensor))
    with watched(network, activation_noise=0.5, stall_limit_s=0.2) as mesh:
        with pytest.raises(NoRoute):
            await mesh.engine.lens(toy_request(PROMPT, 1), 1)
        await mesh.engine.close()
    values = memoryview(bytes(seen[0].data)).cast("f").tolist()
    assert any(value != int(value) for value in values)
