"""Lean layers give what the modules give, or are not taken."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, Gemma4TextConfig

from mesh.errors import BadSteering
from mesh.models import standard
from mesh.models.families import family_of, family_of_config
from mesh.models.load import load_span
from mesh.models.manifest import read_manifest
from mesh.models.standard import has_other_layers, has_standard_layers
from mesh.shard import linear, twins
from mesh.shard.attention import SHORT_ROWS
from mesh.shard.compiled import parts
from mesh.shard.compiled.parts import NotCompilable
from mesh.shard.compiled.proof import require_compilable
from mesh.shard.lean_proof import require_lean
from mesh.shard.linear import HALVED, choose_kernels
from mesh.shard.packed import HalvedLinear
from mesh.shard.runtime import StepInput, may_batch
from mesh.shard.selfcheck import short_steps_keep_bits
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange, Site
from tests.checkpoints import FAMILIES, WINDOW, make_checkpoint
from tests.shard.spans import (
    CPU,
    WHOLE,
    changed_in_a_round,
    checkpoint,
    of_module,
    relative_error,
    rows,
    step,
)
from tests.shard.spans import runtime as by_modules

_DIRECTORY = tempfile.TemporaryDirectory(prefix="hearthnet-lean-")
LATENT = "made of latents"
SINGULAR = {"minicpm3": LATENT, "mimo_v2_flash": "widths of their own"}
"""Families whose layers are not standard, and what is said of them."""
MIXTURES = ("qwen3_moe", "gpt_oss", "glm4_moe", "gemma4")
BY_TORCH = ("gemma4", "phimoe", "minimax_m2", "hy_v3", "nemotron_h", "nemotron_h_latent")
ALSO = (
    "qwen2_moe", "ernie4_5_moe", "lfm2_moe", "qwen3_next", "gemma4_dense", "nemotron_h_dense",
    "hunyuan_v1_dense", "afmoe", "laguna",
    *BY_TORCH,
)  # fmt: skip
"""Families that have what none of the others has."""
WITH_STATES = ("qwen3_5", "lfm2", "granitemoehybrid_dense", "nemotron_h")
"""Families of whose layers some keep a running state."""
STANDARD = [family for family in FAMILIES if family not in SINGULAR]

needs_packing = pytest.mark.skipif(
    choose_kernels(nn.Sequential(nn.Linear(32, 32)), torch.float32, CPU).name == linear.PLAIN,
    reason="this CPU or torch has no packed linear",
)
pytestmark = needs_packing


def runtime(
    family: str = "llama", layers: LayerRange = WHOLE, dtype: torch.dtype = torch.float32
) -> TorchRuntime:
    loaded = load_span(checkpoint(family), layers, dtype=dtype, device=CPU)
    return TorchRuntime(loaded, device=CPU, dtype=dtype, lean=True)


def halved(family: str = "llama", stored: str = "bfloat16") -> tuple[TorchRuntime, TorchRuntime]:
    """The same weights in 16 bit and widened, both computed in fp32."""
    directory = Path(_DIRECTORY.name) / f"{family}-{stored}"
    manifest = read_manifest(make_checkpoint(directory, family, layers=4, dtype=stored))
    dtypes = (getattr(torch, stored), torch.float32)
    both = [
        TorchRuntime(
            load_span(manifest, WHOLE, dtype=dtype, device=CPU),
            device=CPU,
            dtype=torch.float32,
            lean=dtype is not torch.float32,
        )
        for dtype in dtypes
    ]
    return both[0], both[1]


def outputs(span: TorchRuntime) -> torch.Tensor:
    """Chunks that cross the window, a rollback, and a batch of sessions of different length."""
    hidden = rows(WINDOW + 40)
    cache, other = span.new_cache(256), span.new_cache(256)
    step(span, other, 0, hidden[:, :9])
    found = [
        step(span, cache, start, hidden[:, start:stop])
        for start, stop in ((0, 50), (50, 90), (90, 98), (91, 92))
    ]
    pair = [StepInput(cache, 92, hidden[:, 92:93]), StepInput(other, 9, hidden[:, 9:10])]
    groups = [pair] if may_batch(span, pair) else [[each] for each in pair]
    return torch.cat([*found, *(row for group in groups for row in span.forward(group))], 1)


@pytest.mark.parametrize("family", sorted({*STANDARD, *ALSO}))
def test_lean_layers_give_what_modules_give(family: str) -> None:
    manifest = checkpoint(family)
    require_lean(family_of(manifest), None)
    assert has_standard_layers(manifest.config, manifest.model_type), "and plans know it"
    assert has_other_layers(manifest.config) is (family in BY_TORCH)
    span = runtime(family)
    assert span.is_lean
    assert "+lean+" in span.kernels
    assert relative_error(outputs(span), outputs(by_modules(family))) < 1e-5


def test_what_only_long_sessions_come_to_is_computed_and_looked_at() -> None:
    family = family_of(checkpoint("ministral3"))
    require_lean(family, None)
    first = family.config.rope_parameters["original_max_position_embeddings"]
    assert first < 200
    hidden, found = rows(200), []
    for span in (runtime("ministral3"), by_modules("ministral3")):
        cache = span.new_cache(256)
        step(span, cache, 0, hidden[:, :150])
        found.append(step(span, cache, 150, hidden[:, 150:]))
        assert span.is_lean is (len(found) == 1)
    assert relative_error(*found) < 1e-5


SIDES = {"rope_type": "default", "rope_theta": 1e6}
IN_PAIRS = SIDES | {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
IN_GROUPS = {"head_dim": 128, "num_key_value_heads": 8}
IN_THIRDS = {"rope_parameters": SIDES | {"mrope_section": [16, 24, 24]}}
INTERLEAVED = {
    "rope_parameters": SIDES | {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
}
NARROW = {"num_attention_heads": 4, "num_key_value_heads": 4}
PLAIN = (
    "arcee", "cwm", "exaone4", "gemma", "glm", "granite_swa", "jais2", "ministral3", "olmo3",
    "seed_oss", "starcoder2", "vaultgemma", "aria_text", "granitemoe_swa", "granitemoeshared",
    "mellum", "solar_open", "cohere", "cohere2", "gpt_neox", "persimmon", "phi", "stablelm",
    "hyperclovax", "nanochat", "olmo", "helium",
)  # fmt: skip
BY_CONFIG: dict[str, dict[str, Any]] = {
    **{model_type: {} for model_type in PLAIN},
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), IN_THIRDS),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), INTERLEAVED),
    "qwen3_omni_moe_text": INTERLEAVED | {"head_dim": 128},
    "glm4v_text": {"rope_parameters": IN_PAIRS},
    "glm4v_moe_text": {"rope_parameters": IN_PAIRS, "head_dim": 128},
    **dict.fromkeys(("apertus", "hunyuan_v1_dense", "nemotron"), IN_GROUPS),
    "hunyuan_v1_moe": IN_GROUPS | {"num_experts": 8, "moe_topk": [2] * 4},
    "glm with heads of 48": NARROW | {"head_dim": 48},
    "gpt2 with heads of 40": {"n_embd": 160, "n_head": 4},
    "exaone4 without a window": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "cohere2_moe": {
        "first_k_dense_replace": 1,
        "num_shared_experts": 2,
        "expert_selection_fn": "sigmoid",
    },
}
"""Types of models of which there are no checkpoints here, and what their publishers say."""


@pytest.mark.parametrize("name", BY_CONFIG)
def test_so_are_those_of_models_that_are_known_by_their_configs(name: str) -> None:
    model_type, *_ = name.split()
    # The fourth is the first, in many, that sees more than a window.
    config: Any = CONFIG_MAPPING[model_type](num_hidden_layers=4, **BY_CONFIG[name])
    family = family_of_config(config)
    require_lean(family, None)
    require_compilable(family, None)
    assert has_standard_layers(config.to_dict(), model_type)
    assert not has_other_layers(config.to_dict())


@pytest.mark.parametrize(
    ("model_type", "said"), [("cohere", "use_qk_norm"), ("stablelm", "qk_layernorm")]
)
def test_plans_know_where_each_head_is_normalised_by_its_own_weights(
    model_type: str, said: str
) -> None:
    config: Any = CONFIG_MAPPING[model_type](num_hidden_layers=2, **{said: True})
    for required in (require_lean, require_compilable):
        with pytest.raises(NotCompilable, match="it normalises by"):
            required(family_of_config(config), None)
    assert not has_standard_layers(config.to_dict(), model_type)
    assert has_other_layers(config.to_dict())


@pytest.mark.parametrize("family", sorted(SINGULAR))
def test_layers_that_are_not_standard_run_by_their_modules(family: str) -> None:
    with pytest.raises(NotCompilable, match=SINGULAR[family]):
        require_lean(family_of(checkpoint(family)), None)
    manifest = checkpoint(family)
    assert not has_standard_layers(manifest.config, manifest.model_type)
    span = runtime(family)
    assert not span.is_lean
    assert span.kernels == by_modules(family).kernels


@pytest.mark.parametrize(
    "other",
    [
        {"hidden_act": "tanh"},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"clip_qkv": 8.0},
    ],
)  # fmt: skip
def test_a_plan_knows_of_no_layers_as_standard_that_are_not(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    directory = make_checkpoint(tmp_path / "other", "llama", layers=2)
    config = json.loads((directory / "config.json").read_text())
    config = {k: v for k, v in config.items() if not k.startswith("rope")} | other
    (directory / "config.json").write_text(json.dumps(config))
    manifest = read_manifest(directory)
    with pytest.raises(NotCompilable):
        require_lean(family_of(manifest), None)
    assert not has_standard_layers(manifest.config, manifest.model_type)
    assert not has_standard_layers({"hidden_act": ["silu"]}, "llama"), "whatever a config says"
    assert parts.ACTIVATION_NAMES.keys() == standard.ACTIVATIONS


def test_what_many_layers_make_of_the_last_bits_is_not_held_against_them() -> None:
    layers = {"num_hidden_layers": 60, "num_kv_shared_layers": 0}  # as many as Gemma 4 31B has
    require_lean(family_of_config(Gemma4TextConfig(hidden_size_per_layer_input=0, **layers)), None)


def test_some_layers_of_a_span_are_those_layers() -> None:
    part = LayerRange(1, 3)
    hidden = rows(7)
    whole, own = runtime("gemma3"), runtime("gemma3", part)
    found = whole.forward([StepInput(whole.new_cache(64), 0, hidden)], part)[0]
    assert torch.equal(found, step(own, own.new_cache(64), 0, hidden))


def test_bf16_stays_as_close_as_its_modules_do() -> None:
    expected = outputs(by_modules())
    found = relative_error(outputs(runtime(dtype=torch.bfloat16)).float(), expected)
    theirs = relative_error(outputs(by_modules(dtype=torch.bfloat16)).float(), expected)
    assert found < max(1.5 * theirs, 0.02)


def _after_a_past(span: TorchRuntime, sizes: Sequence[int]) -> torch.Tensor:
    """(1, SHORT_ROWS, hidden): the rows behind a past, in steps of these sizes."""
    past = 40
    hidden = rows(past + SHORT_ROWS).to(span.dtype)
    cache = span.new_cache(64)
    step(span, cache, 0, hidden[:, :past])
    starts = [past + sum(sizes[:i]) for i in range(len(sizes))]
    return torch.cat(
        [
            step(span, cache, start, hidden[:, start : start + size])
            for start, size in zip(starts, sizes, strict=True)
        ],
        1,
    )


packs_bf16 = choose_kernels(nn.Sequential(nn.Linear(32, 32)).bfloat16(), torch.bfloat16, CPU)
needs_packed_bf16 = pytest.mark.skipif(
    packs_bf16.name == linear.PLAIN, reason="this CPU or torch has no packed linear in bf16"
)


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "mistral", "gpt2", "ernie4_5_moe", *MIXTURES, *WITH_STATES]
)
@pytest.mark.parametrize("is_halved", [pytest.param(False, marks=needs_packed_bf16), True])
def test_a_drafted_row_has_the_bits_of_a_step_of_its_own(family: str, *, is_halved: bool) -> None:
    span = halved(family)[0] if is_halved else runtime(family, dtype=torch.bfloat16)
    assert f"rows: the same bits in steps of up to {SHORT_ROWS} as alone" in span.reasons
    alone = _after_a_past(span, [1] * SHORT_ROWS)
    for sizes in ([2, 4, 8, 1, 1], [SHORT_ROWS], [3, 13]):
        assert torch.equal(_after_a_past(span, sizes), alone)


def test_layers_that_add_up_several_rows_otherwise_are_told_from_exact_ones() -> None:
    module = load_span(checkpoint(), WHOLE, dtype=torch.float32, device=CPU).module

    def by_count(hidden: torch.Tensor, *_: object) -> torch.Tensor:
        """What kernels do that take several rows in another order than one."""
        return hidden * (1 + 1e-6 * (hidden.shape[1] > 1))

    def by_row(hidden: torch.Tensor, *_: object) -> torch.Tensor:
        return hidden * 1.5

    assert short_steps_keep_bits(module, CPU, torch.float32, by_row)
    assert not short_steps_keep_bits(module, CPU, torch.float32, by_count)


class _Seen:
    """A hook that keeps what passes."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.rows: list[torch.Tensor] = []

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows.append(hidden)
        return hidden


def test_a_step_with_hooks_goes_through_the_modules_and_changes_nobody_s_bits() -> None:
    span, hook = runtime(), _Seen(Site(1, "self_attn.q_proj"))
    inputs = [rows(1, seed=i) for i in range(3)]

    def steps(hooks: tuple[_Seen, ...]) -> list[StepInput]:
        caches = [span.new_cache(64) for _ in inputs]
        return [
            StepInput(caches[0], 0, inputs[0]),
            StepInput(caches[1], 0, inputs[1], hooks),
            StepInput(caches[2], 0, inputs[2]),
        ]

    without = span.forward([each for i, each in enumerate(steps(())) if i != 1])
    watched = span.forward(steps((hook,)))
    assert len(hook.rows) == 1
    assert torch.equal(watched[0], without[0])
    assert torch.equal(watched[2], without[1])
    assert relative_error(watched[1], span.forward(steps(()))[1]) < 1e-5


def test_what_is_misread_is_refused_on_the_twin_and_at_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = outputs(by_modules("gemma2"))
    twins.settled.clear()
    monkeypatch.setitem(parts.ACTIVATION_NAMES, "gelu_pytorch_tanh", "silu")
    with pytest.raises(NotCompilable, match="were not taken"):
        require_lean(family_of(checkpoint("gemma2")), None)
    span = runtime("gemma2")
    assert not span.is_lean
    assert "layers lean: no, by their modules" in span.reasons
    assert relative_error(outputs(span), expected) < 1e-5


@pytest.mark.parametrize(("family", "stored"), [("llama", "bfloat16"), ("gpt2", "float16")])
def test_weights_in_16_bit_give_what_they_give_widened(family: str, stored: str) -> None:
    narrow, wide = halved(family, stored)
    assert narrow.kernels.startswith(f"{HALVED}+lean+")
    assert narrow.weight_bytes < 0.6 * wide.weight_bytes
    assert relative_error(outputs(narrow), outputs(wide)) < 1e-5


@torch.inference_mode()
def test_a_weight_that_fp16_does_not_hold_is_not_halved() -> None:
    module = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).bfloat16()
    module.requires_grad_(requires_grad=False)
    module[1].weight[3, 4] = 1e6
    expected = module.float()(torch.ones(1, 32))
    kernels = choose_kernels(module.bfloat16(), torch.float32, CPU, halved=True)
    assert kernels.name == HALVED
    assert [type(part) for part in module] == [HalvedLinear, nn.Linear]
    assert relative_error(module(torch.ones(1, 32)), expected) < 1e-2


def test_a_halved_weight_that_changes_is_noticed() -> None:
    narrow, _ = halved()
    checking = narrow.weight_check()

    assert changed_in_a_round(checking) == set()
    product = narrow.layer(2).mlp.down_proj
    other = torch.zeros(product.out_features, product.in_features)
    before, product._packed = product._packed, HalvedLinear(other, None)._packed
    assert changed_in_a_round(checking) == {"layers.2.mlp.down_proj"}
    product._packed = before
    assert changed_in_a_round(checking) == set()


def test_modules_made_by_hand_are_no_reason_to_fail() -> None:
    module = load_span(checkpoint(), WHOLE, dtype=torch.float32, device=CPU).module
    assert not of_module(module).is_lean


@dataclass(frozen=True)
class _Refusing:
    site: Site

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        raise BadSteering("Too strong.", fix="Lower it.")


def test_where_one_of_a_batch_fails_no_cache_has_grown() -> None:
    span = runtime()
    caches = [span.new_cache(8) for _ in range(2)]
    steps = [StepInput(cache, 0, rows(1)) for cache in caches]
    steps[1] = replace(steps[1], hooks=(_Refusing(Site(1)),))
    with pytest.raises(BadSteering):
        span.forward(steps)
    assert [cache.length for cache in caches] == [0, 0]
