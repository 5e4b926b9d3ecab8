"""Models whose layers take numbers of their own beside hidden states, and see keys of each other:
Gemma 4 E2B and E4B; and Gemma 3n, between whose layers there are several hidden states as well."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3nConfig,
    Gemma4Config,
    Gemma4TextConfig,
)
from transformers import Gemma4ForConditionalGeneration as WithImages

from mesh.errors import UnsupportedFamily
from mesh.interventions.skeleton import load_skeleton
from mesh.models.cuts import ANYWHERE, cuts_of
from mesh.models.families import family_of, family_of_config
from mesh.models.load import load_ends, load_span
from mesh.models.manifest import read_manifest
from mesh.types import LayerRange
from tests.checkpoints import make_checkpoint
from tests.models.chain import CPU, prompt_chunks, run_parts, run_whole
from tests.models.conftest import Checkpoint

LAYERS = 8
CUTS = ([0, 8], [0, 2, 8], [0, 1, 2, 8])


STREAMS = {"gemma4_e": 1, "gemma3n": 3}


@pytest.mark.parametrize("shared", [0, 4, 5])
@pytest.mark.parametrize("family", STREAMS)
def test_chain_of_spans_equals_the_whole_model(
    family: str, shared: int, checkpoint: Checkpoint
) -> None:
    directory = checkpoint(family, layers=LAYERS, num_kv_shared_layers=shared)
    manifest, chunks = read_manifest(directory), prompt_chunks((128, 72))
    followers = {0: range(0), 4: range(3, 8), 5: range(2, 8)}[shared]
    assert manifest.cuts.followers == {*followers}
    assert manifest.row_size == family_of(manifest).row_form.size == 64 * STREAMS[family] + 8 * 16
    expected, expected_ids = run_whole(directory, chunks, 16)
    assert len(set(expected_ids)) > 3
    more = [[*range(9)]] if not shared else []
    for cuts in (*CUTS, *more):
        if cuts[-2] in followers:
            continue
        logits, ids = run_parts(manifest, cuts, chunks, 16)
        assert ids == expected_ids
        for part, whole in zip(logits, expected, strict=True):
            torch.testing.assert_close(part, whole, atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("family", STREAMS)
def test_bfloat16_spans_give_the_same_bits(family: str, checkpoint: Checkpoint) -> None:
    directory = checkpoint(family, layers=LAYERS, hidden=80, dtype="bfloat16")
    manifest, ids = read_manifest(directory), prompt_chunks((70,))[0]
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    ends = load_ends(manifest, dtype=torch.bfloat16, device=CPU)
    rows, places = ends.embed(ids, 0), torch.arange(ids.shape[1]).unsqueeze(0)
    for layers in (LayerRange(0, 2), LayerRange(2, LAYERS)):
        span = load_span(manifest, layers, dtype=torch.bfloat16, device=CPU)
        rows = span.module(
            inputs_embeds=rows, position_ids=places, use_cache=False
        ).last_hidden_state
    assert torch.equal(ends.logits(rows), whole(ids).logits)


def test_the_text_of_a_model_for_images_with_weights_that_nothing_reads(tmp_path: Path) -> None:
    """Published ones have projections to keys for layers that see those of others."""
    text = AutoModelForCausalLM.from_pretrained(make_checkpoint(tmp_path / "text", "gemma4_e"))
    config = Gemma4Config(text_config=text.config.to_dict(), vision_config=None, audio_config=None)
    model: Any = WithImages(config).eval()
    model.model.language_model, model.lm_head = text.model, text.lm_head
    model.save_pretrained(tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    weights = load_file(file)
    prefix = "model.language_model.layers."
    assert f"{prefix}7.self_attn.k_proj.weight" not in weights
    for part in ("k_proj", "v_proj"):
        name = f"{prefix}{{}}.self_attn.{part}.weight"
        weights |= {name.format(7): torch.zeros_like(weights[name.format(3)])}
    save_file(weights, file, {"format": "pt"})
    chunks, cache = prompt_chunks((13, 7, 1)), DynamicCache(config=text.config)
    with torch.inference_mode():
        expected = [model(input_ids=ids, past_key_values=cache).logits for ids in chunks]
    manifest = read_manifest(tmp_path / "whole")
    assert manifest.row_size > manifest.hidden_size
    for cuts in CUTS:
        logits, _ = run_parts(manifest, cuts, chunks, 0)
        for part, whole in zip(logits, expected, strict=True):
            torch.testing.assert_close(part, whole, atol=1e-4, rtol=1e-4)


def test_the_text_of_gemma_3n_is_read_and_clients_are_told_what_its_images_take(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    directory = checkpoint("gemma3n", layers=LAYERS)
    text, weights = read_manifest(directory), load_file(directory / "model.safetensors")
    stored = {name.replace("model.", "model.language_model.", 1): weights[name] for name in weights}
    stored["model.vision_tower.timm_model.blocks.0.0.conv.weight"] = torch.zeros(4, 4, 1, 1)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    said = Gemma3nConfig(text_config=dict(text.config)).to_json_string(use_diff=False)
    (tmp_path / "config.json").write_text(said)
    manifest, chunks = read_manifest(tmp_path), prompt_chunks((13, 7, 1))
    assert manifest.row_size == text.row_size
    found, expected = (run_parts(each, CUTS[2], chunks, 2)[0] for each in (manifest, text))
    assert all(map(torch.equal, found, expected))
    if importlib.util.find_spec("timm") is None:
        with pytest.raises(UnsupportedFamily, match=r"Gemma3nForConditionalGeneration.* timm"):
            load_skeleton(manifest, dtype=torch.float32)


def test_the_last_layers_lie_together_from_the_first_whose_keys_are_seen() -> None:
    """As E2B's and E4B's published configs have them."""
    for layers, shared, every, first in ((35, 20, 5, 13), (42, 18, 6, 22)):
        kinds = ["full_attention" if not (i + 1) % every else "sliding_attention"
                 for i in range(layers)]  # fmt: skip
        config = Gemma4TextConfig(
            num_hidden_layers=layers, num_kv_shared_layers=shared, layer_types=kinds
        )
        said = config.to_dict()
        assert cuts_of(said, layers).followers == {*range(first + 1, layers)}
        assert cuts_of({"text_config": said}, layers) == cuts_of(said, layers)
        span = family_of_config(config).slice_config(LayerRange(first, layers))
        assert (span.num_kv_shared_layers, span.num_hidden_layers) == (shared, layers - first)
        del said["layer_types"]
        assert len(cuts_of(said, layers).followers) == layers - 1, "nothing tells which they are"
        assert cuts_of(said | {"num_kv_shared_layers": 0}, layers) == ANYWHERE
