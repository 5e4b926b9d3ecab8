"""Which device, dtype and thread count a shard computes with, each with the reason to print.

Knows nothing of models: it is told how a checkpoint is stored and answers what to compute in.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar, cast

import psutil
import torch
import torch.nn.functional as F
import transformers

from mesh.capacity import cores_of
from mesh.errors import BadValue
from mesh.models.coded.scheme import is_decoded
from mesh.processes.headroom import Headroom, ram
from mesh.processes.memory_budget import MemoryBudget, MemoryCaps
from mesh.processes.processor import allowed_cores, cpu_flags, run_on
from mesh.shard import int4
from mesh.shard.compiled.formats import BITS, Quant

T = TypeVar("T")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Choice(Generic[T]):
    """A value that was chosen, and why."""

    value: T
    reason: str
    is_passing: bool = False
    """Whether the reason is one of the moment."""


class Timed(NamedTuple):
    """How long threads computed, and how much of that they ran: a core each is 1."""

    ms: float
    ran: float


_UNDISTURBED = 0.8
"""Threads that nobody disturbs run while they wait for each other as well."""


def dtype_name(dtype: torch.dtype) -> str:
    """``fp32``, ``bf16`` or ``fp16``. KeyError for any other dtype."""
    return {dtype: name for name, dtype in DTYPES.items()}[dtype]


def short_dtype_name(name: str) -> str:
    """``fp32`` for ``float32`` and so on; any other name as it is."""
    return {str(d).removeprefix("torch."): short for short, d in DTYPES.items()}.get(name, name)


def plain_dtype_name(stored: str) -> str:
    """The dtype that weights stored as `stored` are made of where they are not quantised: ``bf16``
    for what stands in blocks for numbers, which says less than that."""
    return "bf16" if is_decoded(stored) else short_dtype_name(stored)


def plain_dtype(stored: str) -> torch.dtype:
    """That of `plain_dtype_name`; fp32 where it is none that is computed in."""
    return DTYPES.get(plain_dtype_name(stored), torch.float32)


def choose_device(requested: str = "auto") -> Choice[torch.device]:
    """``auto``, ``cpu``, some of its cores (``cpu:0-3``), ``cuda``, ``cuda:N`` or ``mps``. Raises
    BadValue when it is not there."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if requested == "auto":
        if cuda:
            name, count = torch.cuda.get_device_name(0), torch.cuda.device_count()
            more = f"; of {count} it is the first, --device all takes all" if count > 1 else ""
            return Choice(torch.device("cuda:0"), f"device cuda:0: found {name}{more}")
        if mps:
            return Choice(torch.device("mps"), "device mps: Apple GPU found")
        return Choice(torch.device("cpu"), "device cpu: no CUDA or Apple GPU found")
    if (cores := cores_of(requested)) is not None and set(cores) <= (allowed_cores() or set()):
        return Choice(torch.device("cpu"), f"device cpu, cores {requested[4:]}: as requested")
    kind, _, index = requested.partition(":")
    there = {"cpu": requested == "cpu", "mps": mps and not index, "cuda": cuda}.get(kind, False)
    if there and kind == "cuda":
        there = (index or "0").isdigit() and int(index or 0) < torch.cuda.device_count()
    if not there:
        raise BadValue(
            f"device {requested!r} is not available here.",
            fix="Use auto, cpu, cpu:LO-HI, cuda, cuda:N or mps, as far as this machine has it.",
            param="device",
        )
    device = torch.device(f"cuda:{index or 0}" if kind == "cuda" else kind)
    return Choice(device, f"device {device}: as requested")


def occupy(requested: str) -> Choice[torch.device]:
    """Choose the device as `choose_device` does, and compute on no other cores from now on. Raises
    BadValue, OSError."""
    chosen = choose_device(requested)
    if (cores := cores_of(requested)) is not None:
        run_on(cores)
    return chosen


def choose_dtype(
    requested: str, stored: str, device: torch.device, fast: frozenset[str] | None = None
) -> Choice[torch.dtype]:
    """The compute dtype for weights stored as `stored` (``fp16``, or ``float16`` as torch says it).

    `fast` are the 16-bit dtypes that the CPU multiplies natively: this one's unless given. Raises
    BadValue for a dtype that is not one of auto, fp32, bf16, fp16.
    """
    if requested != "auto":
        if requested not in DTYPES:
            raise BadValue(
                f"dtype {requested!r} is unknown.",
                fix="Use auto, fp32, bf16 or fp16.",
                param="dtype",
            )
        return Choice(DTYPES[requested], f"dtype {requested}: as requested")
    in_blocks = is_decoded(stored)
    why = f"weights are stored in blocks, {stored}" if in_blocks else "as stored"
    stored = plain_dtype_name(stored)
    if stored not in DTYPES or stored == "fp32":
        return Choice(torch.float32, f"dtype fp32: weights are stored as {stored}")
    if device.type != "cpu":
        if stored == "bf16" and not _has_bf16(device):
            return Choice(torch.float16, f"dtype fp16: {device.type} here has no bf16")
        return Choice(DTYPES[stored], f"dtype {stored}: {why}")
    if stored in (cpu_fast_dtypes() if fast is None else fast):
        return Choice(DTYPES[stored], f"dtype {stored}: {why}, the CPU computes in it")
    return Choice(torch.float32, f"dtype fp32: this CPU has no fast {stored} arithmetic")


def choose_quant(
    requested: str, device: torch.device, *, is_int4: bool = False, faster: str = "int8"
) -> Choice[Quant | None]:
    """The format of weights: ``none``, ``int8`` or ``int4``, or ``auto``, which on a CPU is int4
    for weights that are stored so, and int8 for all others. `faster` is what is faster on a CPU
    than none, '' where nothing is.

    Raises BadValue for another word, or for a device that has no kernels for it.
    """
    if requested not in ("auto", "none", *BITS):
        raise BadValue(
            f"quant {requested!r} is unknown.",
            fix="Use auto, none, int8 or int4.",
            param="quant",
        )
    if requested == "none":
        better = f"; {faster} is faster on a CPU" if device.type == "cpu" and faster else ""
        return Choice(None, f"quant none: weights as the dtype has them{better}")
    if device.type != "cpu":
        if requested == "auto":
            return Choice(None, f"quant none: int8 is for CPUs, not {device.type}")
        why_not = int4.why_not(device) if requested == "int4" else "int8 is computed on the CPU"
        if why_not is not None:
            raise BadValue(
                f"quant {requested} is not for the device {device}: {why_not}.",
                fix="Use --quant none, or --device cpu.",
                param="quant",
            )
    if requested == "auto" and is_int4:
        return Choice("int4", "quant int4: the weights as they are stored")
    if requested == "auto":
        return Choice("int8", "quant int8: faster on a CPU, and close to exact")
    return Choice(cast("Quant", requested), f"quant {requested}: as requested")


def cpu_fast_dtypes() -> frozenset[str]:
    """The 16-bit dtypes this CPU multiplies natively and well; the others run many times slower.

    fp16 is none of them, also where there is AVX-512 FP16: fp32 over weights that stay in fp16 is
    1.3 times as fast for a step, and gives each row the bits that it has alone, which torch's fp16
    does not.
    """
    flags = cpu_flags()
    if platform.machine() in ("arm64", "aarch64"):
        return frozenset({"bf16"} & flags)
    is_wide = torch.backends.cpu.get_cpu_capability().startswith(("AVX512", "AMX"))
    return frozenset({"bf16"} if is_wide and flags & {"avx512_bf16", "amx_bf16"} else set())


def cpu_has_amx() -> bool:
    """Whether the CPU has matrix tiles, which torch's 16-bit CPU kernels are then built on."""
    return "amx_tile" in cpu_flags()


def choose_threads(
    requested: int,
    device: torch.device,
    cores: int | None = None,
    measure: Callable[[int], Timed] | None = None,
) -> Choice[int]:
    """How many threads a CPU kernel uses; 0 measures one against all physical cores now.

    A second thread on a core that another process wants makes every kernel wait for it, so more
    threads must be clearly faster to be taken; where they waited for cores, that they were not is
    of the moment. `cores` None are those that this process may use; `measure`, `timed_gemv` unless
    given, says how long so many threads take.
    """
    if requested > 0:
        return Choice(requested, f"threads {requested}: as requested")
    cores, measure = cores or usable_cores(), measure or timed_gemv
    if device.type != "cpu" or cores == 1:
        return Choice(
            1, "threads 1: one core" if cores == 1 else f"threads 1: {device.type} computes"
        )
    before = torch.get_num_threads()
    try:
        alone, together = measure(1), measure(cores)
    finally:
        torch.set_num_threads(before)
    gain = alone.ms / together.ms
    if together.ms < 0.85 * alone.ms:
        return Choice(cores, f"threads {cores}: {gain:.1f}x as fast as one, measured")
    said = f"threads 1: {cores} were only {gain:.1f}x as fast, measured"
    is_busy = together.ran < _UNDISTURBED
    return Choice(1, f"{said} while others wanted the cores" if is_busy else said, is_busy)


def headroom(device: torch.device, main: Headroom) -> Headroom:
    """What can still be taken of the device's memory; of main memory it is `main`."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # What the allocator holds and nobody uses is taken from before anything else.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Headroom(free >> 20, total >> 20, f"memory of {torch.cuda.get_device_name(device)}")
    if device.type == "mps":  # shares the machine's
        total = torch.mps.recommended_max_memory()
        left = Headroom(
            (total - torch.mps.driver_allocated_memory()) >> 20, total >> 20, "what Metal may take"
        )
        return min(left, main, key=lambda each: each.free_mb)
    return main


def memory_budget(caps: MemoryCaps | None, device: torch.device) -> MemoryBudget | None:
    """What models may take there altogether; None where nothing limits it. Blocks for a moment."""
    return caps.budget(str(device), headroom(device, ram()).total_mb) if caps is not None else None


def is_lost(error: BaseException) -> bool:
    """Whether an error says that the accelerator does nothing more for this process.

    After a device-side assert or an access out of bounds, whatever a CUDA or HIP context is asked
    raises; only a new process gets a new one. A few of these errors would pass: to start again is
    right for them, too. Memory that runs out comes back.
    """
    return isinstance(error, torch.AcceleratorError) and "out of memory" not in str(error)


def determinism_class(device: torch.device, dtype: torch.dtype, kernels: str, threads: int) -> str:
    """What the last bits of a result depend on, as one comparable string."""
    where = (
        f"cpu-{torch.backends.cpu.get_cpu_capability()}"
        if device.type == "cpu"
        else f"cuda-{torch.cuda.get_device_name(device)}"
        if device.type == "cuda"
        else device.type
    )
    parts = (
        platform.machine(),
        where.replace(" ", "_"),
        dtype_name(dtype),
        kernels,
        f"t{threads}",
        f"torch-{torch.__version__}",
        f"transformers-{transformers.__version__}",
    )
    return "/".join(parts)


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        with torch.cuda.device(device):  # it is asked of the current one
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        probe = torch.ones(2, 2, dtype=torch.bfloat16, device=device)
        return bool((probe @ probe)[0, 0].item() == 2)
    except (RuntimeError, TypeError):
        return False


def usable_cores() -> int:
    """Physical cores that this process may run on."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return min(physical, len(allowed_cores() or range(physical)))


def timed_gemv(threads: int) -> Timed:
    """The best of several matrix-vector products that do not fit a core's caches."""
    torch.set_num_threads(threads)
    weights = [torch.zeros(4096, 2048) for _ in range(4)]
    vector = torch.zeros(1, 2048)
    best = Timed(float("inf"), 0.0)
    with torch.inference_mode():
        for _ in range(4):
            ran, started = time.process_time(), time.perf_counter()
            for weight in weights:
                F.linear(vector, weight)
            took = time.perf_counter() - started
            best = min(best, Timed(took * 1000, (time.process_time() - ran) / took / threads))
    return best
