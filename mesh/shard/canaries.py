"""Attempts to change a loaded weight, one a process: ``mesh.processes.entry`` is told which.

Each says `STARTED` before its attempt. One that was let have its way says `WROTE`, one that was
stopped by something that can be told says `REFUSED`; the others do not live to say anything. What
that means is for `mesh.health.weight_doctor` to judge.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import torch

from mesh.errors import BadRequest
from mesh.health.weight_doctor import ABSENT, REFUSED, STARTED, WROTE
from mesh.models.builtin import checkpoint_dir
from mesh.models.load import load_span
from mesh.models.manifest import read_manifest
from mesh.models.pages import PAGE_BYTES
from mesh.shard.belongings import belongings
from mesh.shard.packed import packed_memory
from mesh.shard.taps.guard import OperationGuard
from mesh.shard.taps.meter import MemoryMeter
from mesh.shard.torch_runtime import TorchRuntime
from mesh.shard.weight_check import WeightCheck
from mesh.types import LayerRange

_CPU = torch.device("cpu")
_SLICE_BYTES = 1 << 30


def _loaded(dtype: torch.dtype) -> TorchRuntime:
    """A layer of the built-in model, which is stored in fp16."""
    loaded = load_span(read_manifest(checkpoint_dir()), LayerRange(0, 1), dtype=dtype, device=_CPU)
    return TorchRuntime(loaded, device=_CPU, dtype=dtype)


def _write(address: int) -> None:
    """Put the byte that is there, by a pointer that no library looks at."""
    _say(STARTED)
    ctypes.memmove(address, ctypes.string_at(address, 1), 1)
    _say(WROTE)


def _write_inside(tensor: torch.Tensor) -> None:
    _write(tensor.data_ptr() + tensor.nbytes // 2)


def _stored() -> None:
    _write_inside(next(_loaded(torch.float16).loaded.module.parameters()))


def _converted() -> None:
    span = _loaded(torch.float32)
    _write_inside(
        next(
            each.tensor
            for each in belongings(span.loaded.module)
            if not each.tensor.is_mkldnn and each.tensor.dtype is torch.float32
        )
    )


def _packed() -> None:
    span = _loaded(torch.float32)
    for each in belongings(span.loaded.module):
        address, size = packed_memory(each.tensor) or (0, 0)
        if size > 2 * PAGE_BYTES:
            _write(address + size // 2)
            return
    _say(f"{ABSENT} weights are not packed on this machine")


def _operation() -> None:
    span = _loaded(torch.float16)
    weight = next(span.loaded.module.parameters())
    _say(STARTED)
    model = frozenset([weight.untyped_storage().data_ptr()])
    try:
        with OperationGuard(model, MemoryMeter(1 << 20)):
            weight.detach().view(-1)[:1].mul_(1)
    except BadRequest:
        _say(REFUSED)
        return
    _say(WROTE)


def _unnoticed() -> None:
    """In memory that is not protected, as that of a CUDA or MPS device."""
    module = torch.nn.Linear(64, 64)
    check = WeightCheck(module, {})
    while not check.rounds:
        check.step(_SLICE_BYTES)
    with torch.no_grad():
        module.weight.view(torch.int32)[3, 5] ^= 1
    _say(STARTED)
    noticed = None
    while check.rounds < 2 and noticed is None:
        noticed = check.step(_SLICE_BYTES)
    _say(WROTE if noticed is None else REFUSED)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


CANARIES: dict[str, Callable[[], None]] = {
    "stored": _stored,
    "converted": _converted,
    "packed": _packed,
    "operation": _operation,
    "unnoticed": _unnoticed,
}


def main() -> None:
    """Let the one fly that the command line names."""
    CANARIES[sys.argv[1]]()


if __name__ == "__main__":
    main()
