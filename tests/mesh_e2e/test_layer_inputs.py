"""A model whose layers take numbers of their own beside hidden states, and see keys of each other:
Gemma 4 E2B in small."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from mesh.clock import SystemClock
from mesh.pipeline.commands import Thin
from mesh.pipeline.hop import Patience
from mesh.pipeline.lens import LensSettings, LogitLens
from mesh.pipeline.links import HopLinks
from mesh.pipeline.watch.oversight import Oversight
from mesh.routing.cover import CoverRules
from mesh.routing.router import ShardRouter
from mesh.types import LayerRange, ModelId, WireDtype
from tests import secure
from tests.checkpoints import make_checkpoint
from tests.mesh_e2e.spread import Spread, asking_both_ways, greedy, hugging_face, spread

LAYERS, JOINED, COUNT = 8, 2, 40
WAYS = {
    "one hop": [LayerRange(0, LAYERS)],
    "two hops": [LayerRange(0, JOINED), LayerRange(JOINED, LAYERS)],
    "three hops": [LayerRange(0, 1), LayerRange(1, JOINED), LayerRange(JOINED, LAYERS)],
    # Of the second only what stands behind the first, of which it is then not the beginning.
    "two of which one is a part": [LayerRange(0, 1), LayerRange(0, LAYERS)],
}
PROMPT = [5 + i for i in range(7)] * 29
"""More than a chunk, and than a window."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def askers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[Thin, Spread]]:
    """Who holds the model's ends, and who does not."""
    root = tmp_path_factory.mktemp("given")
    directory = make_checkpoint(root / "model", "gemma4_e", layers=LAYERS)
    ways, model_id = WAYS.values(), ModelId("given")
    async with asking_both_ways(directory, ways, model_id, root / "cache") as found:
        yield found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    root: Path = tmp_path_factory.mktemp("whole")
    directory = make_checkpoint(root / "model", "gemma4_e", layers=LAYERS)
    return hugging_face(directory, PROMPT, COUNT)[0]


@pytest.mark.parametrize("thin", ["never", "always"])
@pytest.mark.parametrize("way", WAYS)
async def test_hops_say_what_hugging_face_says(
    way: str, thin: Thin, askers: dict[Thin, Spread], expected: list[int]
) -> None:
    mesh = askers[thin]
    mesh.draft_worth = 0.0
    await mesh.use(WAYS[way])
    for wire in (WireDtype.FP32, WireDtype.FP16):
        done = await mesh.generate(greedy(PROMPT, COUNT), wire)
        assert list(done.token_ids) == expected
        assert done.drafted_tokens > 0


async def test_a_model_with_several_hidden_states_says_what_hugging_face_says(
    tmp_path: Path,
) -> None:
    """Gemma 3n in small, to who holds its ends and who does not."""
    directory = make_checkpoint(tmp_path / "model", "gemma3n", layers=LAYERS)
    said = hugging_face(directory, PROMPT, COUNT)[0]
    way, cache = WAYS["three hops"], tmp_path / "cache"
    async with asking_both_ways(directory, [way], ModelId("given"), cache) as askers:
        for mesh in askers.values():
            await mesh.use(way)
            done = await mesh.generate(greedy(PROMPT, COUNT), WireDtype.FP16)
            assert list(done.token_ids) == said


@pytest.mark.parametrize("quant", ["int8", "int4"])
async def test_in_few_bits_it_says_the_same_over_any_hops(quant: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "gemma4_e", layers=LAYERS)
    spans = [span for way in WAYS.values() for span in way]
    async with spread(directory, spans, tmp_path / "cache", quant=quant) as mesh:
        logits, ids = [], []
        for way in WAYS.values():
            await mesh.use(way)
            ids.append((await mesh.generate(greedy(PROMPT, COUNT))).token_ids)
            logits.append(await mesh.logits(PROMPT, list(ids[0])))
        assert ids == [ids[0]] * len(WAYS)
        assert all(torch.equal(each, logits[0]) for each in logits)
        descriptors = [hosted.descriptor for hosted in mesh.host.shards.values()]
        assert {each.dtype for each in descriptors} == {quant}
        assert all("onnxruntime" in each.determinism_class for each in descriptors)


async def test_a_lens_reads_layers_that_see_keys_of_each_other(
    askers: dict[Thin, Spread], tmp_path: Path
) -> None:
    """Each behind those before it, as no shard computes it alone."""
    mesh = askers["never"]
    await mesh.use(WAYS["three hops"])
    oversight = Oversight(SystemClock(), ceiling_s=30.0)
    links, router = HopLinks(secure.dial), ShardRouter(mesh, CoverRules())
    lens = LogitLens(mesh.model, links, router, oversight, Patience(), LensSettings(30.0))
    found = await lens.read(replace(greedy(PROMPT, 1), model=ModelId("given")), PROMPT, 1)
    await links.close()
    model = AutoModelForCausalLM.from_pretrained(
        make_checkpoint(tmp_path / "model", "gemma4_e", layers=LAYERS), dtype=torch.float32
    )
    with torch.no_grad():
        states = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
        heads = [model.lm_head(model.model.norm(each[:, -1])) for each in states[1:-1]]
        heads.append(model.lm_head(states[-1][:, -1]))  # it has been through the norm
    tokens = [mesh.model.text.token_bytes(int(each.argmax())).decode(errors="replace")
              for each in heads]  # fmt: skip
    assert [layer["top"][0]["token"] for layer in found["layers"]] == tokens
    assert len(set(tokens)) > 2
