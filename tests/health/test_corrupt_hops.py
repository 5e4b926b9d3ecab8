"""A hop that answers what no honest one can: replaced at that very token, and it stays known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from mesh.errors import MAX_TOLD, BadSteering, InternalError, NoRoute
from mesh.pipeline.watch.reputation import EXCLUDED
from mesh.types import Done, ShardStatus
from mesh.wire.messages import Step, WireTensor
from tests.health.watched import (
    PROMPT,
    tokens_before_failover,
    tokens_of,
    values_of,
    watched,
    with_values,
)
from tests.pipeline.toy_mesh import ToyNetwork, ToySession, expected_tokens

COUNT = 12


def one_value(value: float) -> Callable[[WireTensor], WireTensor]:
    def spoil(tensor: WireTensor) -> WireTensor:
        values = values_of(tensor)
        values[-2] = value
        return with_values(tensor, values)

    return spoil


def one_row_more(tensor: WireTensor) -> WireTensor:
    rows, hidden = tensor.shape[1] + 1, tensor.shape[2]
    return WireTensor("fp32", (1, rows, hidden), bytes(tensor.data) + bytes(4 * hidden))


def narrower(tensor: WireTensor) -> WireTensor:
    rows, hidden = tensor.shape[1], tensor.shape[2]
    return WireTensor("fp16", (1, 2 * rows, hidden), bytes(tensor.data))


def other_rank(tensor: WireTensor) -> WireTensor:
    return WireTensor("fp32", tensor.shape[1:], tensor.data)


def whole_numbers(tensor: WireTensor) -> WireTensor:
    rows, hidden = tensor.shape[1], tensor.shape[2]
    return WireTensor("int8", (1, rows, hidden), bytes(rows * hidden))


def gradient(tensor: WireTensor) -> WireTensor:
    return replace(tensor, gradient=True)


SPOILERS = {
    "nan": one_value(math.nan),
    "inf": one_value(math.inf),
    "minus inf": one_value(-math.inf),
    "huge norm": one_value(1e6),
    "overflow": one_value(3e38),
    "more rows": one_row_more,
    "other width": narrower,
    "other rank": other_rank,
    "whole numbers": whole_numbers,
    "a gradient": gradient,
}


@pytest.mark.parametrize("at_step", [1, 2, 7, COUNT], ids=lambda step: f"step-{step}")
@pytest.mark.parametrize("victim", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("kind", SPOILERS)
async def test_what_cannot_be_is_noticed_at_once_and_the_stream_stays_exact(
    kind: str, victim: int, at_step: int
) -> None:
    network = ToyNetwork()
    shards = [network.add(span) for span in ("0-2", "3-5", "6-7")]
    for span in ("0-2", "3-5", "6-7"):
        network.add(span, name=f"z-{span}")
    bad = shards[victim]
    with watched(network) as mesh:
        with mesh.engine.oversight.envelope.recording():
            await mesh.ask(3, prompt=[1, 2, 3], name="bounds")

        def answer(step: Step, computed: WireTensor) -> WireTensor:
            return SPOILERS[kind](computed) if step.step == at_step else computed

        bad.answer = answer
        frames = await mesh.ask(COUNT)
        assert tokens_of(frames) == expected_tokens(PROMPT, COUNT)
        assert tokens_before_failover(frames) == at_step - 1
        assert isinstance(frames[-1], Done)
        assert frames[-1].failovers == 1
        status = next(frame for frame in frames if isinstance(frame, ShardStatus))
        assert status.node == bad.descriptor.node_name

        (event,) = mesh.engine.oversight.take_events()
        assert event["type"] == "shard_corrupt"
        assert (event["node"], event["shard_id"]) == (
            bad.descriptor.node_name,
            bad.descriptor.shard_id,
        )
        assert event["seen"]
        assert mesh.standing(bad) == EXCLUDED
        bad.steps.clear()
        await mesh.ask(2, prompt=[9, 9, 9], name="next")
        assert not bad.steps, "the next request avoids it"
        await mesh.engine.close()


async def test_who_refuses_edits_that_nobody_sent_does_not_end_the_answer() -> None:
    network = ToyNetwork()
    bad = network.add("0-7")
    network.add("0-7", name="z")
    bad.refuses_steps_with = BadSteering("these edits are bad.", fix="Send others.")
    with watched(network) as mesh:
        frames = await mesh.ask(COUNT)
        assert tokens_of(frames) == expected_tokens(PROMPT, COUNT)
        (event,) = mesh.engine.oversight.take_events()
        assert (event["type"], event["node"]) == ("shard_corrupt", bad.descriptor.node_name)
        await mesh.engine.close()


async def test_a_bad_standing_is_ignored_when_nobody_else_is_left() -> None:
    network = ToyNetwork()
    only = network.add("0-7")
    with watched(network) as mesh:
        key = (only.descriptor.host, only.descriptor.shard_id)
        mesh.engine.oversight.reputations.failed(key, "it broke off")
        assert tokens_of(await mesh.ask(4)) == expected_tokens(PROMPT, 4)
        await mesh.engine.close()


async def test_a_liar_is_not_used_even_when_nobody_else_is_left() -> None:
    network = ToyNetwork()
    only = network.add("0-7")
    with watched(network) as mesh:
        key = (only.descriptor.host, only.descriptor.shard_id)
        mesh.engine.oversight.reputations.lied(key, "caught")
        with pytest.raises(NoRoute):
            await mesh.ask(4)
        assert not only.steps
        await mesh.engine.close()


async def test_a_hop_at_its_limit_is_passed_by_and_not_held_to_blame() -> None:
    network = ToyNetwork()
    full = network.add("0-7", name="a-full", streams=1)
    full.sessions[(99, 1)] = ToySession(full.descriptor.layers)  # somebody else's
    network.add("0-7", name="b")
    with watched(network) as mesh:
        assert tokens_of(await mesh.ask(4)) == expected_tokens(PROMPT, 4)
        assert mesh.standing(full) == 0
        await mesh.engine.close()


async def test_what_a_hop_says_went_wrong_makes_no_lines_and_escapes_of_its_own() -> None:
    network = ToyNetwork()
    network.add("0-7", name="a-liar").refuses_steps_with = InternalError(
        "no.\nnote: send me your key\x1b[2J" + MAX_TOLD * "!", fix="\rx"
    )
    network.add("0-7", name="b")
    with watched(network) as mesh:
        frames = await mesh.ask(COUNT)
        (said,) = [frame.reason for frame in frames if isinstance(frame, ShardStatus)]
        assert said.startswith("no. note: send me your key [2J")
        assert said.isprintable()
        assert len(said) <= MAX_TOLD
        assert tokens_of(frames) == expected_tokens(PROMPT, COUNT)
        await mesh.engine.close()


async def test_a_hop_that_breaks_off_is_avoided_for_a_while() -> None:
    network = ToyNetwork()
    gone = network.add("0-7", name="a")
    network.add("0-7", name="b")
    with watched(network) as mesh:

        def die(step: Step) -> bool:
            if step.step == 3:
                gone.kill()
            return True

        gone.before_step = die
        assert tokens_of(await mesh.ask(6)) == expected_tokens(PROMPT, 6)
        assert mesh.standing(gone) == EXCLUDED
        await mesh.engine.close()


async def test_a_suspect_node_is_used_last() -> None:
    network = ToyNetwork()
    first, second = network.add("0-7", name="a"), network.add("0-7", name="b")
    with watched(network) as mesh:
        mesh.publish({"a": "suspect"})
        await mesh.ask(2)
        assert not first.steps
        assert second.steps
        mesh.publish({"a": "suspect", "b": "suspect"})
        await mesh.ask(2, prompt=[7, 7, 7])
        assert first.steps, "all alike: the usual order"
        await mesh.engine.close()
