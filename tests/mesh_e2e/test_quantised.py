"""Models in few bits over real hops: the same answer however it is cut, and after a loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mesh.types import LayerRange
from tests.checkpoints import make_checkpoint
from tests.mesh_e2e.conftest import StartNode
from tests.mesh_e2e.spread import greedy, split, spread
from tests.mesh_e2e.test_losing_nodes import COUNT, serving, stream, wait_for

LAYERS = 6
PROMPT = [40 + i for i in range(48)]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.mark.parametrize("quant", ["int8", "int4"])
async def test_the_answer_does_not_depend_on_how_many_hops_say_it(
    quant: str, tmp_path: Path
) -> None:
    directory = make_checkpoint(tmp_path / "qwen3", "qwen3", layers=LAYERS)
    splits = [split(LAYERS, hops) for hops in (1, 2, 3)]
    overlapping = [LayerRange(0, 4), LayerRange(2, 6)]  # the second is entered in its middle
    held = [span for spans in (*splits, overlapping) for span in spans]
    async with spread(directory, held, tmp_path / "cache", quant=quant) as mesh:
        logits, ids = [], []
        for spans in (*splits, overlapping):
            await mesh.use(spans)
            done = await mesh.generate(greedy(PROMPT, 40))
            assert len(done.route) == len(spans)
            ids.append(done.token_ids)
            logits.append(await mesh.logits(PROMPT, list(ids[0])))
        assert ids == [ids[0]] * len(ids)
        assert all(torch.equal(each, logits[0]) for each in logits)
        descriptors = [hosted.descriptor for hosted in mesh.host.shards.values()]
        assert {each.dtype for each in descriptors} == {quant}
        assert all(f"+{quant}" in each.determinism_class for each in descriptors)


def test_the_killed_nodes_place_is_taken_and_not_a_bit_is_different(
    start_node: StartNode,
) -> None:
    attic = start_node("attic", "--layers", "0-3", "--quant", "int8")
    second = {
        name: start_node(name, "--layers", "4-7", "--quant", "int8") for name in ("barn", "cellar")
    }
    start_node("unquantised", "--layers", "4-7")
    sofa = start_node("sofa", "--layers", "none", "--quant", "int8")
    for node in (attic, *second.values(), sofa):
        node.wait_ready()
    wait_for(lambda: serving(sofa) == {"attic", "barn", "cellar", "unquantised"})

    def route() -> list[str]:
        running = sofa.get("/mesh/v1/status")["generations"][0]
        return [hop["node"] for hop in running["route"]]

    def kill_serving() -> None:
        second[route()[1]].kill()

    seen: list[str] = []
    _, _, whole, text = stream(sofa, 20, lambda: seen.extend(route()))
    assert len(whole) == COUNT
    assert seen[0] == "attic"
    assert seen[1] in second, "the other format is no part of the route"
    facts, events, ids, again = stream(sofa, COUNT // 2, kill_serving, fallback_to_local=False)
    assert (ids, again) == (whole, text)
    assert facts["failovers"] == 1
    assert [event["type"] for event in events] == ["shard_status", "shard_failover"]
