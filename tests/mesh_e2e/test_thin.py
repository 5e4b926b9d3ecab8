"""An asker without embedding and head: the first and the last hop run them."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from mesh.errors import NoRoute
from mesh.models.builtin import checkpoint_dir
from mesh.models.pooling import Pooling
from mesh.types import LayerRange, ModelId, PromptPiece, SamplingParams, TokenDelta, WireDtype
from tests import secure
from tests.checkpoints import make_checkpoint
from tests.mesh_e2e.spread import Spread, asking, greedy, hugging_face, loads_of, split

COUNT = 40
FAMILIES = {"builtin": 8, "gpt2": 6}
"""And one whose position embedding is with the ends, and whose head is tied to the embedding."""
pytestmark = pytest.mark.asyncio(loop_scope="module")

Pair = tuple[Path, int, Spread, Spread]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pairs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Pair]]:
    """Of each model: where it is, how many layers it has, who holds its ends, and who does not."""
    root = tmp_path_factory.mktemp("thin")
    directories = {
        name: checkpoint_dir()
        if name == "builtin"
        else make_checkpoint(root / name, name, layers=6)
        for name in FAMILIES
    }
    loads = [
        load
        for name, layers in FAMILIES.items()
        for load in loads_of(
            directories[name], [*split(layers, 1), *split(layers, 3)], ModelId(name)
        )
    ]
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(secure.hosting(root / "cache", *loads))
        made = {}
        for name, layers in FAMILIES.items():
            thick, thin = [
                await stack.enter_async_context(
                    asking(host, directories[name], ModelId(name), root / "cache", thin=which)
                )
                for which in ("never", "always")
            ]
            made[name] = directories[name], layers, thick, thin
        yield made


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("hops", [1, 3])
async def test_a_thin_asker_says_what_hugging_face_says(
    name: str, hops: int, pairs: dict[str, Pair]
) -> None:
    """Greedy, also where drafts are verified; its whole rows are those of the head here, too."""
    directory, layers, _, thin = pairs[name]
    thin.draft_worth = 0.0
    assert thin.model.ends is None
    await thin.use(split(layers, hops))
    prompt = [40 + i for i in range(5)] * 29  # more than a chunk
    ids, logits = hugging_face(directory, prompt, COUNT)
    done = await thin.generate(greedy(prompt, COUNT))
    assert list(done.token_ids) == ids
    assert done.drafted_tokens > 0
    ours = await thin.logits(prompt, ids)
    assert (ours - logits).abs().max() <= 1e-4


@pytest.mark.parametrize("wire", [WireDtype.FP32, WireDtype.FP16])
async def test_a_seed_gives_the_same_tokens_whoever_holds_the_ends(
    wire: WireDtype, pairs: dict[str, Pair]
) -> None:
    """The last of these draws from the whole vocabulary, again and again beyond the candidates."""
    _, layers, thick, thin = pairs["builtin"]
    spans: list[LayerRange] = split(layers, 3)
    for sampling in (
        SamplingParams(temperature=0.8, top_k=20, seed=1),
        SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.3, seed=2, logprobs=3),
        SamplingParams(temperature=0.7, presence_penalty=1.5, logit_bias=((40, 9.0),), seed=2),
        SamplingParams(temperature=2.5, seed=3),
    ):
        request = replace(
            greedy([40 + i for i in range(24)], 1),
            sampling=replace(sampling, max_tokens=COUNT, ignore_eos=True),
        )
        said = []
        for mesh in (thick, thin):
            await mesh.use(spans)
            said.append((await mesh.generate(request, wire)).token_ids)
        assert said[0] == said[1]


async def test_a_schema_is_followed_whoever_holds_the_ends(pairs: dict[str, Pair]) -> None:
    """Where the strongest candidates of a hop are not allowed, or chance decides, it gives all
    logits; guesses that the schema does not allow are not taken."""
    _, layers, thick, thin = pairs["builtin"]
    words = {"type": "array", "items": {"enum": ["hearth", "kettle"]}, "minItems": 6, "maxItems": 6}
    for sampling in (
        SamplingParams(),
        SamplingParams(repetition_penalty=1.3, logprobs=2),
        SamplingParams(temperature=0.9, top_p=0.9, seed=4),
    ):
        request = replace(
            greedy([40 + i for i in range(24)], 1),
            sampling=replace(sampling, max_tokens=200),
            schema={
                "type": "object",
                "properties": {"words": words},
                "required": ["words"],
                "additionalProperties": False,
            },
        )
        said = []
        for mesh, worth in itertools.product((thick, thin), (0.0, 99.0)):
            mesh.draft_worth = worth
            await mesh.use(split(layers, 3))
            done = await mesh.generate(request)
            assert done.finish_reason == "stop"
            said.append(done.token_ids)
        assert len(set(said)) == 1
        found = json.loads(b"".join(map(thick.model.text.token_bytes, said[0])))
        assert len(found["words"]) == 6


async def test_what_a_schema_leaves_no_choice_in_goes_through_the_hops_together(
    pairs: dict[str, Pair],
) -> None:
    """Nothing of it was said before, so nothing else guesses it."""
    _, layers, *both = pairs["builtin"]
    schema = {"const": "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich."}
    request = replace(greedy([40 + i for i in range(24)], 200), schema=schema)
    request = replace(request, sampling=SamplingParams(max_tokens=200))
    for mesh in both:
        mesh.draft_worth = 0.0
        await mesh.use(split(layers, 3))
        done = await mesh.generate(request)
        text = b"".join(map(mesh.model.text.token_bytes, done.token_ids)).decode()
        assert json.loads(text) == schema["const"]
        assert done.accepted_tokens == done.drafted_tokens > done.completion_tokens / 2


@pytest.mark.parametrize("name", FAMILIES)
async def test_prompts_are_scored_as_hugging_face_scores_them_whoever_runs_the_head(
    name: str, pairs: dict[str, Pair]
) -> None:
    """Over several chunks and hops, whatever the wire's dtype is otherwise; what is likely, and
    tokens that are not among the strongest 64."""
    directory, layers, *both = pairs[name]
    prompt = [30 + i * i % 300 for i in range(150)]
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = whole(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    sampling = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=5)
    request = replace(greedy(prompt, 1), sampling=sampling, echo=True)
    for mesh in both:
        await mesh.use(split(layers, 3))
        frames = [frame async for frame in mesh.chat(request, WireDtype.FP16)]
        scored = [e for f in frames if isinstance(f, PromptPiece) for e in f.logprobs]
        assert [each.token_id for each in scored] == prompt
        values = torch.tensor([each.logprob for each in scored[1:]])
        wanted = expected[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert (values - wanted).abs().max() <= 1e-4
        top = expected[:-1].topk(5)
        rivals = [[(token, value) for token, _, value in each.top] for each in scored[1:]]
        assert [[t for t, _ in row] for row in rivals] == top.indices.tolist()
        found = torch.tensor([[value for _, value in row] for row in rivals])
        assert (found - top.values).abs().max() <= 1e-4
        assert sum(len(f.logprobs) for f in frames if isinstance(f, TokenDelta)) == 1
    ranks = (expected[:-1] > wanted[:, None]).sum(-1)
    assert (ranks >= 64).any()


@asynccontextmanager
async def embedding(spread: Spread, kind: str) -> AsyncIterator[Spread]:
    """The same for its model as one that was made to embed texts."""
    model = replace(spread.model, pooling=Pooling(kind))
    made = Spread(model, spread.host, spread.model_id)
    try:
        yield made
    finally:
        await made.close()


@pytest.mark.parametrize("kind", ["last", "mean"])
async def test_the_last_hop_runs_the_final_norm_for_embeddings(
    kind: str, pairs: dict[str, Pair]
) -> None:
    _, layers, *askers = pairs["gpt2"]
    request = replace(greedy([40 + i for i in range(200)], 0), embeds=True)
    found = []
    for each in askers:
        async with embedding(each, kind) as asker:
            await asker.use(split(layers, 3))
            vector = (await asker.generate(request)).embedding
        found.append(torch.frombuffer(bytearray(vector), dtype=torch.float32))
    assert torch.allclose(*found, atol=1e-6)


async def test_a_host_that_runs_no_norm_for_others_is_asked_for_no_embedding(
    pairs: dict[str, Pair],
) -> None:
    """As those of earlier versions, which would not know the question."""
    _, layers, _, thin = pairs["gpt2"]
    async with embedding(thin, "last") as asker:
        await asker.use(split(layers, 1))
        (shard,) = asker.candidates(asker.model_id)
        await asker.use([])
        asker.offer(replace(shard.descriptor, norms=False))
        with pytest.raises(NoRoute, match="does not run for others"):
            await asker.generate(replace(greedy([40, 41], 0), embeds=True))
        assert len((await asker.generate(greedy([40, 41], 3))).token_ids) == 3
