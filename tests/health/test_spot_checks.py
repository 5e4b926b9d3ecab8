"""Spot checks over the toy mesh: liars are found, named and left; honest hosts never are."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from mesh.errors import NoRoute
from mesh.pipeline.terms import SessionTerms
from mesh.pipeline.watch.reputation import DOUBTED, LIED
from mesh.pipeline.watch.spot_checks import FIRST_REFUSAL_S, NEWCOMER_SESSIONS
from mesh.types import Done, LayerRange, RouteHop, ShardFailover, WireDtype, shard_id
from mesh.wire.messages import Result, Step, WireTensor
from tests.health.watched import (
    ASKER,
    PROMPT,
    answers,
    halves,
    lie,
    scaled,
    tokens_before_failover,
    tokens_of,
    told,
    watched,
)
from tests.pipeline.toy_mesh import (
    MODEL,
    TOTAL_LAYERS,
    WEIGHTS,
    ToyNetwork,
    encode,
    expected_tokens,
    toy_request,
)
from tests.simulation.virtual_loop import run_virtually
from tests.waiting import until
from tests.wire.memory import MemoryLink


def lies_in(share: float, seed: int) -> tuple[Callable[[Step, WireTensor], WireTensor], list[int]]:
    """An `answer` that lies in a share of the steps, and the positions at which it did."""
    rng, lies = random.Random(seed), []

    def answer(step: Step, computed: WireTensor) -> WireTensor:
        if rng.random() >= share:
            return computed
        lies.append(step.position)
        return scaled(computed)

    return answer, lies


@pytest.mark.parametrize("seed", range(20))
async def test_a_subtle_liar_is_caught_within_tokens_and_left(seed: int) -> None:
    network, (liar, _, third) = halves("a-liar", "b", "c")
    layers = liar.descriptor.layers
    liar.answer, lies = lies_in(0.1, seed)
    with watched(network, probability=0.25) as mesh:
        mesh.engine.spot_checks.rng = random.Random(seed)
        frames = await answers(mesh, 120)
        assert lies
        caught = tokens_before_failover(frames)
        first_lie = max(0, lies[0] - len(PROMPT) + 1)
        assert caught - first_lie <= 25, "a check every four steps sees all steps since the last"
        assert tokens_of(frames)[:first_lie] == expected_tokens(PROMPT, 120)[:first_lie]
        await mesh.idle()
        await asyncio.sleep(0)  # what was said last arrives
        assert not any(shard.open_streams() for shard in network.shards.values())
        (event,) = told(mesh)
        assert (event["type"], event["node"]) == ("shard_lied", "a-liar")
        digests = event["digests"]
        assert isinstance(digests, dict)
        assert len(digests) == 2
        assert all(len(value) == 64 for value in digests.values())
        assert mesh.standing(liar) == LIED
        assert mesh.standing(third) == 0
        liar.steps.clear()
        liar.descriptor = replace(liar.descriptor, shard_id=shard_id(MODEL, layers, 1))
        mesh.publish()
        await answers(mesh, 5, "next")
        assert not liar.steps, "whatever it calls its shard by then"
        await mesh.engine.close()


async def test_honest_hosts_agree_in_every_check() -> None:
    network, shards = halves("a", "b", "c")
    network.add("0-3", name="z-front")
    with watched(network, probability=1.0) as mesh:
        for number in range(8):
            frames = await answers(mesh, 60, f"r{number}")
            assert tokens_of(frames) == expected_tokens(PROMPT, 60)
        await mesh.idle()
        assert told(mesh) == []
        counts = [mesh.checks(shard) for shard in network.shards.values()]
        assert sum(count.get("agreed", 0) for count in counts) > 100
        assert all(set(count) <= {"agreed"} for count in counts)
        await mesh.engine.close()
        await network.until_free()
        assert shards


async def test_two_against_each_other_are_both_doubted() -> None:
    network, (liar, honest) = halves("a-liar", "b")
    liar.answer = lie
    with watched(network, probability=1.0) as mesh:
        await answers(mesh, 10)
        await mesh.idle()
        kinds = {event["type"] for event in told(mesh)}
        assert kinds == {"shard_doubtful"}
        assert mesh.standing(liar) == mesh.standing(honest) == DOUBTED
        await mesh.engine.close()


async def test_our_own_machine_needs_no_third_opinion() -> None:
    network, (liar, _) = halves("a-liar", ASKER)
    liar.answer = lie
    with watched(network, probability=1.0) as mesh:
        frames = await answers(mesh, 10)
        await mesh.idle()
        assert mesh.standing(liar) == LIED
        assert any(isinstance(frame, ShardFailover) for frame in frames)
        await mesh.engine.close()


@pytest.mark.parametrize("lying", [True, False])
async def test_bounds_that_a_liar_helped_to_set_are_forgotten(lying: bool) -> None:
    network, (other, _) = halves("a", ASKER)
    with watched(network, probability=1.0) as mesh:
        envelope = mesh.engine.oversight.envelope
        with envelope.recording():
            await mesh.ask(3, prompt=[1, 2, 3], name="bounds")
        other.answer = lie if lying else other.answer
        await answers(mesh, 10)
        await mesh.idle()
        assert mesh.standing(other) == (LIED if lying else 0)
        assert envelope.is_known == (not lying)
        await mesh.engine.close()


async def test_a_liar_that_is_asked_for_its_opinion_accuses_nobody() -> None:
    network, (honest, liar, third) = halves("a", "b-liar", "c")
    liar.answer = lie
    with watched(network, probability=1.0) as mesh:
        for number in range(6):
            frames = await answers(mesh, 10, f"r{number}")
            assert tokens_of(frames) == expected_tokens(PROMPT, 10)
            assert isinstance(frames[-1], Done)
            assert frames[-1].failovers == 0
        await mesh.idle()
        assert mesh.standing(liar) == LIED
        assert mesh.standing(honest) == mesh.standing(third) == 0
        await mesh.engine.close()


async def test_without_a_third_machine_a_small_span_at_home_is_the_judge() -> None:
    network, (liar,) = halves("a-liar")
    liar.answer = lie
    with watched(network, probability=1.0) as mesh:
        mesh.home = network.add("4-7", name=ASKER)  # after what is advertised was told
        with pytest.raises(NoRoute):
            await answers(mesh, 10)
        await mesh.idle()
        assert mesh.standing(liar) == LIED
        assert mesh.home.steps
        await mesh.engine.close()


def test_layers_that_do_not_load_at_home_are_tried_again_and_more_rarely() -> None:
    async def main() -> None:
        network, (only,) = halves("a")
        loop = asyncio.get_running_loop()
        tried: list[float] = []
        with watched(network, probability=1.0) as mesh:
            judge = mesh.judge

            async def counted(layers: LayerRange) -> RouteHop:
                if layers == only.descriptor.layers:
                    tried.append(loop.time())
                return await judge(layers)

            mesh.judge = counted
            for _ in range(200):
                await mesh.ask(2)
                await mesh.idle()
                await asyncio.sleep(1.0)
            assert set(mesh.checks(only)) == {"unchecked"}
            assert [round(t) for t in tried] == [0, 15, 45, 105]
            mesh.home = network.add("4-7", name=ASKER)  # there is memory again
            await asyncio.sleep(FIRST_REFUSAL_S * 8)
            await mesh.ask(2)
            await mesh.idle()
            assert mesh.checks(only)["agreed"] == 1
            await mesh.engine.close()

    run_virtually(main)


async def test_what_nobody_else_holds_is_counted_as_unchecked() -> None:
    network, (only,) = halves("a")
    with watched(network, probability=1.0) as mesh:
        assert tokens_of(await answers(mesh, 10)) == expected_tokens(PROMPT, 10)
        await mesh.idle()
        assert set(mesh.checks(only)) == {"unchecked"}
        assert told(mesh) == []
        await mesh.engine.close()


async def test_another_number_format_is_no_judge() -> None:
    network, (shard, other) = halves("a", "b")
    fields = {name: getattr(other.descriptor, name) for name in other.descriptor.__slots__}
    other.descriptor = other.descriptor.__class__(**{**fields, "dtype": "int8"})
    with watched(network, probability=1.0) as mesh:
        await answers(mesh, 5)
        await mesh.idle()
        assert set(mesh.checks(shard)) == {"unchecked"}
        await mesh.engine.close()


async def test_the_first_sessions_of_a_new_host_are_checked_whatever_is_drawn() -> None:
    network, (shard, judge) = halves("a", "b")
    with watched(network, probability=1e-12) as mesh:
        for number in range(NEWCOMER_SESSIONS + 2):
            await mesh.ask(8, prompt=[number + 1, 2, 3], name=f"r{number}")
            await mesh.idle()
        assert mesh.checks(shard) == {"agreed": NEWCOMER_SESSIONS}
        assert judge.steps
        await mesh.engine.close()


async def test_a_check_leaves_its_stream_to_a_generation() -> None:
    network = ToyNetwork()
    network.add("0-3", name="front")
    one, other = (network.add("4-7", streams=1, name=name) for name in ("a", "b"))
    with watched(network, probability=1e-12) as mesh:
        other.before_step = lambda step: False  # the newcomer's check of `a` hangs there
        first = mesh.engine.chat(toy_request(PROMPT, 30, "first"))
        begun = [await anext(first) for _ in range(6)]
        assert (one.open_streams(), other.open_streams()) == (1, 1)
        other.before_step = lambda step: True
        second = await mesh.ask(30, name="second")
        assert tokens_of(second) == expected_tokens(PROMPT, 30)
        rest = [frame async for frame in first]
        assert tokens_of(begun + rest) == expected_tokens(PROMPT, 30)
        assert mesh.checks(one).get("agreed", 0) == 0
        await mesh.engine.close()
        await network.until_free()


async def test_probability_zero_checks_nobody() -> None:
    network, (_, judge) = halves("a", "b")
    with watched(network, probability=0.0) as mesh:
        await answers(mesh, 20)
        assert not judge.steps
        await mesh.engine.close()


async def test_later_checks_send_only_what_is_missing() -> None:
    network, (_, judge) = halves("a", "b")
    with watched(network, probability=1.0) as mesh:
        await answers(mesh, 40)
        await mesh.idle()
        seen = [p for start, rows in judge.steps for p in range(start, start + rows)]
        assert len(judge.steps) > 3
        assert seen == list(range(len(seen)))
        await mesh.engine.close()


async def test_between_checks_the_judge_has_its_stream_back() -> None:
    network, (_, judge) = halves("a", "b")
    with watched(network, probability=1.0) as mesh:
        async for _ in mesh.engine.chat(toy_request(PROMPT, 10)):
            await mesh.idle()
            await asyncio.sleep(0)
            assert judge.open_streams() == 0
        assert judge.steps
        await mesh.engine.close()


async def test_a_session_that_goes_back_is_checked_on_from_there() -> None:
    network, shards = halves("a", "b")
    with watched(network, probability=1.0) as mesh:
        answer = tokens_of(await answers(mesh, 10))
        edited = [*PROMPT, *answer[:6], 90, 91]
        async for _ in mesh.engine.chat(toy_request(edited, 20, "r2")):
            await asyncio.sleep(0)
        await mesh.idle()
        assert told(mesh) == []
        assert set(mesh.checks(shards[0])) == {"agreed"}
        await mesh.engine.close()


@pytest.mark.parametrize("meanwhile", [False, True], ids=["between-checks", "during-a-check"])
async def test_a_cut_of_a_live_session_is_followed(meanwhile: bool) -> None:
    network, (shard, judge) = halves("a", "b")
    held: list[Callable[[], None]] = []
    holding = asyncio.Event()
    with watched(network, probability=1.0) as mesh:
        terms = SessionTerms(MODEL, WEIGHTS, 64, WireDtype.FP32)
        session = await mesh.engine.sessions.open_fresh(terms, TOTAL_LAYERS)
        route = session.route
        route.feed(encode([[number, 2, 3, 4] for number in range(6)]))
        await route.output(6)
        await mesh.idle()
        if meanwhile:

            def hold(link: MemoryLink, result: Result) -> None:
                held.append(lambda: link.send(result))
                holding.set()

            judge.reply = hold
            route.feed(encode([[7, 7, 7, 7]]))
            await route.output(7)
            await asyncio.wait_for(holding.wait(), 5)
        route.cut(2)
        judge.reply = lambda link, result: link.send(result)
        for release in held:
            release()
        await mesh.idle()
        for number in range(3):
            route.feed(encode([[number, 50, 60, 70]] * 4))
            await route.output(6 + 4 * number)
            await mesh.idle()
        assert told(mesh) == []
        assert set(mesh.checks(shard)) == {"agreed"}
        mesh.engine.sessions.release(session, keep=False)
        await mesh.engine.close()


async def test_a_judge_that_answers_whole_numbers_has_not_judged_and_is_let_go() -> None:
    network, (shard, judge) = halves("a", "b")

    def whole_numbers(step: Step, computed: WireTensor) -> WireTensor:
        return WireTensor("int8", computed.shape, bytes(len(computed.data) // 4))

    judge.answer = whole_numbers
    with watched(network, probability=1.0) as mesh:
        assert tokens_of(await answers(mesh, 10)) == expected_tokens(PROMPT, 10)
        await mesh.idle()
        assert judge.steps
        assert set(mesh.checks(shard)) == {"unchecked"}
        await until(lambda: not judge.sessions)
        await mesh.engine.close()


async def test_a_replica_that_is_full_refuses_the_check_and_nothing_else() -> None:
    network, (shard, judge) = halves("a", "b")
    fields = {name: getattr(judge.descriptor, name) for name in judge.descriptor.__slots__}
    judge.descriptor = judge.descriptor.__class__(**{**fields, "max_concurrent_streams": 0})
    with watched(network, probability=1.0) as mesh:
        mesh.network.shards[1002].descriptor = judge.descriptor
        assert tokens_of(await answers(mesh, 10)) == expected_tokens(PROMPT, 10)
        await mesh.idle()
        assert "agreed" not in mesh.checks(shard)
        assert mesh.standing(judge) == 0, "full is no fault"
        await mesh.engine.close()


def test_a_check_that_hangs_costs_the_generation_nothing() -> None:
    async def main() -> None:
        network, (shard, judge) = halves("a", "b")
        judge.before_step = lambda step: False
        loop = asyncio.get_running_loop()
        with watched(network, probability=1.0) as mesh:
            frames = await answers(mesh, 30)
            assert tokens_of(frames) == expected_tokens(PROMPT, 30)
            assert loop.time() < 0.001
            await mesh.idle()
            assert loop.time() >= 30.0
            assert set(mesh.checks(shard)) == {"unchecked"}
            await mesh.engine.close()

    run_virtually(main)


async def test_closing_ends_checks_under_way() -> None:
    network, (_, judge) = halves("a", "b")
    judge.before_step = lambda step: False
    with watched(network, probability=1.0) as mesh:
        await answers(mesh, 3)
        assert mesh.engine.spot_checks.running
        await mesh.engine.close()
        assert not mesh.engine.spot_checks.running
        await until(lambda: not judge.sessions)
