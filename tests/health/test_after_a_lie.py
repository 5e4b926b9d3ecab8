"""What a liar said is in the caches behind it too: nothing computed from it is used any more."""

from __future__ import annotations

import asyncio

from mesh.pipeline.watch.spot_checks import SpotFinding
from mesh.types import Done, ShardFailover
from tests.health.watched import (
    ASKER,
    PROMPT,
    Watched,
    answers,
    lie,
    tokens_before_failover,
    tokens_of,
    told,
    watched,
)
from tests.pipeline.toy_mesh import ToyNetwork, ToyShard, expected_tokens, toy_request
from tests.simulation.virtual_loop import run_virtually


def _mesh_of(*names: str) -> tuple[ToyNetwork, list[ToyShard], ToyShard]:
    """The first half on nodes of these names, the second half on one behind them."""
    network = ToyNetwork()
    fronts = [network.add("0-3", name=name) for name in names]
    return network, fronts, network.add("4-7", name="back")


def _catch(mesh: Watched, liar: ToyShard, honest: ToyShard) -> None:
    """What a spot check that ends now says."""
    mesh.engine.oversight.found(
        SpotFinding(liar.descriptor, honest.descriptor, liar.descriptor, 0, 9.0, ("a", "b"))
    )


async def test_the_rest_of_the_answer_and_the_next_one_are_right() -> None:
    network, (liar, _), _ = _mesh_of("a-liar", ASKER)
    liar.answer = lie
    with watched(network, probability=1.0, allow_self_as_first=True) as mesh:
        frames = await answers(mesh, 12)
        said, good = tokens_of(frames), tokens_before_failover(frames)
        assert said[good:] == expected_tokens([*PROMPT, *said[:good]], 12 - good)
        await mesh.idle()
        liar.steps.clear()
        follow_up = [*PROMPT, *said, 33, 44]
        frames = await mesh.ask(8, prompt=follow_up, name="next")
        assert tokens_of(frames) == expected_tokens(follow_up, 8)
        assert not liar.steps
        await mesh.engine.close()


async def test_two_answers_that_catch_the_same_liar_report_it_once() -> None:
    network, (liar, _, _), _ = _mesh_of("a-liar", "b", "c")
    liar.answer = lie
    with watched(network, probability=1.0) as mesh:
        await asyncio.gather(*(mesh.ask(12, name=name) for name in "pq"))
        await mesh.idle()
        assert mesh.checks(liar)["lied"] == 2
        assert [event["type"] for event in told(mesh)] == ["shard_lied"]
        await mesh.engine.close()


async def test_also_when_the_liar_had_been_lost_before_it_was_caught() -> None:
    network, (liar, honest), _ = _mesh_of("a-liar", "b")
    liar.answer = lie
    with watched(network) as mesh:
        said: list[int] = []
        failovers = 0
        async for frame in mesh.engine.chat(toy_request(PROMPT, 16)):
            said += tokens_of([frame])
            failovers += isinstance(frame, ShardFailover)
            if len(said) == 4 and not failovers:
                liar.kill()
            if len(said) == 8 and failovers == 1:
                _catch(mesh, liar, honest)
        assert failovers == 2
        assert said[8:] == expected_tokens([*PROMPT, *said[:8]], 8)
        await mesh.engine.close()


async def test_a_kept_session_that_a_liar_had_a_part_in_is_not_gone_on_with() -> None:
    network, (liar, honest), _ = _mesh_of("a-liar", "b")
    liar.answer = lie
    with watched(network) as mesh:
        said = tokens_of(await mesh.ask(6))
        _catch(mesh, liar, honest)
        follow_up = [*PROMPT, *said, 33]
        frames = await mesh.ask(6, prompt=follow_up, name="next")
        assert tokens_of(frames) == expected_tokens(follow_up, 6)
        done = frames[-1]
        assert isinstance(done, Done)
        assert done.cached_tokens == 0
        await mesh.engine.close()


async def test_a_host_that_is_caught_while_it_is_asked_is_not_used() -> None:
    network, (liar, honest), back = _mesh_of("a-liar", "b")
    dial = network.dial

    async def dial_and_hear(host: str, port: int, handler: object) -> object:
        link = await dial(host, port, handler)  # type: ignore[arg-type]
        _catch(mesh, liar, honest)
        return link

    network.dial = dial_and_hear  # type: ignore[assignment,method-assign]
    with watched(network) as mesh:
        frames = await mesh.ask(6)
        assert tokens_of(frames) == expected_tokens(PROMPT, 6)
        assert not liar.steps
        await asyncio.sleep(0)  # what was said last arrives
        assert [shard.open_streams() for shard in (liar, back)] == [0, 0], "nor has it a stream"
        await mesh.engine.close()


def test_an_honest_hop_whose_answer_nobody_waits_for_any_more_is_not_blamed() -> None:
    async def main() -> None:
        network, (liar, spare), back = _mesh_of("a-liar", "spare")
        spare.opens_after_s, spare.is_loading = 60.0, True
        with watched(network) as mesh:
            async with mesh.watching_stalls():
                frames = []
                async for frame in mesh.engine.chat(toy_request(PROMPT, 12)):
                    frames.append(frame)
                    if len(frames) == 5:
                        back.delay_s = 0.5  # it computes when the liar before it is caught
                        asyncio.get_running_loop().call_later(0.1, _catch, mesh, liar, spare)
                assert len(tokens_of(frames)) == 12
                failures = {row["host"]: row["failures"] for row in mesh.engine.oversight.rows()}
                assert not failures.get(back.descriptor.host)

    run_virtually(main)
