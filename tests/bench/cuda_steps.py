"""Steps of a whole span on a CUDA card: by transformers' modules, captured in bf16, and in 4 bit.

Random weights in the shapes of usual models; each time is until the answer is in main memory, as a
shard sends it. The three take turns within a shape. By name only (`python -m tests.bench
cuda_steps`): it needs a card of compute capability 8.0 and 20 GB.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

from mesh.shard import int4
from mesh.shard.compiled.formats import BLOCK, BlockLinear, BlockMatrix
from mesh.shard.runtime import KeyValueCache, StepInput
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange

SHAPES = {
    "0.5B": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2,
    },
    "1B": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip
WAYS = ("modules", "captured", "int4")
STEPS = {"one answer": (1, 1), "8 answers": (8, 1), "16 answers": (16, 1), "5 rows of one": (1, 5)}
"""How many sessions and how many rows of each."""
PIECE, BEHIND, ROUNDS = 256, 512, 20
CARD = torch.device("cuda")


def measure() -> dict[str, Any]:
    """Milliseconds of each step in each way, behind `BEHIND` positions, and of a prompt's piece."""
    print(torch.cuda.get_device_name(CARD))
    return {name: _of_shape(shape) for name, shape in SHAPES.items()}


def _of_shape(shape: dict[str, int]) -> dict[str, dict[str, float]]:
    runtimes = {way: _runtime(shape, way) for way in WAYS}
    open_caches = {way: _caches(runtime) for way, runtime in runtimes.items()}
    found: dict[str, dict[str, float]] = {}
    for name, (sessions, rows) in STEPS.items():
        steps = {
            way: _step(runtime, open_caches[way][:sessions], rows)
            for way, runtime in runtimes.items()
        }
        found[name] = _medians(steps)
    pieces = {way: _piece(runtime, open_caches[way][0]) for way, runtime in runtimes.items()}
    found[f"{PIECE} rows of a prompt"] = _medians(pieces)
    found["weights, MB"] = {way: each.weight_bytes / 2**20 for way, each in runtimes.items()}
    return found


def _runtime(shape: dict[str, int], way: str) -> TorchRuntime:
    config = LlamaConfig(vocab_size=128, max_position_embeddings=8192, **shape)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with CARD:
            model: Any = LlamaModel(config)
    finally:
        torch.set_default_dtype(before)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.02)
    model.embed_tokens = model.norm = nn.Identity()
    if way == "int4":
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, BlockLinear(_codes(*child.weight.shape), None))
        int4.to_device(model, CARD, torch.bfloat16)
    layers = LayerRange(0, config.num_hidden_layers)
    loaded: Any = SimpleNamespace(
        module=model, config=config, layers=layers, pages=WeakSet(), sha256={}
    )
    return TorchRuntime(
        loaded, device=CARD, dtype=torch.bfloat16, lean=way != "modules", positions=16384
    )


def _codes(rows: int, columns: int) -> BlockMatrix:
    """Random ones: to round weights takes longer than all the rest."""
    blocks = columns // BLOCK
    codes = torch.randint(0, 256, (rows, blocks, BLOCK // 2), dtype=torch.uint8, device=CARD)
    zeros = torch.full((rows, (blocks + 1) // 2), 0x77, dtype=torch.uint8, device=CARD)
    scales = torch.full((rows, blocks), 0.004, device=CARD)
    return BlockMatrix(4, (rows, columns), codes, scales, zeros)


def _caches(runtime: TorchRuntime) -> list[KeyValueCache]:
    found: list[KeyValueCache] = [runtime.new_cache(2 * BEHIND) for _ in range(16)]
    for cache in found:
        for first in range(0, BEHIND, PIECE):
            runtime.forward([StepInput(cache, first, _rows(runtime, PIECE))])
    return found


def _rows(runtime: TorchRuntime, count: int) -> torch.Tensor:
    return torch.randn(1, count, runtime.row_size) * 0.5


def _step(runtime: TorchRuntime, caches: list[KeyValueCache], rows: int) -> Callable[[], object]:
    hidden = _rows(runtime, rows)
    steps = [StepInput(cache, BEHIND, hidden) for cache in caches]
    return lambda: [each.to(torch.float16).cpu() for each in runtime.forward(steps)]


def _piece(runtime: TorchRuntime, cache: KeyValueCache) -> Callable[[], object]:
    step = StepInput(cache, 0, _rows(runtime, PIECE))
    return lambda: runtime.forward([step])[0].to(torch.float16).cpu()


def _medians(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    took: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(ROUNDS + 3):
        for way, run in ways.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            run()
            if number >= 3:  # before that, kernels are chosen and steps captured
                took[way].append((time.perf_counter() - started) * 1000)
    return {way: round(statistics.median(each), 2) for way, each in took.items()}
