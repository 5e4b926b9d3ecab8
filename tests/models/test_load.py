"""Spans and ends compute what the whole Hugging Face model computes, from their tensors alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mesh.errors import BadCheckpoint
from mesh.models import convert
from mesh.models.load import load_ends, load_skeleton, load_span
from mesh.models.manifest import Manifest, read_manifest
from mesh.models.pages import Pages
from mesh.models.progress import Counted, Progress
from mesh.types import LayerRange
from tests.checkpoints import FAMILIES, MORE_FAMILIES, WINDOW
from tests.models.chain import CPU, prompt_chunks, run_parts, run_whole
from tests.models.conftest import Checkpoint

CHUNKS = (128, 72)
DECODE = 16
LAYERS = 8
ALL_CUTS = ([0, 8], [0, 3, 8], [0, 1, 5, 8], [0, 2, 3, 6, 8], [*range(9)])


@pytest.mark.parametrize("family", FAMILIES + MORE_FAMILIES)
def test_chain_of_spans_equals_the_whole_model(checkpoint: Checkpoint, family: str) -> None:
    directory = checkpoint(family, layers=LAYERS)
    manifest = read_manifest(directory)
    chunks = prompt_chunks(CHUNKS)
    expected, expected_ids = run_whole(directory, chunks, DECODE)
    assert len(set(expected_ids)) > 3, "the checkpoint generates too little to compare"
    # By transformers alone, Jamba's rows one by one are as far from the same rows at once.
    allowed = 3e-4 if family == "jamba" else 1e-4
    for cuts in ALL_CUTS:
        logits, ids = run_parts(manifest, cuts, chunks, DECODE)
        assert ids == expected_ids
        for part, whole in zip(logits, expected, strict=True):
            torch.testing.assert_close(part, whole, atol=allowed, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_bfloat16_spans_give_the_same_bits(checkpoint: Checkpoint, family: str) -> None:
    # A width whose root is no power of two: embedding scales are rounded to the dtype.
    directory = checkpoint(family, layers=3, hidden=80, dtype="bfloat16")
    manifest = read_manifest(directory)
    ids = prompt_chunks((WINDOW + 10,))[0]
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    ends = load_ends(manifest, dtype=torch.bfloat16, device=CPU)
    hidden = ends.embed(ids, 0)
    for layers in (LayerRange(0, 1), LayerRange(1, 3)):
        span = load_span(manifest, layers, dtype=torch.bfloat16, device=CPU)
        places = torch.arange(ids.shape[1]).unsqueeze(0)
        hidden = span.module(
            inputs_embeds=hidden, position_ids=places, use_cache=False
        ).last_hidden_state
    assert torch.equal(ends.logits(hidden), whole(ids).logits)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_prompt_reaches_past_the_sliding_window(checkpoint: Checkpoint, family: str) -> None:
    # Without the window, the comparison above would prove nothing about it.
    directory = checkpoint(family, layers=LAYERS)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    ids = prompt_chunks((WINDOW * 2,))[0]
    windowed = model(ids).logits
    config = json.loads((directory / "config.json").read_text())
    config["sliding_window"] = 4096
    config["layer_types"] = ["full_attention"] * LAYERS
    wide = AutoModelForCausalLM.from_pretrained(
        directory, config=type(model.config).from_dict(config)
    ).eval()
    assert not torch.allclose(wide(ids).logits[:, -1], windowed[:, -1], atol=1e-3)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt", "opt_projected"])
def test_tied_and_untied_heads(checkpoint: Checkpoint, family: str, tied: bool) -> None:
    directory = checkpoint(family, layers=3, tied=tied)
    manifest = read_manifest(directory)
    assert manifest.tied is tied
    chunks = prompt_chunks((20,))
    expected, ids = run_whole(directory, chunks, 4)
    logits, got = run_parts(manifest, [0, 2, 3], chunks, 4)
    assert got == ids
    torch.testing.assert_close(logits[0], expected[0], atol=1e-4, rtol=0)


def stored_twice(directory: Path, copied: Path) -> Manifest:
    """A checkpoint whose head is stored and equals its embedding."""
    shutil.copytree(directory, copied)
    weights = load_file(copied / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    return read_manifest(copied)


@pytest.mark.parametrize("tied", [True, False])
def test_who_may_change_the_weights_has_the_head_and_embedding_of_the_config(
    checkpoint: Checkpoint, tmp_path: Path, tied: bool
) -> None:
    manifest = stored_twice(checkpoint("qwen2", layers=3, tied=tied), tmp_path / "twice")
    model = load_skeleton(manifest, dtype=torch.float32, device=CPU)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert torch.equal(head, embedding)
    embedding[5] += 1
    assert torch.equal(head, embedding) is tied


def test_a_tied_head_shares_the_embedding_even_when_both_are_stored(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    manifest = stored_twice(checkpoint("qwen2", layers=3, tied=True), tmp_path / "twice")
    ends = load_ends(manifest, dtype=torch.float32, device=CPU)
    single = manifest.tensors["lm_head.weight"].nbytes
    assert ends.bytes_read == manifest.ends_bytes - single
    storages = {p.data_ptr() for p in ends.parameters() if p.dim() == 2}
    assert len(storages) == 1


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_sharded_checkpoint(checkpoint: Checkpoint, family: str) -> None:
    directory = checkpoint(family, layers=4, sharded=True)
    manifest = read_manifest(directory)
    assert len({entry.file for entry in manifest.tensors.values()}) > 1
    chunks = prompt_chunks((20,))
    expected, ids = run_whole(directory, chunks, 4)
    logits, got = run_parts(manifest, [0, 3, 4], chunks, 4)
    assert got == ids
    torch.testing.assert_close(logits[0], expected[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_span_reads_its_own_tensors_only(checkpoint: Checkpoint, family: str) -> None:
    manifest = read_manifest(checkpoint(family, layers=LAYERS))
    layers = LayerRange(2, 5)
    span = load_span(manifest, layers, dtype=torch.float32, device=CPU)
    assert span.bytes_read == sum(manifest.layer_bytes[2:5])
    assert span.tensors_read == len(manifest.layer_tensors(layers))
    held = sum(weight.nbytes for weight in span.module.state_dict().values())
    assert held == span.bytes_read
    ends = load_ends(manifest, dtype=torch.float32, device=CPU)
    assert ends.bytes_read == manifest.ends_bytes
    total = sum(entry.nbytes for entry in manifest.tensors.values())
    assert ends.bytes_read + sum(manifest.layer_bytes) == total


def test_a_span_needs_no_other_layers_on_disk(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = checkpoint("llama", layers=LAYERS)
    manifest = read_manifest(directory)
    expected = load_span(manifest, LayerRange(2, 4), dtype=torch.float32, device=CPU)
    # Overwrite every byte that does not belong to layers 2 and 3.
    damaged = shutil.copytree(directory, tmp_path / "damaged")
    file = damaged / "model.safetensors"
    content = bytearray(file.read_bytes())
    kept = {entry.name for entry in manifest.layer_tensors(LayerRange(2, 4))}
    for name, entry in manifest.tensors.items():
        if name not in kept:
            content[entry.offset : entry.offset + entry.nbytes] = b"\xff" * entry.nbytes
    file.write_bytes(content)
    span = load_span(read_manifest(damaged), LayerRange(2, 4), dtype=torch.float32, device=CPU)
    for mine, theirs in zip(span.module.parameters(), expected.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_weights_are_converted_and_rotary_frequencies_stay_fp32(checkpoint: Checkpoint) -> None:
    manifest = read_manifest(checkpoint("llama", layers=3, dtype="bfloat16"))
    assert manifest.dtype == "bfloat16"
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        span = load_span(manifest, LayerRange(0, 2), dtype=dtype, device=CPU)
        assert {p.dtype for p in span.module.parameters()} == {dtype}
        assert span.module.rotary_emb.inv_freq.dtype == torch.float32
        assert not span.module.training
        assert not any(p.requires_grad for p in span.module.parameters())
        ends = load_ends(manifest, dtype=dtype, device=CPU)
        hidden = ends.embed(torch.tensor([[5, 6]]), 0)
        assert hidden.shape == (1, 2, ends.hidden_size)
        assert hidden.dtype == dtype
        assert ends.logits(hidden).shape == (1, 2, ends.vocab_size)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_weights_in_their_own_dtype_are_not_copied(checkpoint: Checkpoint) -> None:
    manifest = read_manifest(checkpoint("llama", layers=3))
    span = load_span(manifest, LayerRange(0, 1), dtype=torch.float32, device=CPU)
    weight = span.module.layers[0].mlp.up_proj.weight
    mapped = [
        tuple(int(bound, 16) for bound in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(manifest.directory / "model.safetensors") in line
    ]
    assert any(low <= weight.data_ptr() < high for low, high in mapped)


def test_a_file_larger_than_the_memory_is_mapped(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    size = 2 * (psutil.virtual_memory().total + psutil.swap_memory().total)
    with file.open("wb") as stream:
        stream.truncate(size)  # takes no room on the disk
    pages = Pages.of_file(file)
    assert len(pages) == size
    assert pages[size - 1] == 0


def test_names_that_need_no_conversion_cost_none(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_table(*_: object, **__: object) -> None:
        raise AssertionError("the table of every architecture was built")

    monkeypatch.setattr(convert, "get_model_conversion_mapping", build_table)
    manifest = read_manifest(checkpoint("llama", layers=3))
    load_span(manifest, LayerRange(0, 1), dtype=torch.float32, device=CPU)
    load_ends(manifest, dtype=torch.float32, device=CPU)


def test_base_model_saved_without_its_prefix(checkpoint: Checkpoint, tmp_path: Path) -> None:
    # gpt2 on the hub: no `transformer.` before the names, and causal masks stored as buffers.
    directory = checkpoint("gpt2", layers=3)
    bare = shutil.copytree(directory, tmp_path / "bare")
    weights = load_file(directory / "model.safetensors")
    renamed = {name.removeprefix("transformer."): value for name, value in weights.items()}
    renamed |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(3)}
    save_file(renamed, bare / "model.safetensors", metadata={"format": "pt"})
    chunks = prompt_chunks((20,))
    expected, _ = run_whole(directory, chunks, 0)
    logits, _ = run_parts(read_manifest(bare), [0, 1, 3], chunks, 0)
    torch.testing.assert_close(logits[0], expected[0], atol=1e-4, rtol=0)


MULTIMODAL = (
    ("gemma3", "language_model.model.", "Gemma3", {"num_hidden_layers": 4}),
    ("gemma3", "model.language_model.", "Gemma3", {"num_hidden_layers": 4}),
    ("qwen3_5", "model.language_model.", "Qwen3_5", {"depth": 2}),
)


@pytest.mark.parametrize(("family", "layout", "name", "vision"), MULTIMODAL)
def test_text_half_of_a_multimodal_checkpoint(
    checkpoint: Checkpoint,
    tmp_path: Path,
    family: str,
    layout: str,
    name: str,
    vision: dict[str, int],
) -> None:
    directory = checkpoint(family, layers=4)
    text = json.loads((directory / "config.json").read_text())
    kind = getattr(transformers, f"{name}Config")
    whole = kind(text_config=text, vision_config=vision).to_dict()
    whole["architectures"] = [f"{name}ForConditionalGeneration"]
    multimodal = tmp_path / "multimodal"
    multimodal.mkdir()
    (multimodal / "config.json").write_text(json.dumps(whole))
    weights = {
        name.replace("model.", layout, 1): value
        for name, value in load_file(directory / "model.safetensors").items()
    }
    for layer in range(4):
        weights[f"vision_tower.vision_model.encoder.layers.{layer}.w"] = torch.ones(500)
    weights["mtp.fc.weight"] = torch.ones(64, 128)  # what guesses several tokens is passed over
    weights["mtp.layers.0.mlp.up_proj.weight"] = torch.ones(128, 64)
    save_file(weights, multimodal / "model.safetensors", metadata={"format": "pt"})
    manifest = read_manifest(multimodal)
    assert manifest.layer_bytes == read_manifest(directory).layer_bytes
    chunks = prompt_chunks((80,))
    expected, _ = run_whole(directory, chunks, 0)
    logits, _ = run_parts(manifest, [0, 1, 4], chunks, 0)
    torch.testing.assert_close(logits[0], expected[0], atol=1e-4, rtol=0)


def test_layers_beyond_the_model_are_refused(checkpoint: Checkpoint) -> None:
    manifest = read_manifest(checkpoint("llama", layers=3))
    with pytest.raises(BadCheckpoint, match="which has 3"):
        load_span(manifest, LayerRange(2, 4), dtype=torch.float32, device=CPU)


def test_missing_tensor_inside_a_layer_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint("llama", layers=3), tmp_path / "holed")
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    manifest = read_manifest(directory)
    load_span(manifest, LayerRange(0, 1), dtype=torch.float32, device=CPU)
    with pytest.raises(BadCheckpoint, match=r"lack tensor layers\.0\.mlp\.up_proj\.weight"):
        load_span(manifest, LayerRange(1, 2), dtype=torch.float32, device=CPU)


def test_missing_head_is_not_replaced_by_the_embedding(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = shutil.copytree(checkpoint("llama", layers=3, tied=False), tmp_path / "headless")
    weights = load_file(directory / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"lack tensor lm_head\.weight"):
        load_ends(read_manifest(directory), dtype=torch.float32, device=CPU)


def test_weights_of_another_shape_than_the_config_says(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = shutil.copytree(checkpoint("llama", layers=3), tmp_path / "other")
    config = json.loads((directory / "config.json").read_text())
    config["intermediate_size"] = 96
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadCheckpoint, match="size mismatch"):
        load_span(read_manifest(directory), LayerRange(0, 1), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 0}, {"head_dim": (1 << 29) + 4}])
def test_a_config_of_no_model_is_told_so_before_it_takes_memory(
    changes: dict[str, int], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = shutil.copytree(checkpoint("llama", layers=3), tmp_path / "odd")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(BadCheckpoint, match="describes no llama model"):
        load_span(read_manifest(directory), LayerRange(0, 1), dtype=torch.float32, device=CPU)


def test_every_byte_that_is_read_is_counted_once(checkpoint: Checkpoint) -> None:
    manifest = read_manifest(checkpoint("llama", layers=3, dtype="bfloat16"))
    seen = Steps()
    span = load_span(manifest, LayerRange(0, 2), dtype=torch.float32, device=CPU, progress=seen)
    assert seen.steps[0] == ("reading", 0, span.bytes_read)
    assert seen.steps[-1] == ("reading", span.bytes_read, span.bytes_read)
    assert len(seen.steps) == span.tensors_read + 1
    ends = load_ends(manifest, dtype=torch.float32, device=CPU, progress=seen)
    assert seen.now == ("reading", ends.bytes_read, ends.bytes_read)


class Steps(Progress):
    """All that it ever said."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Counted] = []

    def begin(self, phase: str, total_bytes: int) -> None:
        super().begin(phase, total_bytes)
        self.steps.append(self.now)

    def add(self, count: int) -> None:
        super().add(count)
        self.steps.append(self.now)
