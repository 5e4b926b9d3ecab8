"""A layer in 16 bit, by transformers' modules and without, and in 8 and 4 bit: mixtures of experts,
and layers that keep a running state.

Random weights in the shapes of usual models, on one thread; the four take turns within a shape,
and so do the rows that are asked, which go to other experts each time. By name only (`python -m
tests.bench layers`): it takes some minutes to round the weights, and 6 GB.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from transformers import (
    AutoModel,
    Gemma4TextConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from mesh.models.anatomy import Anatomy
from mesh.models.families import family_of_config
from mesh.models.span import LoadedSpan, bare_of_ends
from mesh.shard import int4
from mesh.shard.compiled.parts import NotCompilable
from mesh.shard.compiled.runtime import CompiledRuntime
from mesh.shard.compiled.store import quantised_span
from mesh.shard.runtime import Runtime, StepInput
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange

SHAPES: dict[str, Callable[[], Any]] = {
    "Qwen3-30B-A3B": lambda: Qwen3MoeConfig(
        hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        num_hidden_layers=1, vocab_size=128, mlp_only_layers=[], decoder_sparse_step=1,
    ),
    "gpt-oss-20b": lambda: GptOssConfig(
        num_local_experts=32, num_experts_per_tok=4, num_hidden_layers=1, vocab_size=128
    ),
    "Gemma-4-26B-A4B": lambda: Gemma4TextConfig(
        hidden_size=2816, intermediate_size=2112, num_attention_heads=16, num_key_value_heads=8,
        head_dim=256, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
        enable_moe_block=True, num_hidden_layers=1, vocab_size=128, layer_types=["full_attention"],
        hidden_size_per_layer_input=0, num_kv_shared_layers=0,
    ),
    "Gemma-4-E4B": lambda: Gemma4TextConfig(
        hidden_size=2560, intermediate_size=10240, num_attention_heads=8, num_key_value_heads=2,
        head_dim=256, global_head_dim=512, num_hidden_layers=1, vocab_size=128,
        layer_types=["full_attention"], hidden_size_per_layer_input=256, num_kv_shared_layers=0,
        vocab_size_per_layer_input=128,
    ),
    "GLM-4.7-Flash": lambda: Glm4MoeLiteConfig(
        num_hidden_layers=1, vocab_size=128, first_k_dense_replace=0, mlp_layer_types=["sparse"]
    ),
    "Qwen3.5-9B, linear attention": lambda: _qwen("linear_attention"),
    "Qwen3.5-9B, attention": lambda: _qwen("full_attention"),
    "LFM2-1.2B, short convolution": lambda: Lfm2Config(
        hidden_size=2048, intermediate_size=12288, num_hidden_layers=1, vocab_size=128,
        num_attention_heads=32, num_key_value_heads=8, layer_types=["conv"],
    ),
    "Granite-4.0-H-1B, Mamba 2": lambda: GraniteMoeHybridConfig(
        hidden_size=1536, shared_intermediate_size=4096, num_hidden_layers=1, vocab_size=128,
        num_attention_heads=12, num_key_value_heads=4, num_local_experts=0, mamba_n_heads=48,
        mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, layer_types=["mamba"],
    ),
}  # fmt: skip
WAYS = ("bf16", "lean", "int8", "int4")
STEPS = {
    "a token": (1, 1, 128),
    "a token behind 4000": (1, 1, 4000),
    "8 tokens of 8 answers": (8, 1, 128),
    "128 rows of a prompt": (1, 128, 128),
}
"""Of so many sessions, so many rows each, behind so many positions."""
POSITIONS, CHUNK, FEW, ROUNDS = 4352, 512, 16, 15


def _qwen(kind: str) -> Any:
    return Qwen3_5TextConfig(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=1, vocab_size=128,
        num_attention_heads=16, num_key_value_heads=4, head_dim=256, layer_types=[kind],
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128,
    )  # fmt: skip


def measure() -> dict[str, Any]:
    """Milliseconds of processor time of a layer for each of `STEPS`, medians; and the MiB that its
    weights take."""
    torch.set_num_threads(1)
    return {name: _of_shape(make()) for name, make in SHAPES.items()}


def _of_shape(config: Any) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="hearthnet-bench-") as folder:
        runtimes = {}
        for way in WAYS:
            with suppress(NotCompilable):
                runtimes[way] = _runtime(config, way, Path(folder))
        if "+lean" not in runtimes["lean"].kernels:
            del runtimes["lean"]  # it has none
        found = {
            name: _medians(runtimes, *step, ROUNDS if step[1] < FEW else 3)
            for name, step in STEPS.items()
        }
        found["weights, MiB"] = {way: each.weight_bytes / 2**20 for way, each in runtimes.items()}
    return found


def _runtime(config: Any, way: str, folder: Path) -> Runtime:
    torch.manual_seed(0)
    # Of its own: a span's config says by which code its experts are computed.
    module = AutoModel.from_config(copy.deepcopy(config), dtype=torch.bfloat16).eval()
    family = family_of_config(module.config)
    bare_of_ends(module, family, Anatomy.of(module, family), 0)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    layers = LayerRange(0, 1)
    loaded = LoadedSpan(module, module.config, layers, 0, 0, WeakSet(), {})
    cpu = torch.device("cpu")
    if way in ("bf16", "lean"):
        return TorchRuntime(loaded, device=cpu, dtype=torch.bfloat16, lean=way == "lean")
    graphs = quantised_span(loaded, "int8" if way == "int8" else "int4", "0" * 64, folder)
    try:
        return CompiledRuntime(graphs, threads=1, positions=POSITIONS)
    except NotCompilable:
        if way == "int8":
            raise
    int4.to_device(graphs.loaded.module, cpu, torch.float32)
    return TorchRuntime(graphs.loaded, device=cpu, dtype=torch.float32, lean=True)


def _medians(
    runtimes: dict[str, Runtime], sessions: int, rows: int, behind: int, rounds: int
) -> dict[str, float]:
    steps = {way: _step(runtime, sessions, rows, behind) for way, runtime in runtimes.items()}
    taken: dict[str, list[float]] = {way: [] for way in steps}
    for number in range(rounds + 1):
        for way, step in steps.items():
            started = time.process_time()
            step()
            if number:
                taken[way].append(1000 * (time.process_time() - started))
    return {way: statistics.median(each) for way, each in taken.items()}


def _step(runtime: Runtime, sessions: int, rows: int, behind: int) -> Callable[[], object]:
    drawn = torch.Generator().manual_seed(rows)
    caches = [runtime.new_cache(POSITIONS) for _ in range(sessions)]
    positions = count(behind, rows)

    def some(number: int) -> torch.Tensor:
        return torch.randn(1, number, runtime.row_size, generator=drawn).to(runtime.dtype)

    for cache in caches:
        for start in range(0, behind, CHUNK):
            runtime.forward([StepInput(cache, start, some(min(CHUNK, behind - start)))])

    def step() -> None:
        position = next(positions)
        steps = [StepInput(cache, position, some(rows)) for cache in caches]
        for together in [steps] if runtime.batch_rows else [[each] for each in steps]:
            runtime.forward(together)

    return step
