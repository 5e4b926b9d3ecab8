"""Ends whose embedding stays in the blocks of its file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mesh.models.load import load_ends
from mesh.models.manifest import read_manifest
from mesh.shard.compiled.head import compile_head
from tests.gguf_files import write_gguf
from tests.models.chain import CPU
from tests.models.conftest import Checkpoint


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt2", "phi3"])
@pytest.mark.parametrize(("body", "ends"), [("Q8_0", "Q8_0"), ("Q8_0", "F16"), ("F16", "Q4_1")])
def test_they_give_what_decoded_ones_give(
    family: str, body: str, ends: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = checkpoint(family, layers=2)
    manifest = read_manifest(write_gguf(directory, tmp_path / "model.gguf", body, ends=ends))
    plain = load_ends(manifest, dtype=torch.float32, device=CPU)
    stored = load_ends(manifest, dtype=torch.float32, device=CPU, defer=True)
    ids = torch.tensor([[5, 9, 5, 300, 0]])
    hidden = plain.embed(ids, 3)
    assert torch.equal(stored.embed(ids, 3), hidden)
    assert (stored.deferred_head is not None) == (ends != "F16")
    assert stored.head.weight.is_meta == (ends != "F16")
    assert "int8" in compile_head(stored, manifest.weights_sha256, tmp_path / "cache", 1, "int8")
    expected, found = plain.logits(hidden), stored.logits(hidden)
    assert float((found - expected).norm() / expected.norm()) < 0.03
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
