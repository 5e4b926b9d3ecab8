"""A model that turns long texts otherwise than short ones, all of them: Phi 4 mini in small."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from mesh.pipeline.commands import Thin
from mesh.types import LayerRange, ModelId, WireDtype
from tests.checkpoints import LONGROPE, make_checkpoint
from tests.mesh_e2e.spread import Spread, asking_both_ways, greedy, hugging_face, spread

LAYERS, COUNT, SHORT = 4, 40, int(LONGROPE["original_max_position_embeddings"])
WAYS = {
    "one hop": [LayerRange(0, LAYERS)],
    "three hops": [LayerRange(0, 1), LayerRange(1, 2), LayerRange(2, LAYERS)],
}
PROMPTS = {
    "short": [5 + i for i in range(7)] * 5,
    "becoming long": [7 + i for i in range(9)] * 15,
    "as long as short ones are": [5 + i % 11 for i in range(SHORT)],
    "long": [4 + i % 23 for i in range(2 * SHORT + 80)],  # several chunks
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


def made(directory: Path) -> Path:
    return make_checkpoint(directory, "phi4_mini", layers=LAYERS, hidden=256)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def askers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[Thin, Spread]]:
    """Who holds the model's ends, and who does not."""
    root = tmp_path_factory.mktemp("turned")
    directory, model_id = made(root / "model"), ModelId("turned")
    async with asking_both_ways(directory, WAYS.values(), model_id, root / "cache") as found:
        for asker in found.values():
            asker.draft_worth = 0.0
        yield found


@pytest.mark.parametrize("named", PROMPTS)
async def test_hops_say_what_hugging_face_says(
    named: str, askers: dict[Thin, Spread], tmp_path: Path
) -> None:
    prompt = PROMPTS[named]
    expected = hugging_face(made(tmp_path / "model"), prompt, COUNT)[0]
    for way in WAYS.values():
        for mesh in askers.values():
            await mesh.use(way)
            done = await mesh.generate(greedy(prompt, COUNT))
            assert list(done.token_ids) == expected
            # Again, and further, by what was kept of it.
            done = await mesh.generate(greedy(prompt + expected[:-7], 7), WireDtype.FP32)
            assert list(done.token_ids) == expected[-7:]


async def test_a_conversation_goes_on_when_it_becomes_long(
    askers: dict[Thin, Spread], tmp_path: Path
) -> None:
    """What is kept of it was turned otherwise, and is of no use then; nor the other way round."""
    mesh, directory = askers["never"], made(tmp_path / "model")
    await mesh.use(WAYS["three hops"])
    shorter, longer = PROMPTS["becoming long"], PROMPTS["becoming long"] * 2
    for prompt in (shorter, longer, [*shorter, 9], longer):
        expected = hugging_face(directory, prompt, 5)[0]
        assert list((await mesh.generate(greedy(prompt, 5))).token_ids) == expected


@pytest.mark.parametrize("quant", ["int8", "int4"])
async def test_in_few_bits_it_says_the_same_over_any_hops(quant: str, tmp_path: Path) -> None:
    spans = [span for way in WAYS.values() for span in way]
    directory = made(tmp_path / "model")
    async with spread(directory, spans, tmp_path / "cache", quant=quant) as mesh:
        descriptors = [hosted.descriptor for hosted in mesh.host.shards.values()]
        assert all("onnxruntime" in each.determinism_class for each in descriptors)
        for prompt in (PROMPTS["becoming long"], PROMPTS["long"]):
            said = []
            for way in WAYS.values():
                await mesh.use(way)
                said.append((await mesh.generate(greedy(prompt, COUNT))).token_ids)
            assert said[0] == said[1]
