"""What the tests of the compiled runtime run on: small random checkpoints in few bits."""

from __future__ import annotations

from pathlib import Path

import torch

from mesh.models.load import load_span
from mesh.shard.compiled.formats import Quant
from mesh.shard.compiled.runtime import CompiledRuntime
from mesh.shard.compiled.store import GraphSpan, dense_span, quantised_span
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange
from tests.checkpoints import FAMILIES
from tests.shard.spans import CPU, WHOLE, checkpoint

REFUSED = ("gemma4", "falcon_h1")
"""Families that the torch runtime keeps: experts beside a feed-forward of their own, states of
other kinds."""

EXPERTS = (
    "qwen3_moe", "gpt_oss", "glm4_moe", "qwen3_5_moe", "qwen3_next", "lfm2_moe", "granitemoehybrid",
    "ernie4_5_moe", "afmoe", "laguna", "mistral4", "kimi_linear", "deepseek_v3",
)  # fmt: skip
"""Families whose layers are mixtures of experts, all or some."""

GROUPED = ("qwen3/5x1", "llama/8x2", "gemma2/4x1", "qwen3/4x1x160")
"""So many queries share a key that it is read once for all of them: an odd number of them, one of
two key heads, in every other layer, with heads that are multiplied in parts."""

APART = "llama/4x4"
"""Each query has a key of its own."""

WINDOWED = ("gemma3/4x2x160x150", "gemma2/4x1x64x128")
"""The same, and so many positions are seen by layers that do not see all."""

SINGULAR = (
    "gemma4_dense", "glm4", "ernie4_5", "exaone4", "ministral3", "glm4_moe_lite", "deepseek_v2",
    "arcee", "nemotron_h_dense",
)  # fmt: skip
"""Families whose layers differ in width, or are a mixer or feed-forward alone, or whose attention
is one of their own."""

COMPILED = (*dict.fromkeys((*FAMILIES, *EXPERTS, *SINGULAR)), *GROUPED, APART)
COMPILED = tuple(family for family in COMPILED if family not in REFUSED)


def span(
    quant: Quant | None,
    family: str = "llama",
    layers: LayerRange = WHOLE,
    cache_dir: Path | None = None,
) -> GraphSpan:
    """These layers, freshly loaded."""
    manifest = checkpoint(family)
    loaded = load_span(manifest, layers, dtype=torch.float32, device=CPU)
    if quant is None:
        return dense_span(loaded)
    return quantised_span(loaded, quant, manifest.weights_sha256, cache_dir)


def compiled(
    quant: Quant | None = "int8",
    family: str = "llama",
    layers: LayerRange = WHOLE,
    *,
    batch_invariant: bool = False,
    positions: int = 256,
) -> CompiledRuntime:
    """A fresh runtime of some layers."""
    graphs = span(quant, family, layers)
    return CompiledRuntime(graphs, threads=1, positions=positions, batch_invariant=batch_invariant)


def in_torch(runtime: CompiledRuntime) -> TorchRuntime:
    """The same weights, computed by torch."""
    return TorchRuntime(runtime.loaded, device=CPU, dtype=torch.float32)


def added(found: torch.Tensor, expected: torch.Tensor, hidden: torch.Tensor) -> float:
    """How far the middle row of `found` is off, relative to what the layers add to `hidden`: a row
    may go to another expert by a hair."""
    off, whole = (found - expected).norm(dim=-1), (expected - hidden).norm(dim=-1)
    return float((off / whole).median())
