"""Two shards beside the same runtime in one process, behind short and long contexts.

Both have one core for the layers, and give one answer greedily. Attention alone is what the
runtime's own attention takes for a row of every layer behind as many positions; what a token takes
beyond it should not depend on how many there are.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mesh.cli.local_node import LocalNode
from mesh.shard.attention import row_exact_attention_of, rule_mask
from mesh.shard.commands import ShardRequest
from mesh.shard.load_plan import HostedOn, plan_shard
from mesh.shard.loading import load_shard
from mesh.shard.runtime import KeyValueCache, Runtime, StepInput
from mesh.types import Endpoint, LayerRange, ModelId, NodeId
from tests.bench.mesh_speed import SHAPES, mesh_run, pin, start_halves
from tests.bench.noise import wait_for_idle
from tests.checkpoints import make_large_checkpoint

SHAPE, HEADS = "0.16B", (12, 64)
"""How many heads its attention has, and how wide they are; all have their own keys."""
QUANTS = ("none", "int8", "int4")
CONTEXTS = (64, 2048, 8000)
PIECE, TOKENS = 256, 32
ROUNDS = 3

HERE = HostedOn(NodeId("n"), "here", Endpoint("wss://127.0.0.1:1"), torch.device("cpu"), 1)


class OneProcess:
    """All layers and the model's ends on one thread, in a process of its own."""

    def __init__(self, directory: Path, quant: str, cache_dir: Path) -> None:
        module = "tests.bench.one_process"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(directory), quant, str(cache_dir)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._line()
        pin(self._process.pid, 0)

    def run(self, what: str, context: int) -> float:
        """Milliseconds a token; `what` is ``token`` or ``attention``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, context]) + "\n")
        self._process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait(10)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process with all layers ended")
        return line


def _serve(directory: Path, quant: str, cache_dir: Path) -> None:
    torch.set_num_threads(1)
    layers = LayerRange(0, SHAPES[SHAPE])
    request = ShardRequest(directory, ModelId("bench"), layers, quant=quant, cache_dir=cache_dir)
    loaded = load_shard(plan_shard(request, HERE))
    runtime = loaded.load()
    caches = {context: _filled(runtime, context, loaded.shape.hidden_size) for context in CONTEXTS}
    ends = loaded.load_ends().ends

    def token(context: int) -> float:
        cache = caches[context]
        cache.cut(context)
        row, started = 3, time.perf_counter()
        for position in range(context, context + TOKENS):
            hidden = ends.embed(torch.tensor([[row]]), position)
            found = runtime.forward([StepInput(cache, position, hidden)])[0]
            row = int(ends.logits(found).argmax())
        return (time.perf_counter() - started) / TOKENS * 1e3

    alone = {"token": token, "attention": _attention(layers.stop, *HEADS, quant)}
    print("ready", flush=True)
    for line in sys.stdin:
        what, context = json.loads(line)
        print(alone[what](context), flush=True)


def _filled(runtime: Runtime, context: int, hidden_size: int) -> KeyValueCache:
    """With so many positions of noise, and room for an answer."""
    cache = runtime.new_cache(context + TOKENS)
    for position in range(0, context, PIECE):
        hidden = torch.randn(1, min(PIECE, context - position), hidden_size)
        runtime.forward([StepInput(cache, position, hidden)])
    return cache


def _attention(layers: int, heads: int, width: int, quant: str) -> Callable[[int], float]:
    """What a row's attention over all layers takes, in milliseconds, by the positions before it."""
    shape = (1, heads, max(CONTEXTS) + 2, width)
    keys = [torch.randn(shape) for _ in range(layers)]
    values = [torch.randn(shape) for _ in range(layers)]
    over = _by_torch if quant == "none" else _by_onnxruntime

    def measured(context: int) -> float:
        calls = [over(k, v, context) for k, v in zip(keys, values, strict=True)]
        times = []
        for _ in range(TOKENS):
            started = time.perf_counter()
            for call in calls:
                call()
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e3

    return measured


def _by_torch(keys: torch.Tensor, values: torch.Tensor, context: int) -> Callable[[], Any]:
    attend, rule = row_exact_attention_of(None), rule_mask(q_length=1)
    query, seen = torch.randn_like(keys[:, :, :1]), slice(0, context + 1)
    return lambda: attend(query, keys[:, :, seen], values[:, :, seen], rule, None)


def _by_onnxruntime(keys: torch.Tensor, values: torch.Tensor, context: int) -> Callable[[], Any]:
    # Not above: it takes its time to import, and memory.
    from mesh.shard.compiled.attention_graph import attention_model, padding, row_shape
    from mesh.shard.compiled.engine import Binding, compiled
    from mesh.shard.compiled.parts import Attention

    _, heads, positions, width = keys.shape
    nothing = torch.nn.Identity()
    attention = Attention(
        projections=(), output=nothing, heads=heads, kv_heads=heads, width=width,
        scale=width**-0.5, softcap=0.0, window=None, table="", query_norm=None, key_norm=None,
        norm_whole=False,
    )  # fmt: skip
    given = 1 + padding(1)
    total = torch.tensor([context + given], dtype=torch.int32)
    inputs = row_shape(1) | {
        "projected": torch.randn(1, 1, 3 * heads * width), "keys": keys, "values": values,
        "last": total - 1, "total": total[0], "queries": torch.tensor([given], dtype=torch.int32),
        "cos": torch.ones(positions, width // 2), "sin": torch.zeros(positions, width // 2),
    }  # fmt: skip
    outputs = {"attended": torch.zeros(1, 1, heads * width), "new_keys": keys, "new_values": values}
    return Binding.of(compiled(attention_model(attention), 1), inputs, outputs).run


def measure_one(directory: Path, quant: str, root: Path) -> dict[str, Any]:
    """Milliseconds a token, by context, and what they tell; medians of ratios."""
    common = ("--model", f"{directory}=bench", "--quant", quant)
    with contextlib.ExitStack() as stack:
        nodes = start_halves(SHAPES[SHAPE], root / quant, common, stack)
        alone = OneProcess(directory, quant, root / "cache")
        stack.callback(alone.close)
        return _rounds(nodes[2], alone)


def _rounds(asker: LocalNode, alone: OneProcess) -> dict[str, Any]:
    rng = random.Random(0)
    text = [rng.randrange(3, 30000) for _ in range(max(CONTEXTS))]
    rows: dict[int, dict[str, list[float]]] = {c: defaultdict(list) for c in CONTEXTS}
    for context in CONTEXTS:
        mesh_run(asker, text[:context], 2)
    busy = 0
    for number in range(ROUNDS):
        for context, row in rows.items():
            samples = _samples(asker, alone, text[:context])
            for name in samples if number % 2 == 0 else reversed(samples):
                busy += not wait_for_idle()
                row[name].append(samples[name]())
    medians = {
        context: {name: round(statistics.median(times), 2) for name, times in row.items()}
        for context, row in rows.items()
    }
    beyond = [row["mesh"] - row["attention"] for row in medians.values()]
    return {
        "ms a token": medians,
        "two shards against one process": {
            context: round(statistics.median(_ratios(row)), 3) for context, row in rows.items()
        },
        "beyond attention, against the shortest": [round(each / beyond[0], 3) for each in beyond],
        "samples on a busy machine": busy,
    }


def _samples(
    asker: LocalNode, alone: OneProcess, text: list[int]
) -> dict[str, Callable[[], float]]:
    return {
        "mesh": lambda: 1e3 / mesh_run(asker, text, TOKENS)["tokens_per_second"],
        "one process": lambda: alone.run("token", len(text)),
        "attention": lambda: alone.run("attention", len(text)),
    }


def _ratios(row: dict[str, list[float]]) -> list[float]:
    return [a / b for a, b in zip(row["one process"], row["mesh"], strict=True)]


def measure() -> dict[str, Any]:
    """Of each format; see `measure_one`."""
    with tempfile.TemporaryDirectory() as name:
        directory = make_large_checkpoint(Path(name) / SHAPE, SHAPE)
        return {quant: measure_one(directory, quant, Path(name)) for quant in QUANTS}


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
