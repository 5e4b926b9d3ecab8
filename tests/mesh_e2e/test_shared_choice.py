"""A model of whose layers some attend to what an earlier one has chosen: GLM 5 in small."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from mesh.clock import SystemClock
from mesh.pipeline.hop import Patience
from mesh.pipeline.lens import LensSettings, LogitLens
from mesh.pipeline.links import HopLinks
from mesh.pipeline.watch.oversight import Oversight
from mesh.routing.cover import CoverRules
from mesh.routing.router import ShardRouter
from mesh.types import LayerRange
from tests import secure
from tests.checkpoints import make_checkpoint
from tests.mesh_e2e.spread import Spread, greedy, hugging_face, spread

LAYERS, COUNT = 8, 24
WAYS = {
    "one hop": [LayerRange(0, LAYERS)],
    "three hops": [LayerRange(0, 1), LayerRange(1, 4), LayerRange(4, LAYERS)],
    # Of the second only what stands behind the first.
    "two of which one is a part": [LayerRange(0, 2), LayerRange(0, LAYERS)],
}
PROMPT = [5 + i * i % 71 for i in range(90)]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("choosing")
    return make_checkpoint(root / "model", "glm_moe_dsa_shared", layers=LAYERS)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(directory: Path) -> AsyncIterator[Spread]:
    spans = [span for way in WAYS.values() for span in way]
    async with spread(directory, spans, directory.parent / "cache") as found:
        yield found


async def test_hops_say_what_hugging_face_says(mesh: Spread, directory: Path) -> None:
    expected = hugging_face(directory, PROMPT, COUNT)[0]
    assert len({*expected}) > 3
    for way in WAYS.values():
        await mesh.use(way)
        done = await mesh.generate(greedy(PROMPT, COUNT))
        assert list(done.token_ids) == expected


async def test_a_lens_reads_each_layer_behind_the_one_that_chooses_for_it(
    mesh: Spread, directory: Path
) -> None:
    await mesh.use(WAYS["three hops"])
    oversight = Oversight(SystemClock(), ceiling_s=30.0)
    links, router = HopLinks(secure.dial), ShardRouter(mesh, CoverRules())
    lens = LogitLens(mesh.model, links, router, oversight, Patience(), LensSettings(30.0))
    model_id = mesh.model.model_id
    found = await lens.read(replace(greedy(PROMPT, 1), model=model_id), PROMPT, 1)
    await links.close()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        states = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
        heads = [model.lm_head(model.model.norm(each[:, -1])) for each in states[1:-1]]
        heads.append(model.lm_head(states[-1][:, -1]))  # it has been through the norm
    said = [int(each.argmax()) for each in heads]
    tokens = [mesh.model.text.token_bytes(each).decode(errors="replace") for each in said]
    assert [layer["top"][0]["token"] for layer in found["layers"]] == tokens
