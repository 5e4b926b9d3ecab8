"""Models in few bits over real hops: the same answer however it is cut, and after a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nnsight.modeling import huggingface
from nnsight.modeling.transformers import TransformersModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from mesh.models.builtin import checkpoint_dir
from mesh.types import LayerRange
from tests.checkpoints import make_checkpoint
from tests.interventions.test_quantised import put_in_blocks
from tests.mesh_e2e.conftest import StartNode
from tests.mesh_e2e.spread import greedy, split, spread
from tests.mesh_e2e.test_losing_nodes import COUNT, serving, stream
from tests.ndif import client
from tests.waiting import wait_until

LAYERS = 6
PROMPT = [40 + i for i in range(48)]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("family", "quant"),
    [
        ("qwen3", "int8"),
        ("qwen3", "int4"),
        ("qwen3_5", "int4"),
        ("kimi_linear", "int4"),
        ("gemma4", "int4"),
    ],
)
async def test_the_answer_does_not_depend_on_how_many_hops_say_it(
    family: str, quant: str, tmp_path: Path
) -> None:
    directory = make_checkpoint(tmp_path / family, family, layers=LAYERS)
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
        kernels = "int4pack+lean" if family == "gemma4" else f"+{quant}"
        assert all(kernels in each.determinism_class for each in descriptors)


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
    wait_until(lambda: serving(sofa) == {"attic", "barn", "cellar", "unquantised"})

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


def test_a_clients_trace_gives_the_numbers_of_the_same_weights_on_one_machine(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the nodes that the killed one left, and no unquantised one among them."""
    whole: Any = AutoModelForCausalLM.from_pretrained(checkpoint_dir(), dtype=torch.float32).eval()
    put_in_blocks(whole, "int8")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_dir())
    local = TransformersModel(whole, task="text-generation", tokenizer=tokenizer)
    hearth = [
        start_node(name, "--layers", layers, "--quant", "int8")
        for name, layers in (("loft", "0-3"), ("porch", "4-7"), ("den", "none"))
    ]
    for node in hearth:
        node.wait_ready()
    den = hearth[-1]
    wait_until(lambda: {"loft", "porch"} <= serving(den))
    client.configure(monkeypatch, HOST=den.url, APIKEY=den.record.api_key)
    monkeypatch.setitem(huggingface._ID_CACHE, str(checkpoint_dir()), "builtin")
    model = client.model()
    with model.trace("The attic is", remote=True):
        hidden = model.model.layers[2].output.save()
        model.model.layers[5].output[:] = hidden * 0.5
        after = model.model.layers[6].output.save()
    with local.trace("The attic is"):
        here = local.model.layers[2].output.save()
        local.model.layers[5].output[:] = here * 0.5
        after_here = local.model.layers[6].output.save()
    torch.testing.assert_close(hidden, here, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after, after_here, rtol=1e-4, atol=1e-4)
