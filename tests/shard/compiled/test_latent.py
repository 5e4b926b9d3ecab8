"""Attention over latents, which are cached in the place of keys and values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Mistral4Config

from mesh.models.families import family_of_config
from mesh.models.load import load_span
from mesh.models.manifest import read_manifest
from mesh.models.standard import has_other_layers
from mesh.shard.compiled.builder import LATENT_KEYS, LATENT_VALUES
from mesh.shard.compiled.engine import Binding, compiled
from mesh.shard.compiled.formats import BlockMatrix, Quant, quantise
from mesh.shard.compiled.latent import Latent
from mesh.shard.compiled.latent_graph import latent_model
from mesh.shard.compiled.parts import Attention, Norm
from mesh.shard.compiled.proof import require_compilable
from mesh.shard.compiled.runtime import CompiledRuntime
from mesh.shard.compiled.slots import SlotCache
from mesh.shard.compiled.store import quantised_span
from mesh.types import LayerRange
from tests import coded_files
from tests.checkpoints import make_checkpoint
from tests.coded_files import write_coded
from tests.shard.compiled.spans import compiled as runtime_of
from tests.shard.spans import CPU

_POSITIONS = 530
"""Beyond 512 products over positions are added up in several parts."""
_LATENT = Latent(512, 192, 64, Norm(torch.ones(512), None, 1e-6), None, None, None, None)


def test_mistral_small_4_is_compiled_and_plans_know_it() -> None:
    config = Mistral4Config(num_hidden_layers=2)
    require_compilable(family_of_config(config), None)
    assert not has_other_layers(config.to_dict())


@pytest.mark.parametrize("heads", [2, 20])
def test_a_row_of_usual_width_has_the_same_bits_in_any_piece_of_a_prompt(heads: int) -> None:
    width = _LATENT.width
    attention = Attention(
        (), torch.nn.Identity(), heads, 1, width, width**-0.5, 0.0, None, None, None, None,
        norm_whole=False, latent=_LATENT,
    )  # fmt: skip
    session = compiled(latent_model(attention, _LATENT), 1)
    source = torch.Generator().manual_seed(0)
    rows = torch.randn(1, _POSITIONS, attention.projected, generator=source)
    keys = torch.zeros(1, 1, _POSITIONS, width)

    def attended(at: int, count: int) -> torch.Tensor:
        """Of rows from `at` on; their keys are written, the same each time."""
        found = torch.empty(1, count, attention.attended)
        inputs = {
            "projected": rows[:, at : at + count].contiguous(), "rows": torch.tensor([count]),
            "positions": torch.arange(at, at + count)[None], "keys": keys,
            "at": torch.tensor([at]), "end": torch.tensor([at + count]),
        }  # fmt: skip
        Binding.of(session, inputs, {"attended": found, "new_keys": keys}).run()
        return found

    whole, start = attended(0, _POSITIONS), 0
    for count in (1, 2, 63, 64, 127, 3, 200, 70):
        assert torch.equal(attended(start, count), whole[:, start : start + count]), start
        start += count
    for at in range(0, _POSITIONS, 7):
        assert torch.equal(attended(at, 1), whole[:, at : at + 1]), at


@pytest.mark.parametrize("family", ["minicpm3", "deepseek_v2"])
def test_a_position_is_cached_as_its_latent(family: str) -> None:
    cache = runtime_of("int8", family).new_cache(256)
    assert isinstance(cache, SlotCache)
    layers, rank, turned = 4, 16, 8  # keys and values would be 4 * (24 + 16) numbers
    assert cache.bank.shape.position_bytes == layers * (rank + turned) * 4


@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("form", ["awq", "fp8"])
def test_what_is_stored_in_codes_is_not_rounded_where_it_need_not_be(
    form: str, quant: Quant, tmp_path: Path
) -> None:
    made = make_checkpoint(
        tmp_path / "one", "minicpm3", layers=1, hidden=128, q_lora_rank=64, kv_lora_rank=64,
        qk_nope_head_dim=64,
    )  # fmt: skip
    written = coded_files.awq(32) if form == "awq" else coded_files.fp8((32, 32))
    write_coded(made, tmp_path / "coded", written)
    manifest, layers = read_manifest(tmp_path / "coded"), LayerRange(0, 1)
    path = "layers.0.self_attn.kv_b_proj"
    plain = load_span(manifest, layers, dtype=torch.float32, device=CPU).module
    stored = plain.get_submodule(path).weight.detach().view(4, -1, 64)
    loaded = load_span(manifest, layers, dtype=torch.float32, device=CPU, defer=True)
    assert f"{path}.weight" in loaded.deferred
    for _ in range(2):  # made, and kept
        span = quantised_span(loaded, quant, "0" * 64, tmp_path / "cache")
        products = span.layers[0].products
        keys, values = (products[name].matrix for name in (LATENT_KEYS, LATENT_VALUES))
        assert isinstance(keys, BlockMatrix)
        assert isinstance(values, BlockMatrix)
        own = stored[:, 64:].flatten(0, 1)
        assert torch.equal(values.dense(), own if form == "awq" else quantise(own, quant).dense())
        turned = stored[:, :64].transpose(1, 2).flatten(0, 1)
        error = float((keys.dense() - turned).norm() / turned.norm())
        assert error < {"int8": 0.02, "int4": 0.12}[quant]
        # What modules, and so jobs, compute with is the same.
        both = keys.dense().view(4, 64, -1).transpose(1, 2), values.dense().view(4, -1, 64)
        seen = loaded.module.get_submodule(path).weight
        assert torch.equal(seen, torch.cat(both, 1).flatten(0, 1))
        loaded = load_span(manifest, layers, dtype=torch.float32, device=CPU, defer=True)
    assert CompiledRuntime(span, threads=1, positions=64).weight_bytes > 0
