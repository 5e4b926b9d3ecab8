"""Model types outside the tested list are compared with the whole model before they are used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers

import mesh
from mesh.errors import NotEnoughMemory, UnsupportedFamily
from mesh.models import proof
from mesh.models.cuts import cuts_of
from mesh.models.families import family_of, family_of_config
from mesh.models.load import load_span
from mesh.models.manifest import read_manifest
from mesh.types import LayerRange
from tests.models.chain import CPU, prompt_chunks, run_parts, run_whole
from tests.models.conftest import Checkpoint


@pytest.fixture(autouse=True)
def _forget_verdicts() -> None:
    proof.settled.clear()


@pytest.mark.parametrize(
    "family",
    ["stablelm", "starcoder2", "olmoe", "olmo_hybrid", "gpt_bigcode", "gpt_neo", "youtu"],
)
def test_standard_layout_is_proved_and_then_exact(
    checkpoint: Checkpoint, tmp_path: Path, family: str
) -> None:
    directory = checkpoint(family, layers=5)
    manifest = read_manifest(directory, cache_dir=tmp_path)
    assert not family_of_config(transformers.CONFIG_MAPPING[family]()).proven
    chunks = prompt_chunks((70, 30))
    expected, ids = run_whole(directory, chunks, 4)
    logits, got = run_parts(manifest, [0, 2, 5], chunks, 4)
    assert got == ids
    torch.testing.assert_close(logits[-1], expected[-1], atol=1e-4, rtol=0)
    (verdict,) = tmp_path.glob("proof-*.json")
    assert transformers.__version__ in verdict.name
    assert json.loads(verdict.read_text())["reason"] == ""


def test_a_twin_is_cut_where_its_model_may_be(checkpoint: Checkpoint) -> None:
    config = family_of(read_manifest(checkpoint("glm_moe_dsa_shared", layers=6))).config
    config.model_type = "glm_moe_dsa_of_tomorrow"
    family = family_of_config(config)
    assert not family.proven
    proof.require_proof(family, None)


def test_several_hidden_states_and_choices_that_layers_share_are_proved_together() -> None:
    family = family_of_config(transformers.HYV4Config(num_hidden_layers=6))
    assert family.row_form.streams == 4
    assert cuts_of(family.config.to_dict(), 6).followers == {2, 3, 4}
    assert cuts_of({"model_type": "hy_v4"}, 6).followers == {2, 3, 4}, "of a config without a list"
    proof.require_proof(family, None)


DISPROVED = {
    # It adds computed positions to whatever is embedded, in every span again.
    "ctrl": (transformers.CTRLConfig, {}, "differs from the whole"),
    # What it embeds with has a norm of its own.
    "modernbert-decoder": (transformers.ModernBertDecoderConfig, {}, "not embedding, layers, norm"),
}


@pytest.mark.parametrize("name", DISPROVED)
def test_what_differs_is_refused_with_the_reason(name: str) -> None:
    kind, settings, reason = DISPROVED[name]
    config = kind(num_hidden_layers=4, hidden_size=64, num_attention_heads=4, **settings)
    with pytest.raises(UnsupportedFamily, match=reason) as caught:
        proof.require_proof(family_of_config(config), None)
    assert caught.value.code == "bad_request"


def test_verdict_is_reached_once_and_kept(tmp_path: Path) -> None:
    family = family_of_config(transformers.CTRLConfig(n_layer=3, n_embd=64, n_head=4))
    with pytest.raises(UnsupportedFamily, match="differs from the whole"):
        proof.require_proof(family, tmp_path)
    (file,) = tmp_path.iterdir()
    kept = json.loads(file.read_text())
    file.unlink()
    with pytest.raises(UnsupportedFamily, match="differs from the whole"):
        proof.require_proof(family, tmp_path)
    assert not list(tmp_path.iterdir()), "it was reached again"
    file.write_text(json.dumps({**kept, "reason": "so it was written down"}))
    proof.settled.clear()
    with pytest.raises(UnsupportedFamily, match="so it was written down"):
        proof.require_proof(family, tmp_path)


def test_an_update_reaches_its_own_verdict(tmp_path: Path) -> None:
    updated, cache = tmp_path / "updated", tmp_path / "cache"
    ignored = shutil.ignore_patterns("checkpoint", "__pycache__")
    shutil.copytree(Path(mesh.__file__).parent, updated / "mesh", ignore=ignored)
    prove = """
from mesh.processes.lean import import_modelling; import_modelling()
import sys, transformers; from pathlib import Path
from mesh.models import families, proof
family = families.family_of_config(transformers.StableLmConfig(num_hidden_layers=3))
proof.require_proof(family, Path(sys.argv[1]))
"""

    def said() -> str:
        return subprocess.run(
            [sys.executable, "-P", "-c", prove, str(cache)],
            env={**os.environ, "PYTHONPATH": str(updated)},
            capture_output=True, text=True, timeout=120, check=False,
        ).stderr  # fmt: skip

    proof.require_proof(family_of_config(transformers.StableLmConfig(num_hidden_layers=3)), cache)
    (file,) = cache.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "reason": "it could not yet"}))
    assert "it could not yet" in said()
    with (updated / "mesh/models/span.py").open("a") as code:
        code.write("# It can by now.\n")
    assert "Unsupported" not in said()


def test_what_broke_off_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = family_of_config(transformers.StableLmConfig(num_hidden_layers=3))
    full = OSError(28, "No space left on device")
    for error in (full, MemoryError(), NotEnoughMemory("too little.", fix="")):
        with monkeypatch.context() as patch:
            patch.setattr(proof, "_compare", Mock(side_effect=error))
            with pytest.raises(UnsupportedFamily):
                proof.require_proof(family, tmp_path)
        assert not list(tmp_path.iterdir())
    proof.require_proof(family, tmp_path)


def test_another_layer_pattern_is_another_proof(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    for types in (kinds * 2, kinds[::-1] * 2):
        config = transformers.Cohere2Config(num_hidden_layers=4, layer_types=types)
        proof.require_proof(family_of_config(config), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_twin_keeps_layers_and_shrinks_widths() -> None:
    config = transformers.Cohere2Config(num_hidden_layers=40)
    twin = proof.twin_config(config)
    assert twin.num_hidden_layers == 40
    assert twin.layer_types == config.layer_types
    assert (twin.hidden_size, twin.vocab_size) == (4 * 64, 64)  # heads are together as wide
    assert config.hidden_size == 8192


@pytest.mark.parametrize(
    "config",
    [
        # Its 40 and 180 billion say so of how many heads have keys.
        transformers.FalconConfig(
            hidden_size=8192, num_attention_heads=128, num_kv_heads=8, num_hidden_layers=2,
            multi_query=True, bias=False, new_decoder_architecture=True,
        ),
        # It says how wide a head is, and projects as many numbers as the model is wide.
        transformers.HeliumConfig(num_hidden_layers=2),
    ],
)  # fmt: skip
def test_heads_stay_in_scale_whatever_says_how_many_and_how_wide_they_are(config: Any) -> None:
    proof.require_proof(family_of_config(config), None)
    twin = proof.twin_config(config)
    assert sum(each.numel() for each in _empty(twin).parameters()) < 1_000_000


def _empty(config: Any) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def test_a_twin_shrinks_what_some_layers_have_otherwise() -> None:
    config = transformers.Gemma4TextConfig(
        num_hidden_layers=6, num_key_value_heads=4, attention_k_eq_v=True,
        num_global_key_value_heads=1, hidden_size_per_layer_input=0,
    )  # fmt: skip
    widths = [
        (layer.head_dim, layer.num_key_value_heads)
        for layer in proof.twin_config(config).per_layer_config
    ]
    assert widths == [(64, 2)] * 5 + [(128, 1)]


def test_proof_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    config = transformers.StableLmConfig(num_hidden_layers=3)
    proof.require_proof(family_of_config(config), None)
    assert torch.equal(torch.rand(1), expected)


def test_tested_types_are_not_proved_again(checkpoint: Checkpoint) -> None:
    manifest = read_manifest(checkpoint("llama", layers=3))
    load_span(manifest, LayerRange(0, 1), dtype=torch.float32, device=CPU)
    assert not proof.settled
