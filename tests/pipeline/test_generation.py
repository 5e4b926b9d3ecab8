"""A whole generation over toy hops: exact tokens, whatever happens on the way."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from mesh.clock import SystemClock
from mesh.errors import (
    AddressLost,
    BadRequest,
    ContextTooLong,
    LinkLost,
    NoRoute,
    SessionGone,
)
from mesh.pipeline.commands import GenerationFrame
from mesh.pipeline.generation import PipelineOrchestrator
from mesh.pipeline.hop import STEPS_UNDER_WAY
from mesh.pipeline.links import HopLinks
from mesh.pipeline.watch.oversight import Oversight
from mesh.routing.cover import key_of
from mesh.types import (
    Done,
    GenerationRequest,
    PipelineAborted,
    SamplingParams,
    ShardFailover,
    StreamFrame,
    TokenDelta,
)
from mesh.wire.messages import Failure, Step
from tests.health.watched import tokens_of, watched
from tests.pipeline.test_commands import passed_on
from tests.pipeline.toy_mesh import (
    MODEL,
    ToyNetwork,
    ToyShard,
    expected_tokens,
    toy_orchestrator,
    toy_request,
)
from tests.waiting import until

PROMPT = [5, 11, 23, 42, 8, 61]


async def frames_of(
    orchestrator: PipelineOrchestrator, request: GenerationRequest
) -> list[StreamFrame]:
    return [frame async for frame in orchestrator.chat(request)]


async def frames_until_error(
    orchestrator: PipelineOrchestrator, request: GenerationRequest
) -> list[StreamFrame]:
    frames = []
    with contextlib.suppress(NoRoute):
        async for frame in orchestrator.chat(request):
            frames.append(frame)  # noqa: PERF401 - what came before an error counts
    return frames


def kinds_of(frames: list[StreamFrame]) -> list[str]:
    return [frame.type for frame in frames if not isinstance(frame, TokenDelta)]


def network_of(*layers: str) -> tuple[ToyNetwork, list[ToyShard]]:
    network = ToyNetwork()
    return network, [network.add(span) for span in layers]


@pytest.mark.parametrize("layers", [["0-7"], ["0-3", "4-7"], ["0-2", "1-5", "4-7"]])
async def test_hops_in_a_row_equal_the_whole_model(layers: list[str]) -> None:
    network, _ = network_of(*layers)
    orchestrator, sessions = toy_orchestrator(network)
    frames = await frames_of(orchestrator, toy_request(PROMPT, 12))
    assert tokens_of(frames) == expected_tokens(PROMPT, 12)
    done = frames[-1]
    assert isinstance(done, Done)
    assert (done.prompt_tokens, done.completion_tokens, done.failovers) == (6, 12, 0)
    assert done.token_ids == tuple(expected_tokens(PROMPT, 12))
    assert done.route[0].layers.start == 0
    assert done.hops[0].steps == 12
    await sessions.close()


async def test_the_first_token_says_how_long_the_prompt_is() -> None:
    network, _ = network_of("0-7")
    orchestrator, sessions = toy_orchestrator(network)
    frames = await frames_of(orchestrator, toy_request(PROMPT, 3))
    assert [f.prompt_tokens for f in frames if isinstance(f, TokenDelta)] == [6, 0, 0]
    sent = [GenerationFrame.of("r", frame) for frame in frames]
    assert [passed_on(frame) for frame in sent] == sent
    await sessions.close()


async def test_who_sees_what_runs_learns_no_id_to_resume_it_by() -> None:
    network, _ = network_of("0-7")
    with watched(network) as mesh:
        frames = mesh.engine.chat(toy_request(PROMPT, 3, "chatcmpl-1"))
        await anext(frames)
        (running,) = mesh.engine.generations()
        assert running.id
        assert "chatcmpl-1" not in str(running)
        await frames.aclose()
        await mesh.engine.close()


async def test_a_long_prompt_goes_in_chunks_that_follow_each_other() -> None:
    network, (first, second) = network_of("0-3", "4-7")
    orchestrator, sessions = toy_orchestrator(network)
    prompt = [(7 * i) % 97 for i in range(700)]
    frames = await frames_of(orchestrator, toy_request(prompt, 2))
    assert tokens_of(frames) == expected_tokens(prompt, 2)
    chunks = [(0, 128), (128, 128), (256, 128), (384, 128), (512, 128), (640, 60)]
    assert first.steps[:6] == chunks
    assert second.steps[:6] == chunks
    await sessions.close()


async def test_an_end_token_ends_unless_ignored() -> None:
    network, _ = network_of("0-7")
    orchestrator, sessions = toy_orchestrator(network)
    wanted = expected_tokens(PROMPT, 400)
    assert 0 in wanted, "the toy model must reach its end token for this test"
    request = GenerationRequest(
        "r", MODEL, prompt_ids=tuple(PROMPT), sampling=SamplingParams(max_tokens=400)
    )
    frames = await frames_of(orchestrator, request)
    assert tokens_of(frames) == wanted[: wanted.index(0) + 1]
    assert isinstance(frames[-1], Done)
    assert frames[-1].finish_reason == "stop"
    await sessions.close()


async def test_a_follow_up_prefills_only_what_is_new() -> None:
    network, (first, _) = network_of("0-3", "4-7")
    orchestrator, sessions = toy_orchestrator(network)
    answer = tokens_of(await frames_of(orchestrator, toy_request(PROMPT, 5)))
    follow_up = [*PROMPT, *answer, 33, 44]
    first.steps.clear()
    frames = await frames_of(orchestrator, toy_request(follow_up, 5, "r2"))
    assert tokens_of(frames) == expected_tokens(follow_up, 5)
    done = frames[-1]
    assert isinstance(done, Done)
    assert done.cached_tokens == len(PROMPT) + 4  # the last token was sampled, never fed
    assert first.steps[0] == (10, 3)
    await sessions.close()


async def test_a_follow_up_that_parts_from_the_kept_tokens_cuts_the_caches() -> None:
    network, _ = network_of("0-3", "4-7")
    orchestrator, sessions = toy_orchestrator(network)
    answer = tokens_of(await frames_of(orchestrator, toy_request(PROMPT, 6)))
    edited = [*PROMPT, *answer[:3], 90, 91]
    frames = await frames_of(orchestrator, toy_request(edited, 5, "r2"))
    assert tokens_of(frames) == expected_tokens(edited, 5)
    assert isinstance(frames[-1], Done)
    assert frames[-1].cached_tokens == len(PROMPT) + 3
    await sessions.close()


async def test_a_kept_session_that_a_hop_forgot_is_prefilled_afresh() -> None:
    network, (first, second) = network_of("0-3", "4-7")
    orchestrator, sessions = toy_orchestrator(network)
    answer = tokens_of(await frames_of(orchestrator, toy_request(PROMPT, 5)))
    await until(lambda: first.open_streams() == 0)  # a finished session is parked
    second.sessions.clear()
    follow_up = [*PROMPT, *answer, 33]
    frames = await frames_of(orchestrator, toy_request(follow_up, 5, "r2"))
    assert tokens_of(frames) == expected_tokens(follow_up, 5)
    await sessions.close()
    await until(lambda: not first.sessions)


async def test_a_hop_that_says_it_forgot_a_kept_session_is_not_waited_for_nor_blamed() -> None:
    network, (first, _) = network_of("0-3", "4-7")
    oversight = Oversight(SystemClock(), ceiling_s=30.0)
    orchestrator, sessions = toy_orchestrator(network, oversight)
    answer = tokens_of(await frames_of(orchestrator, toy_request(PROMPT, 5)))
    await until(lambda: first.open_streams() == 0)
    ((_, number),) = first.sessions
    first.sessions.clear()
    gone = SessionGone("gone.", fix="Replay.")
    first.far_ends[-1].send(Failure(gone.to_dict(), number))
    await asyncio.sleep(0.01)
    follow_up = [*PROMPT, *answer, 33]
    frames = await frames_of(orchestrator, toy_request(follow_up, 5, "r2"))
    assert tokens_of(frames) == expected_tokens(follow_up, 5)
    assert oversight.reputations.penalty(key_of(first.descriptor)) == 0
    await sessions.close()


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("at_step", [1, 2, 5, 12])
async def test_a_lost_hop_is_replaced_and_the_tokens_stay_the_same(
    victim: int, at_step: int
) -> None:
    network, shards = network_of("0-2", "3-5", "6-7")
    spares = [network.add(span, name=f"z{span}") for span in ("0-2", "3-5", "6-7")]
    orchestrator, sessions = toy_orchestrator(network)

    def die(step: Step) -> bool:
        if step.step == at_step:
            shards[victim].kill()
        return True

    shards[victim].before_step = die
    frames = await frames_of(orchestrator, toy_request(PROMPT, 12))
    assert tokens_of(frames) == expected_tokens(PROMPT, 12)
    assert kinds_of(frames) == ["shard_status", "shard_failover", "done"]
    assert isinstance(frames[-1], Done)
    assert frames[-1].failovers == 1
    others = [shard for index, shard in enumerate(shards) if index != victim]
    for shard in others:  # kept its cache: every position exactly once
        assert sorted(p for start, rows in shard.steps for p in range(start, start + rows)) == list(
            range(len(PROMPT) + 11)
        )
    replayed = [p for start, rows in spares[victim].steps for p in range(start, start + rows)]
    assert sorted(replayed) == list(range(len(PROMPT) + 11))
    await sessions.close()


async def test_two_shards_replace_one() -> None:
    network, (_, second) = network_of("0-3", "4-7")
    network.add("4-5", name="z1")
    network.add("5-7", name="z2")
    orchestrator, sessions = toy_orchestrator(network)

    def die(step: Step) -> bool:
        if step.step == 6:
            second.kill()
        return True

    second.before_step = die
    frames = await frames_of(orchestrator, toy_request(PROMPT, 12))
    assert tokens_of(frames) == expected_tokens(PROMPT, 12)
    failover = next(frame for frame in frames if isinstance(frame, ShardFailover))
    assert failover.replaced_by == ("toy:4-5", "toy:5-7")
    await sessions.close()


async def test_a_replacement_that_dies_during_the_replay_is_replaced_too() -> None:
    network, (_, second) = network_of("0-3", "4-7")
    third = network.add("4-7", name="x-dies-too")
    network.add("4-7", name="z-stays")
    orchestrator, sessions = toy_orchestrator(network)

    def die(step: Step) -> bool:
        if step.step == 6:
            second.kill()
        return True

    def die_at_once(step: Step) -> bool:
        third.kill()
        return True

    second.before_step, third.before_step = die, die_at_once
    frames = await frames_of(orchestrator, toy_request(PROMPT, 12))
    assert tokens_of(frames) == expected_tokens(PROMPT, 12)
    assert sum(isinstance(frame, ShardFailover) for frame in frames) == 2
    await sessions.close()


async def test_a_hop_that_failed_is_left_alone_for_the_request_unless_nobody_else_is_left() -> None:
    network, (_, lost) = network_of("0-3", "4-7")
    second, third = (network.add("4-7", name=name) for name in ("y", "z"))
    orchestrator, sessions = toy_orchestrator(network)

    def refuse_once(shard: ToyShard, at_step: int) -> None:
        def refuse(step: Step) -> bool:
            if step.position < len(PROMPT) + at_step:
                return True
            shard.before_step = lambda step: True
            shard.links[-1].cut()  # back at once, and advertised all along
            return False

        shard.before_step = refuse

    for shard, at_step in ((lost, 3), (second, 6), (third, 9)):
        refuse_once(shard, at_step)
    frames = await frames_of(orchestrator, toy_request(PROMPT, 14))
    assert tokens_of(frames) == expected_tokens(PROMPT, 14)
    order = [shard.steps[-1][0] for shard in (second, third, lost)]
    assert order == sorted(order), "each was used once, and the first again when all had failed"
    assert isinstance(frames[-1], Done)
    assert frames[-1].failovers == 3
    await sessions.close()


async def test_a_hop_whose_address_changes_while_it_is_asked_is_asked_where_it_is() -> None:
    network, (_, last) = network_of("0-3", "4-7")
    orchestrator, sessions = toy_orchestrator(network)
    last.opens_after_s = 1.5

    def move() -> None:
        last.opens_after_s = 0.0
        last.links[-1].lose(AddressLost("It is elsewhere.", fix="Wait."))

    asyncio.get_running_loop().call_later(0.05, move)
    frames = await frames_of(orchestrator, toy_request(PROMPT, 5))
    assert tokens_of(frames) == expected_tokens(PROMPT, 5)
    assert isinstance(frames[-1], Done)
    assert frames[-1].failovers == 0
    await sessions.close()


@pytest.mark.parametrize("has_moved", [True, False])
async def test_who_has_moved_to_another_address_waits_until_it_meets_the_others(
    has_moved: bool,
) -> None:
    network, (_, last) = network_of("0-3", "4-7")
    orchestrator, sessions = toy_orchestrator(network)
    kind = AddressLost if has_moved else LinkLost

    def move(step: Step) -> bool:
        if step.position < len(PROMPT) + 3:
            return True
        last.before_step = lambda step: True
        last.is_advertised = False
        asyncio.get_running_loop().call_later(0.1, setattr, last, "is_advertised", True)
        last.links[-1].lose(kind("It is elsewhere.", fix="Wait."))
        return False

    last.before_step = move
    frames = await frames_until_error(orchestrator, toy_request(PROMPT, 9))
    assert (tokens_of(frames) == expected_tokens(PROMPT, 9)) is has_moved
    assert isinstance(frames[-1], Done if has_moved else PipelineAborted)
    await sessions.close()


async def test_hosts_that_stop_together_do_not_hand_a_generation_back_and_forth() -> None:
    network, (_, second) = network_of("0-3", "4-7")
    other = network.add("4-7", name="z")
    links = HopLinks(network.dial)
    orchestrator, sessions = toy_orchestrator(network, links=links)
    await links.link(other.descriptor.host, other.descriptor.endpoint)
    frames: list[StreamFrame] = []
    async for frame in orchestrator.chat(toy_request(PROMPT, 12)):
        frames.append(frame)
        assert kinds_of(frames).count("shard_failover") <= 1
        if len(frames) == 3:
            second.drain()
            other.drain()
            await asyncio.sleep(0.01)
    assert tokens_of(frames) == expected_tokens(PROMPT, 12)
    assert kinds_of(frames) == ["shard_status", "shard_failover", "done"]
    await sessions.close()


async def test_a_hop_is_replaced_though_its_neighbour_has_one_stream_and_it_is_ours() -> None:
    network = ToyNetwork()
    lost = network.add("0-5", name="a")
    network.add("2-7", name="b", streams=1)
    orchestrator, sessions = toy_orchestrator(network)
    network.add("0-1", name="z")

    def die(step: Step) -> bool:
        if step.step == 6:
            lost.kill()
        return True

    lost.before_step = die
    frames = await frames_of(orchestrator, toy_request(PROMPT, 12))
    assert tokens_of(frames) == expected_tokens(PROMPT, 12)
    assert kinds_of(frames) == ["shard_status", "shard_failover", "done"]
    await sessions.close()


async def test_a_generation_that_loses_hops_for_ever_is_given_up() -> None:
    network, hopeless = network_of("0-3", "4-7", "4-7")
    orchestrator, sessions = toy_orchestrator(network)
    for shard in hopeless[1:]:
        shard.refuses_steps_with = BadRequest("no.", fix="None.")
    async with asyncio.timeout(10):
        with pytest.raises(NoRoute):
            await frames_of(orchestrator, toy_request(PROMPT, 4))
    await sessions.close()


async def test_without_a_replacement_the_pipeline_is_aborted_naming_the_layers() -> None:
    network, (_, second) = network_of("0-3", "4-7")
    orchestrator, sessions = toy_orchestrator(network)

    def die(step: Step) -> bool:
        if step.step == 3:
            second.kill()
        return True

    second.before_step = die
    frames: list[StreamFrame] = []

    async def collect() -> None:
        async for frame in orchestrator.chat(toy_request(PROMPT, 12)):
            frames.append(frame)  # noqa: PERF401 - what came before the error is wanted

    with pytest.raises(NoRoute) as raised:
        await collect()
    assert raised.value.code == "shard_unavailable"
    assert tokens_of(frames) == expected_tokens(PROMPT, 12)[:2]
    assert isinstance(frames[-1], PipelineAborted)
    assert not sessions.live
    await sessions.close()


async def test_a_hop_at_its_limit_makes_the_router_pick_another() -> None:
    network, (full,) = network_of("0-7")
    full.descriptor = full.descriptor.__class__(
        **{
            **{f: getattr(full.descriptor, f) for f in full.descriptor.__slots__},
            "max_concurrent_streams": 1,
        }
    )
    other = network.add("0-7", name="z-other")
    orchestrator, sessions = toy_orchestrator(network)
    first = orchestrator.chat(toy_request(PROMPT, 12, "one"))
    await anext(first)
    frames = await frames_of(orchestrator, toy_request(PROMPT[:3], 4, "two"))
    assert tokens_of(frames) == expected_tokens(PROMPT[:3], 4)
    assert other.steps
    await first.aclose()
    await sessions.close()


async def test_closing_the_stream_frees_every_hop() -> None:
    network, _ = network_of("0-3", "4-7")
    orchestrator, sessions = toy_orchestrator(network)
    stream = orchestrator.chat(toy_request(PROMPT, 100))
    for _ in range(3):
        await anext(stream)
    await stream.aclose()
    await network.until_free()
    assert not sessions.live
    await sessions.close()


async def test_many_at_once_equal_each_alone() -> None:
    network, _ = network_of("0-3", "4-7")
    orchestrator, sessions = toy_orchestrator(network)
    prompts = [[n + 1, 2 * n + 3, 50 - n] for n in range(6)]
    results = await asyncio.gather(
        *(frames_of(orchestrator, toy_request(p, 10, f"r{i}")) for i, p in enumerate(prompts))
    )
    assert [tokens_of(frames) for frames in results] == [expected_tokens(p, 10) for p in prompts]
    await sessions.close()


@pytest.mark.parametrize(
    ("prompt", "count", "error"),
    [([], 3, BadRequest), ([1] * 5000, 3, ContextTooLong), ([1] * 4000, 200, ContextTooLong)],
)
async def test_what_cannot_fit_is_refused_with_both_numbers(
    prompt: list[int], count: int, error: type[Exception]
) -> None:
    network, _ = network_of("0-7")
    orchestrator, sessions = toy_orchestrator(network)
    with pytest.raises(error) as raised:
        await frames_of(orchestrator, toy_request(prompt, count))
    if error is ContextTooLong:
        assert str(len(prompt)) in str(raised.value)
        assert "this model's maximum context length is 4096 tokens" in str(raised.value)
    await sessions.close()


async def test_what_no_cache_holds_is_the_request_s_fault_and_what_one_holds_goes_there() -> None:
    network, (small,) = network_of("0-7")
    small.kv_tokens = 20
    orchestrator, sessions = toy_orchestrator(network)
    with pytest.raises(ContextTooLong, match="26 of 20"):
        await frames_of(orchestrator, toy_request([1] * 20, 6))
    network.add("0-7", name="z-large")
    frames = await frames_of(orchestrator, toy_request([1] * 20, 6))
    assert tokens_of(frames) == expected_tokens([1] * 20, 6)
    assert not small.steps
    await sessions.close()


async def test_a_hop_is_never_sent_more_steps_than_it_takes_at_once() -> None:
    """Neither by a prefill over many hops nor by the replay of a long history."""
    network = ToyNetwork()
    shards = [network.add(f"{n}-{n}") for n in range(8)]
    spare = network.add("0-0", name="z-spare")
    spare.delay_s = 0.1  # slow enough that all it is sent at once is seen to be under way
    orchestrator, sessions = toy_orchestrator(network)
    prompt = [(5 * i) % 97 for i in range(1000)]

    def die(step: Step) -> bool:
        if step.step == 8:
            shards[0].kill()
        return True

    shards[0].before_step = die
    frames = await frames_of(orchestrator, toy_request(prompt, 3))
    assert tokens_of(frames) == expected_tokens(prompt, 3)
    assert spare.most_under_way == STEPS_UNDER_WAY, "the replay was long enough to need the limit"
    await sessions.close()


async def test_a_hop_that_blames_the_request_is_replaced_as_any_other() -> None:
    """A hop could end every request with a lie; another hop's word is asked first."""
    network, (liar,) = network_of("0-7")
    network.add("0-7", name="z-honest")
    orchestrator, sessions = toy_orchestrator(network)
    liar.refuses_steps_with = BadRequest("this request is bad.", fix="Go away.")
    frames = await frames_of(orchestrator, toy_request(PROMPT, 4))
    assert tokens_of(frames) == expected_tokens(PROMPT, 4)
    await sessions.close()
