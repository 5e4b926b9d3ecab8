"""A logit lens over two real hops against Hugging Face's hidden states on the same weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mesh.clock import SystemClock
from mesh.pipeline.checkpoint import load_asker
from mesh.pipeline.commands import AskerOptions
from mesh.pipeline.hop import Patience
from mesh.pipeline.lens import LensSettings, LogitLens
from mesh.pipeline.links import HopLinks
from mesh.pipeline.watch.oversight import Oversight
from mesh.routing.cover import Candidate, CoverRules
from mesh.routing.router import ShardRouter
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import GenerationRequest, LayerRange, ModelId
from tests import secure
from tests.checkpoints import make_checkpoint
from tests.mesh_e2e.spread import MODEL

LAYERS = 4
HALVES = (LayerRange(0, 2), LayerRange(2, 4))
MESSAGES = ({"role": "user", "content": "Who reads to the cat?"},)
BEGUN = "Anna reads"
TOP = 5


class Served:
    """The shards of one process, as the router's store."""

    def __init__(self, host: ShardSupervisor) -> None:
        self._host = host

    def candidates(self, _model_id: ModelId) -> list[Candidate]:
        return [Candidate(hosted.descriptor, 0) for hosted in self._host.shards.values()]


async def over_two_hops(directory: Path, cache: Path) -> dict[str, Any]:
    loads = (
        {"directory": str(directory), "model_id": MODEL, "layers": str(span), "dtype": "fp32",
         "advertise_host": "127.0.0.1"}
        for span in HALVES
    )  # fmt: skip
    async with secure.hosting(cache, *loads) as host:
        options = AskerOptions("fp32", "cpu", 1, cache)
        model, _ = await asyncio.to_thread(load_asker, directory, MODEL, options)
        router, links = ShardRouter(Served(host), CoverRules()), HopLinks(secure.dial)
        oversight = Oversight(SystemClock(), ceiling_s=30.0)
        lens = LogitLens(model, links, router, oversight, Patience(), LensSettings(30.0))
        request = GenerationRequest("r", MODEL, messages=MESSAGES, begun=BEGUN)
        try:
            prompt = await asyncio.to_thread(model.text.prompt_ids, request, None)
            found = await lens.read(request, prompt, TOP)
        finally:
            await links.close()
        return found


def whole(directory: Path) -> tuple[int, list[list[tuple[str, float]]]]:
    """The same of one process that holds the whole model, by its own final norm and head."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = tokenizer.apply_chat_template(list(MESSAGES), add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text + BEGUN, add_special_tokens=False, return_tensors="pt").input_ids
    norm = model.transformer.ln_f if hasattr(model, "transformer") else model.model.norm
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
        # The last of them has been through the norm already.
        normed = [*(norm(state[0, -1]) for state in states[1:-1]), states[-1][0, -1]]
        logits = [model.lm_head(state) for state in normed]
    cap = getattr(model.config, "final_logit_softcapping", None)
    scale = getattr(model.config, "logits_scaling", 1.0)
    said = []
    for row in logits:
        capped = (cap * torch.tanh(row / cap) if cap else row) / scale
        values, tokens = capped.log_softmax(-1).topk(TOP)
        pairs = zip(tokens.tolist(), values.tolist(), strict=True)
        said.append([(tokenizer.decode([token]), value) for token, value in pairs])
    return ids.shape[1], said


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "granite"])
async def test_layers_say_what_hugging_face_has_in_its_hidden_states(
    family: str, tmp_path: Path
) -> None:
    directory = make_checkpoint(tmp_path / "model", family, layers=LAYERS)
    found = await over_two_hops(directory, tmp_path / "cache")
    length, expected = whole(directory)
    assert found["prompt_tokens"] == length
    assert len(found["layers"]) == LAYERS == len(expected)
    for layer, wanted in zip(found["layers"], expected, strict=True):
        assert [one["token"] for one in layer["top"]] == [token for token, _ in wanted]
        values = torch.tensor([one["logprob"] for one in layer["top"]])
        assert torch.allclose(values, torch.tensor([v for _, v in wanted]), atol=1e-4)
