"""Steering can make values that a later hop's number format cannot hold: nobody's fault there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh.errors import BadSteering, MeshError
from mesh.types import Edit, Site
from mesh.wire.messages import Step, WireTensor
from tests.health.watched import PROMPT, halves, told, values_of, watched, with_values
from tests.pipeline.toy_mesh import toy_request


def overflow(step: Step, computed: WireTensor) -> WireTensor:
    return with_values(computed, [float("inf")] * len(values_of(computed)))


async def test_a_hop_behind_an_edit_is_not_called_corrupt() -> None:
    network, back = halves("b", "c")
    for shard in back:
        shard.answer = overflow
    steered = replace(toy_request(PROMPT, 4), edits=(Edit(Site(1), 50.0, b"x" * 32),))
    with watched(network) as mesh:
        with pytest.raises(BadSteering) as refused:
            _ = [frame async for frame in mesh.engine.chat(steered)]
        assert "Lower the strength" in str(refused.value)
        assert told(mesh) == []
        assert [mesh.standing(shard) for shard in back] == [0, 0]
        await mesh.engine.close()


async def test_a_hop_before_every_edit_is() -> None:
    network, back = halves("b", "c")
    for shard in back:
        shard.answer = overflow
    steered = replace(toy_request(PROMPT, 4), edits=(Edit(Site(7), 50.0, b"x" * 32),))
    with watched(network) as mesh:
        with pytest.raises(MeshError):
            _ = [frame async for frame in mesh.engine.chat(steered)]
        assert {event["type"] for event in told(mesh)} == {"shard_corrupt"}
        await mesh.engine.close()
