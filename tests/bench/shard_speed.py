"""How fast a shard computes compared with Hugging Face's own forward over the same layers.

Both run all layers of the 0.16B shape in one process on one thread, alternating, so that the
ratios hold on a busy machine. A child process tells what a loaded shard takes beyond its weights
and cache.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import DynamicCache

from mesh.errors import MeshError
from mesh.models.load import load_span
from mesh.models.manifest import read_manifest
from mesh.shard.device import DTYPES
from mesh.shard.runtime import StepInput
from mesh.shard.scheduler import Sequence, Task, compute
from mesh.shard.settings import ShardSettings
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange, WireDtype
from mesh.wire.activations import to_wire
from mesh.wire.messages import Step

CPU = torch.device("cpu")
PROMPT_ROWS = 128
DECODE_STEPS = 24
PREFILL_ROWS = 512
ROUNDS = 5


def measure() -> dict[str, Any]:
    """tokens/s of ours and of Hugging Face, and their ratio, per dtype and phase; MB of memory."""
    # Not above: what it imports is no part of a shard process, whose memory the child measures.
    from tests.checkpoints import make_large_checkpoint

    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for dtype in ("bf16", "fp32"):
            stored = str(DTYPES[dtype]).removeprefix("torch.")
            checkpoint = make_large_checkpoint(Path(directory) / dtype, "0.16B", stored)
            results[dtype] = _compare(checkpoint, dtype) | {"memory": _in_child(checkpoint, dtype)}
    return results


def _compare(checkpoint: Path, dtype: str) -> dict[str, Any]:
    manifest = read_manifest(checkpoint)
    layers = LayerRange(0, manifest.total_layers)

    def load() -> Any:
        return load_span(manifest, layers, dtype=DTYPES[dtype], device=CPU)

    theirs = load().module.eval()
    ours = TorchRuntime(load(), device=CPU, dtype=DTYPES[dtype], lean=dtype == "bf16")
    hidden = torch.randn(1, PREFILL_ROWS, manifest.hidden_size).to(DTYPES[dtype])
    phases: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
        "decode": (lambda: _our_decode(ours, hidden), lambda: _their_decode(theirs, hidden)),
        "prefill": (lambda: _our_prefill(ours, hidden), lambda: _their_prefill(theirs, hidden)),
    }
    results: dict[str, Any] = {"reasons": ours.reasons}
    for phase, (our, their) in phases.items():
        our(), their()
        pairs = [(our(), their()) for _ in range(ROUNDS)]
        results[phase] = {
            "ours_tok_s": statistics.median(a for a, _ in pairs),
            "hugging_face_tok_s": statistics.median(b for _, b in pairs),
            "ratio": statistics.median(a / b for a, b in pairs),
        }
    results["batch"] = {size: _batched_decode(ours, hidden, size) for size in (1, 2, 4, 8)}
    return results


def _our_decode(span: TorchRuntime, hidden: torch.Tensor) -> float:
    return _batched_decode(span, hidden, 1)


def _batched_decode(span: TorchRuntime, hidden: torch.Tensor, sessions: int) -> float:
    caches = [span.new_cache(1024) for _ in range(sessions)]
    for cache in caches:
        span.forward([StepInput(cache, 0, hidden[:, :PROMPT_ROWS])])
    started = time.perf_counter()
    for i in range(DECODE_STEPS):
        row = hidden[:, i : i + 1]
        span.forward([StepInput(cache, PROMPT_ROWS + i, row) for cache in caches])
    return sessions * DECODE_STEPS / (time.perf_counter() - started)


@torch.inference_mode()
def _their_decode(module: Any, hidden: torch.Tensor) -> float:
    cache = DynamicCache(config=module.config)
    module(inputs_embeds=hidden[:, :PROMPT_ROWS], past_key_values=cache, use_cache=True)
    started = time.perf_counter()
    for i in range(DECODE_STEPS):
        module(inputs_embeds=hidden[:, i : i + 1], past_key_values=cache, use_cache=True)
    return DECODE_STEPS / (time.perf_counter() - started)


def _our_prefill(span: TorchRuntime, hidden: torch.Tensor) -> float:
    started = time.perf_counter()
    span.forward([StepInput(span.new_cache(1024), 0, hidden)])
    return PREFILL_ROWS / (time.perf_counter() - started)


@torch.inference_mode()
def _their_prefill(module: Any, hidden: torch.Tensor) -> float:
    started = time.perf_counter()
    cache = DynamicCache(config=module.config)
    module(inputs_embeds=hidden, past_key_values=cache, use_cache=True)
    return PREFILL_ROWS / (time.perf_counter() - started)


def _in_child(checkpoint: Path, dtype: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.bench.shard_speed", str(checkpoint), dtype]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    memory: dict[str, float] = json.loads(output.splitlines()[-1])
    return memory


def _memory(checkpoint: Path, dtype: str) -> dict[str, float]:
    torch.set_num_threads(1)
    process = psutil.Process()
    manifest = read_manifest(checkpoint)
    layers = LayerRange(0, manifest.total_layers)
    loaded = load_span(manifest, layers, dtype=DTYPES[dtype], device=CPU)
    weights = loaded.bytes_read
    span = TorchRuntime(loaded, device=CPU, dtype=DTYPES[dtype], lean=dtype == "bf16")
    del loaded
    # As a shard computes: in pieces, and with the wire's conversions.
    settings = ShardSettings()
    cache = span.new_cache(2 * PREFILL_ROWS)
    sequence = Sequence(span, layers, cache, WireDtype.FP16, settings, lambda _: None)
    for position, rows in ((0, PREFILL_ROWS), (PREFILL_ROWS, PREFILL_ROWS - 1), (-1, 1)):
        tensor = to_wire(torch.randn(1, rows, manifest.hidden_size), WireDtype.FP16)
        start = cache.length if position < 0 else position
        task = Task(sequence, Step(1, position, start, tensor), lambda _: None)
        while (result := compute([task])[0]) is None:
            pass
        if isinstance(result, MeshError):
            raise result
    rss, peak = process.memory_info().rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    expected = weights + cache.allocated_bytes
    return {
        "weights_mb": weights / 2**20,
        "kv_mb": cache.allocated_bytes / 2**20,
        "rss_mb": rss / 2**20,
        "beyond_mb": (rss - expected) / 2**20,
        # While bf16 weights are repacked, the file they come from is still mapped.
        "peak_beyond_mb": (peak * 1024 - expected) / 2**20,
    }


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(_memory(Path(sys.argv[1]), sys.argv[2])))
    else:
        print(json.dumps(measure(), indent=2))
