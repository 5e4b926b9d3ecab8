"""Faster matrix products for the linear layers of a loaded span.

On a CPU, oneDNN's blocked weight layout reads memory faster than `F.linear` does: twice as fast in
bf16, a fifth in fp32, and more than that for a few rows at once. The last bits differ from those
that transformers gives. Knows nothing of attention, caches or what the layers mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from mesh.models.progress import Progress

PLAIN = "plain"
PACKED = "onednn-packed"

_SMALL_BYTES = 1 << 20

_TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-5}
"""Of the formats that are packed: how far a packed product may be from the plain one."""

# Torch has no public name for these two; what they give is checked before they are used.
_OPS = torch.ops.mkldnn


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which kernel the linear layers run (`PLAIN` or `PACKED`), and why."""

    name: str
    reason: str


class PackedLinear(nn.Module):
    """A linear layer on the CPU with its weight in oneDNN's own layout (inference only)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # One row is the batch the layout is tuned for; larger batches run on it as well.
        self.packed = _OPS._reorder_linear_weight(weight.contiguous(), 1)  # noqa: SLF001
        # A copy: the original may lie in a mapping of the whole file, which it would keep alive.
        self.bias = None if bias is None else bias.clone()
        self.weight_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        """What both take; a layout of oneDNN's own does not tell."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, in_features) -> (…, out_features)."""
        output: torch.Tensor = _OPS._linear_pointwise(  # noqa: SLF001
            x, self.packed, self.bias, "none", [], ""
        )
        return output


def packed_memory(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Address and size of a packed weight; None for an ordinary tensor, or where torch hides it."""
    if not tensor.is_mkldnn or not hasattr(_OPS, "data_ptr") or not hasattr(_OPS, "_nbytes"):
        return None
    return int(_OPS.data_ptr(tensor)), int(_OPS._nbytes(tensor))  # noqa: SLF001


def choose_kernels(
    module: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> Kernels:
    """Replace the linear layers of `module` where that pays, freeing their old weights."""
    if dtype not in _TOLERANCE or device.type != "cpu":
        return Kernels(PLAIN, "kernels plain: packed weights are for bf16 and fp32 on the CPU")
    why_not = _packing_fails(dtype)
    if why_not is not None:
        return Kernels(PLAIN, f"kernels plain: {why_not}")
    # Names first: a list of the layers themselves would keep every old weight alive.
    places = [
        (parent, name)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) in (nn.Linear, Conv1D)
    ]
    progress = progress or Progress()
    progress.begin("packing", sum(map(_size, places)))
    replaced = 0
    for place in places:
        size = _size(place)  # known before only
        replaced += _replace(*place)
        progress.add(size)
    if not replaced:
        return Kernels(PLAIN, "kernels plain: no linear layer to pack")
    _leave_the_file(module)
    return Kernels(
        PACKED,
        f"kernels {PACKED}: {replaced} layers of {str(dtype)[6:]} on the CPU, packed and checked",
    )


def _size(place: tuple[nn.Module, str]) -> int:
    layer: Any = place[0].get_submodule(place[1])
    size: int = layer.weight.nbytes
    return size


def _replace(parent: nn.Module, name: str) -> bool:
    layer: Any = parent.get_submodule(name)
    weight = layer.weight.detach()
    if isinstance(layer, Conv1D):
        weight = weight.t()
    packed = PackedLinear(weight, None if layer.bias is None else layer.bias.detach())
    if not _agrees(packed, weight):
        return False
    setattr(parent, name, packed)
    return True


def _leave_the_file(module: nn.Module) -> None:
    # What is left may lie in a mapping of the whole checkpoint file, which a single norm keeps.
    for parameter in module.parameters():
        if parameter.nbytes <= _SMALL_BYTES:
            parameter.data = parameter.data.clone()


def _agrees(packed: PackedLinear, weight: torch.Tensor) -> bool:
    probe = torch.linspace(-1, 1, packed.in_features, dtype=weight.dtype).expand(2, -1)
    expected = F.linear(probe, weight, packed.bias).float()
    error = (packed(probe).float() - expected).norm()
    return bool(error <= _TOLERANCE[weight.dtype] * expected.norm() + 1e-6)


def _packing_fails(dtype: torch.dtype) -> str | None:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch has no oneDNN"
    if not torch.backends.mkldnn.enabled:
        return "oneDNN is switched off"
    if not all(hasattr(_OPS, op) for op in ("_reorder_linear_weight", "_linear_pointwise")):
        return "this torch has no packed linear operator"
    weight = torch.eye(32, dtype=dtype)
    try:
        with torch.inference_mode():
            same = _agrees(PackedLinear(weight, None), weight)
    except RuntimeError as error:
        return f"the packed linear operator failed ({error})"
    return None if same else "the packed linear operator gave other results"
