"""How fast a device reads weights and multiplies by them, in each format that it can compute in.

Matrices as large as a real layer's, more of them than caches hold; what a layer costs besides is
timed on the built-in model, whose own matrices cost nearly nothing. The median of the rounds
counts, as in serving: the best one is what memory gives when nobody else wants any of it. Takes
about a second of one core, and blocks meanwhile.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import nn

from mesh.capacity import MEASURING_MB, Device, Speed
from mesh.errors import MeshError
from mesh.models.builtin import checkpoint_dir
from mesh.processes.headroom import ram
from mesh.shard import int4
from mesh.shard.commands import ShardRequest
from mesh.shard.compiled.formats import BITS, BLOCK, BlockMatrix, Quant
from mesh.shard.device import DTYPES, cpu_fast_dtypes, headroom
from mesh.shard.linear import choose_kernels, halving_fails
from mesh.shard.load_plan import HostedOn, plan_shard
from mesh.shard.loading import load_shard
from mesh.shard.runtime import StepInput
from mesh.types import HALVED_FORMAT, Endpoint, LayerRange, ModelId, NodeId

logger = logging.getLogger(__name__)

_SIDE = 4096
_ROWS = 128
_ROUNDS = 5
_MB = (32, 192)
"""Of weights that are read in a round: more than caches hold, and fewer where memory is short, as
caches are smaller there, too."""
_LAYERS = LayerRange(0, 4)
_STEPS = 16
_PAUSE_S = 0.008
"""What a hop waits for the others of its route, about."""


def measure(device: torch.device, threads: int, dtype: str = "auto") -> Device:
    """The device with its memory as it is now and a speed for each format that works there and that
    shards which are asked for in `dtype` have."""
    torch.set_num_threads(threads)
    memory = headroom(device, ram())
    size, speeds = round_bytes(memory.free_mb), []
    with torch.inference_mode():
        for one in _speeds(device, threads, dtype, size):
            try:
                speeds.append(one())
            except (MeshError, RuntimeError) as error:  # a kernel that this machine has not
                logger.warning("a format is not measured: %s", error)
        visit_ms = _visit_ms(device)
    sizes = memory.free_mb << 20, memory.total_mb << 20
    return Device(str(device), *sizes, tuple(speeds), visit_ms)


def round_bytes(free_mb: int) -> int:
    """Of weights to read in a round where so much is free: there are more than three copies of
    them while a format is prepared."""
    least, most = _MB
    return min(most, max(least, (free_mb - MEASURING_MB // 2) // 4)) << 20


def float_formats(device: torch.device, dtype: str) -> tuple[str, ...]:
    """The formats of unquantised shards there that are asked for in `dtype`, whatever is stored."""
    if dtype != "auto":
        return (dtype,)
    if device.type != "cpu":
        return ("fp32", "fp16", "bf16")
    halved = () if halving_fails() else (HALVED_FORMAT,)
    return ("fp32", *sorted(cpu_fast_dtypes()), *halved)


def _speeds(
    device: torch.device, threads: int, dtype: str, size: int
) -> Iterator[Callable[[], Speed]]:
    for name in float_formats(device, dtype):
        yield lambda name=name: _plain(device, name, size)  # type: ignore[misc]
    if device.type == "cpu":
        for quant in BITS:
            yield lambda quant=quant: _quantised(quant, threads, size)  # type: ignore[misc]
    elif int4.why_not(device) is None:
        yield lambda: _in_4_bit(device, size)


def _plain(device: torch.device, name: str, size: int) -> Speed:
    # Not zeros: memory that nobody has written to is one page, again and again.
    halved, wide = name == HALVED_FORMAT, _SIDE // 2
    kept, computed = (torch.float16, torch.float32) if halved else (DTYPES[name],) * 2
    weights = _SIDE * wide
    count = math.ceil(size / (weights * kept.itemsize))
    layers = nn.ModuleList(_linear(wide, device, kept) for _ in range(count))
    choose_kernels(layers, computed, device, halved=halved)  # as a shard would
    row, rows = (torch.ones(n, wide, dtype=computed, device=device) for n in (1, _ROWS))
    work = _work(layers, row, rows, count * weights * kept.itemsize)
    layer_ms = _layer_ms(device, "auto" if halved else name, "none")  # it is stored in fp16
    return _speed(name, *work, layer_ms)


def _work(
    layers: nn.ModuleList, row: torch.Tensor, rows: torch.Tensor, size: int
) -> tuple[Work, Work]:
    """A row through all of these layers, of `size` bytes, and `rows` through the first."""

    def decode() -> None:
        for layer in layers:
            layer(row)
        _wait(row.device)

    def prefill() -> None:
        layers[0](rows)
        _wait(row.device)

    return (size, decode), (2 * len(rows) * rows.shape[1] * _SIDE, prefill)


def _in_4_bit(device: torch.device, size: int) -> Speed:
    matrix = _matrix(BITS["int4"])
    count = math.ceil(size / matrix.nbytes)
    layers = nn.ModuleList(int4.Int4Linear(matrix, None, device) for _ in range(count))
    row, rows = (torch.ones(n, _SIDE, dtype=torch.bfloat16, device=device) for n in (1, _ROWS))
    work = _work(layers, row, rows, count * matrix.nbytes)
    return _speed("int4", *work, _layer_ms(device, "auto", "int4"))


def _linear(columns: int, device: torch.device, dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(columns, _SIDE, bias=False, device="meta", dtype=dtype)
    layer.to_empty(device=device)
    nn.init.constant_(layer.weight, 0.01)
    return layer


def _quantised(quant: Quant, threads: int, size: int) -> Speed:
    # Not before it is needed: onnxruntime takes its time to import, and memory.
    from mesh.shard.compiled.builder import Product
    from mesh.shard.compiled.engine import Binding, compiled
    from mesh.shard.compiled.graph import product_model

    matrix = _matrix(BITS[quant])
    model = product_model(Product(matrix, None), _SIDE, _SIDE)
    # Each session has a copy of its own, so that no cache holds them all.
    count = math.ceil(size / matrix.nbytes)
    sessions = [compiled(model, threads) for _ in range(count)]

    def bound(session: object, rows: int) -> Binding:
        return Binding.of(session, {"x": torch.ones(rows, _SIDE)}, {"y": torch.empty(rows, _SIDE)})

    steps, prefill = [bound(each, 1) for each in sessions], bound(sessions[0], _ROWS)

    def decode() -> None:
        for step in steps:
            step.run()

    work = (count * matrix.nbytes, decode), (2 * _ROWS * _SIDE**2, prefill.run)
    return _speed(quant, *work, _layer_ms(torch.device("cpu"), "fp32", quant))


def _matrix(bits: int) -> BlockMatrix:
    blocks = _SIDE // BLOCK
    codes = torch.full((_SIDE, blocks, BLOCK * bits // 8), 0x87, dtype=torch.uint8)
    scales = torch.full((_SIDE, blocks), 0.01)
    zeros = torch.full((_SIDE, (blocks + 1) // 2), 0x88, dtype=torch.uint8) if bits == 4 else None
    return BlockMatrix(bits, (_SIDE, _SIDE), codes, scales, zeros)


Work = tuple[int, Callable[[], None]]
"""How much something does, in bytes or operations, and how to do it once."""


def _speed(name: str, decode: Work, prefill: Work, layer_ms: float) -> Speed:
    read, computed = (amount / _usual_s(work) / 1e9 for amount, work in (decode, prefill))
    return Speed(name, read, computed, layer_ms)


def _usual_s(work: Callable[[], None]) -> float:
    work()  # kernels are chosen, and memory is taken, the first time
    took = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
    return median(took)


def _layer_ms(device: torch.device, dtype: str, quant: str) -> float:
    """What a layer takes beside its matrices."""
    return _step_ms(device, dtype, quant, pause_s=0.0) / len(_LAYERS)


def _visit_ms(device: torch.device) -> float:
    """What a step takes longer when the device has waited: waking up, caches that went cold."""
    quant = "int8" if device.type == "cpu" else "none"
    waited, at_once = (_step_ms(device, "fp32", quant, pause_s=pause) for pause in (_PAUSE_S, 0.0))
    return max(0.0, waited - at_once)


def _step_ms(device: torch.device, dtype: str, quant: str, *, pause_s: float) -> float:
    """A decode step through a few layers of the built-in model, each after a pause."""
    host = HostedOn(NodeId("here"), "here", Endpoint("wss://127.0.0.1:1"), device, 1)
    request = ShardRequest(checkpoint_dir(), ModelId("builtin"), _LAYERS, dtype, quant)
    runtime = load_shard(plan_shard(request, host)).load()
    cache = runtime.new_cache(_STEPS)
    hidden = torch.zeros(1, 1, runtime.row_size, dtype=runtime.dtype, device=device)
    took = []
    for position in range(_STEPS):
        time.sleep(pause_s)
        started = time.perf_counter()
        runtime.forward([StepInput(cache, position, hidden)])
        _wait(device)
        took.append(time.perf_counter() - started)
    return median(took) * 1000


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
