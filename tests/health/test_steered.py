"""Steering can make values that a later hop's number format cannot hold: nobody's fault there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh.errors import BadSteering, MeshError
from mesh.types import Edit, ShardFailover, Site
from mesh.wire.messages import Step, WireTensor
from tests.health.watched import PROMPT, halves, tokens_of, told, values_of, watched, with_values
from tests.pipeline.toy_mesh import expected_tokens, toy_request


def overflow(step: Step, computed: WireTensor) -> WireTensor:
    return with_values(computed, [float("inf")] * len(values_of(computed)))


async def refused(layer: int) -> tuple[MeshError, set[object], list[int], list[str]]:
    """Why an answer steered at `layer` ends where all hops behind the first overflow; what is
    reported of them, their standings, and who was asked."""
    network, back = halves("b", "c", "d")
    for shard in back:
        shard.answer = overflow
    steered = replace(toy_request(PROMPT, 4), edits=(Edit(Site(layer), 50.0, b"x" * 32),))
    with watched(network) as mesh:
        with pytest.raises(MeshError) as raised:
            _ = [frame async for frame in mesh.engine.chat(steered)]
        events = {event["type"] for event in told(mesh)}
        standings = [mesh.standing(shard) for shard in back]
        await mesh.engine.close()
    asked = [shard.descriptor.node_name for shard in back if shard.steps]
    return raised.value, events, standings, asked


async def test_a_hop_behind_an_edit_is_not_called_corrupt() -> None:
    error, events, standings, asked = await refused(1)
    assert isinstance(error, BadSteering)
    assert "Lower the strength" in str(error)
    assert events == set()
    assert standings == [0, 0, 0]
    assert asked == ["b", "c"], "a second one has said so"


async def test_edits_that_one_hop_alone_refuses_do_not_end_the_answer() -> None:
    network, (liar, _) = halves("b", "c")
    refusal = BadSteering("these edits are bad.", fix="Send others.")
    steered = replace(toy_request(PROMPT, 4), edits=(Edit(Site(5), 1.0, b"x" * 32),))
    with watched(network) as mesh:
        liar.refuses_opens_with = refusal
        assert tokens_of([f async for f in mesh.engine.chat(steered)]) == expected_tokens(PROMPT, 4)
        liar.refuses_opens_with, liar.refuses_steps_with = None, refusal
        again = replace(steered, prompt_ids=(7, 7, 7))
        frames = [frame async for frame in mesh.engine.chat(again)]
        assert tokens_of(frames) == expected_tokens([7, 7, 7], 4)
        assert sum(isinstance(frame, ShardFailover) for frame in frames) == 1
        await mesh.engine.close()


async def test_a_hop_before_every_edit_is() -> None:
    _, events, _, _ = await refused(7)
    assert events == {"shard_corrupt"}
