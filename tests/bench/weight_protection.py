"""What it costs that nobody can change a shard's weights: ratios, 1 is free.

Read-only memory costs nothing once it is set. What is measured: a decode step while the shard's
weights are hashed over and over beside it, at the share of time that the watch takes, to one
without; and a trivial trace whose every tensor operation on the shard is looked at, to one whose
operations are not. Both kinds take turns in one process, so that the ratios hold on a busy machine.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mesh.models.load import load_span
from mesh.models.manifest import read_manifest
from mesh.shard.device import DTYPES
from mesh.shard.runtime import StepInput
from mesh.shard.torch_runtime import TorchRuntime
from mesh.shard.weight_check import WeightCheck
from mesh.shard.weight_watch import SHARE, SLICE_BYTES
from mesh.types import LayerRange
from tests.bench.noise import wait_for_idle

CPU = torch.device("cpu")
DECODE_STEPS, PROMPT_ROWS, ROUNDS = 40, 16, 15
TRACES = 40


def measure() -> dict[str, Any]:
    """Medians and quartiles of time with to time without, per kind."""
    from tests.checkpoints import make_large_checkpoint

    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for dtype in ("bf16", "fp16"):  # packed weights, and plain ones
            stored = str(DTYPES[dtype]).removeprefix("torch.")
            checkpoint = make_large_checkpoint(Path(directory) / dtype, "0.16B", stored)
            results[f"decode_{dtype}_checked"] = _decode(checkpoint, dtype)
    results["trivial_trace_watched"] = _traces()
    return results


def _decode(checkpoint: Path, dtype: str) -> dict[str, float]:
    manifest = read_manifest(checkpoint)
    layers = LayerRange(0, manifest.total_layers)
    loaded = load_span(manifest, layers, dtype=DTYPES[dtype], device=CPU)
    span = TorchRuntime(loaded, device=CPU, dtype=DTYPES[dtype])
    hidden = torch.randn(1, PROMPT_ROWS, manifest.hidden_size).to(DTYPES[dtype])
    watch = _Watch(WeightCheck(loaded.module, loaded.sha256))

    def steps() -> float:
        cache = span.new_cache(PROMPT_ROWS + DECODE_STEPS)
        span.forward([StepInput(cache, 0, hidden)])
        started = time.perf_counter()
        for i in range(DECODE_STEPS):
            span.forward([StepInput(cache, PROMPT_ROWS + i, hidden[:, :1])])
        return time.perf_counter() - started

    def checked() -> float:
        with watch.running():
            return steps()

    return _ratios(checked, steps)


class _Watch:
    """Slices of the check beside the decode, as the shard's watch paces them."""

    def __init__(self, check: WeightCheck) -> None:
        self._check = check
        self._rest_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Check meanwhile; what is left of a rest goes on at the next time."""
        ended = threading.Event()
        thread = threading.Thread(target=self._run, args=(ended,))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _run(self, ended: threading.Event) -> None:
        while True:
            begun = time.perf_counter()
            if ended.wait(self._rest_s):
                self._rest_s -= time.perf_counter() - begun
                return
            begun = time.thread_time()
            assert self._check.step(SLICE_BYTES) is None
            self._rest_s = (time.thread_time() - begun) / SHARE


def _traces() -> dict[str, float]:
    # Not above: the decode is measured in a process as it is without them.
    from tests.interventions.cases import CASES, Parts
    from tests.interventions.worlds import remote

    def trace(world: Any) -> float:
        parts = Parts(world.model)
        started = time.perf_counter()
        CASES["logits"](parts)
        return time.perf_counter() - started

    watched, unwatched = remote("llama", 2), remote("llama", 2)
    for session in unwatched.channel.sessions:
        session._guard = _Unwatched()  # type: ignore[assignment]
    return _ratios(lambda: trace(watched), lambda: trace(unwatched), TRACES)


class _Unwatched:
    """In the place of the look at each operation."""

    graph = None

    def __enter__(self) -> None:
        """See `OperationGuard`."""

    def __exit__(self, *_: object) -> None:
        """See `OperationGuard`."""

    def count(self, _tensor: torch.Tensor) -> None:
        """See `OperationGuard`."""


def _ratios(
    one: Callable[[], float], other: Callable[[], float], rounds: int = ROUNDS
) -> dict[str, float]:
    """Of pairs that follow each other, in turns which is first."""
    one(), other()
    ratios = []
    wait_for_idle(5.0)
    for number in range(rounds):
        if number % 2:
            first = one()
            ratios.append(first / other())
        else:
            second = other()
            ratios.append(one() / second)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"ratio": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
