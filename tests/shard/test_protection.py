"""Weights are memory that cannot be written to: whoever tries ends with the process."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mesh.models.load import load_span
from mesh.models.pages import PAGE_BYTES
from mesh.shard import protection
from mesh.shard.belongings import belongings
from mesh.shard.packed import packed_memory
from mesh.shard.protection import Protection
from mesh.shard.taps.borrowing import sharing
from mesh.shard.taps.tree import SpanTree
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange
from tests.interventions.worlds import CPU, checkpoint
from tests.shard.spans import plain_kernels, rows, step

SPAN = LayerRange(1, 5)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc/self/maps")


def loaded(family: str, dtype: torch.dtype = torch.float32) -> Any:
    return load_span(checkpoint(family), SPAN, dtype=dtype, device=CPU)


def runtime(family: str, dtype: torch.dtype = torch.float32) -> TorchRuntime:
    return TorchRuntime(loaded(family, dtype), device=CPU, dtype=dtype)


def writable(address: int) -> bool:
    """Whether the kernel lets this process write there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, permissions = line.split()[:2]
        start, stop = (int(end, 16) for end in area.split("-"))
        if start <= address < stop:
            return "w" in permissions
    raise AssertionError(f"nothing is mapped at {address:#x}")


def unprotected(module: Any) -> list[str]:
    """The tensors that can be written to at their beginning or end."""
    return [
        each.name
        for each in belongings(module)
        if not each.tensor.is_mkldnn
        and (
            writable(each.tensor.data_ptr())
            or writable(each.tensor.data_ptr() + each.tensor.nbytes - 1)
        )
    ]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_no_weight_of_chat_or_jobs_can_be_written_to(
    family: str,
) -> None:
    with plain_kernels():
        span = runtime(family)
    assert unprotected(span.loaded.module) == []
    assert span.protection.protected_bytes == span.protection.total_bytes > 0
    shared = sharing(span.loaded)
    assert shared is not None
    assert unprotected(SpanTree(shared, CPU).loaded.module) == []
    assert unprotected(SpanTree(loaded(family), CPU).loaded.module) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_of_another_dtype_are_protected_where_they_are_converted_to(
    dtype: torch.dtype,
) -> None:
    with plain_kernels():
        span = runtime("llama", dtype)
    assert unprotected(span.loaded.module) == []


def test_packed_weights_are_protected_but_for_their_edges() -> None:
    span = runtime("llama")
    assert "onednn" in span.kernels
    assert unprotected(span.loaded.module) == []
    packed = [each.tensor for each in belongings(span.loaded.module) if each.tensor.is_mkldnn]
    assert packed
    safe = 0
    for tensor in packed:
        address, size = packed_memory(tensor) or (0, 0)
        safe += not writable(address + size // 2)
        assert size < 2 * PAGE_BYTES or not writable(address + size // 2)
    assert safe


def test_no_more_packed_weights_are_protected_than_a_process_has_mappings_for() -> None:
    span = runtime("qwen3_moe")
    packed = [each.tensor for each in belongings(span.loaded.module) if each.tensor.is_mkldnn]
    del span.protection  # they are free to be protected anew
    few = Protection(span.loaded.module, span.loaded.pages, most_packed=3)
    middles = [address + size // 2 for address, size in map(packed_memory, packed) if size]
    assert sum(not writable(middle) for middle in middles) == 3
    assert few.protected_bytes < few.total_bytes


WRITER = """
from mesh.processes.lean import import_modelling; import_modelling()
import os, torch
from pathlib import Path
from mesh.models.load import load_span
from mesh.models.manifest import read_manifest
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange
cpu, dtype = torch.device("cpu"), torch.float32
loaded = load_span(read_manifest(Path({directory!r})), LayerRange(1, 5), dtype=dtype, device=cpu)
span = TorchRuntime(loaded, device=cpu, dtype=dtype)
if not os.fork():
    next(span.loaded.module.parameters()).data.mul_(2)
    os._exit(0)
print(span.kernels, os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_process_that_writes_to_a_weight_ends_and_one_that_does_not_ends_well() -> None:
    """Also with packed weights, which are freed when it does."""
    code = WRITER.format(directory=str(checkpoint("llama").directory))
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert b"onednn" in ended.stdout
    assert ended.stdout.split()[-1] == b"%d" % -signal.SIGSEGV, ended.stderr
    assert ended.returncode == 0


def test_a_span_computes_the_same_and_is_freed_whole() -> None:
    """Whoever frees packed weights writes to their memory: it has to be writable by then."""
    base = 0
    for _ in range(6):
        span = runtime("llama")
        cache = span.new_cache(64)
        step(span, cache, 0, rows(9))
        del span, cache
        gc.collect()
        base = base or psutil.Process().memory_info().rss
    assert psutil.Process().memory_info().rss < base + (32 << 20)


def test_where_memory_cannot_be_protected_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protection, "set_writable", lambda *_args, writable: False)
    span = runtime("llama")
    assert span.protection.protected_bytes == 0
    assert "weights read-only: 0.0 of" in span.protection.reason
    assert span.protection.reason in span.reasons
