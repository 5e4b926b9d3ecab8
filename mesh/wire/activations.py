"""Between `WireTensor` and torch. The only file of this package that imports torch.

Never puts an infinity on the wire that the tensor did not have: what overflows fp16 goes as fp32.
"""

from __future__ import annotations

import math

import torch

from mesh.errors import BadRequest
from mesh.types import WireDtype
from mesh.wire.messages import WireTensor

_TORCH = {
    "fp16": torch.float16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}

_ROUNDS_TO_INFINITY = 65520.0
"""The smallest number that fp16 has no finite one for: half-way between its largest, 65504, and
what would come next."""


def to_wire(tensor: torch.Tensor, dtype: WireDtype) -> WireTensor:
    """A copy of `tensor`, detached and on the host, as `dtype`.

    A tensor with a finite value beyond fp16 comes out as fp32 instead of fp16: compare the result's
    dtype with the one asked for to count that.
    """
    source = tensor.detach()
    if dtype is WireDtype.FP16 and source.dtype is not torch.float16:
        source = _to_half(source)
    else:
        source = source.to(_TORCH[dtype])
    # numpy has no bf16.
    raw = source.view(torch.int16) if source.dtype is torch.bfloat16 else source
    return WireTensor(_NAMES[source.dtype], tuple(tensor.shape), raw.cpu().numpy().tobytes())


def to_torch(tensor: WireTensor) -> torch.Tensor:
    """`tensor` as torch has it, on the host, safe to write to.

    Shares memory with `tensor.data` when that is writable, else copies it once. Raises BadRequest
    when dtype, shape and bytes do not fit together.
    """
    dtype = _TORCH.get(tensor.dtype)
    if dtype is None or len(tensor.data) != math.prod(tensor.shape) * dtype.itemsize:
        raise BadRequest(
            f"{len(tensor.data)} bytes are no {tensor.dtype} tensor of shape {tensor.shape}.",
            fix="Give dtype, shape and bytes that belong together.",
            param="tensor",
        )
    if not tensor.data:  # frombuffer refuses empty buffers
        return torch.empty(tensor.shape, dtype=dtype)
    data = tensor.data
    if isinstance(data, bytes) or (isinstance(data, memoryview) and data.readonly):
        data = bytearray(data)
    return torch.frombuffer(data, dtype=dtype).reshape(tensor.shape)


def _to_half(source: torch.Tensor) -> torch.Tensor:
    """fp16, or fp32 when a finite value would become infinite."""
    # torch's direct bf16 -> fp16 cast of a large tensor takes three times as long as both of these.
    wide = source.float()
    half = wide.half()
    # Each operator more costs a decode step as much as all of its numbers: this is one.
    if half.numel() == 0 or torch.linalg.vector_norm(wide, math.inf).item() < _ROUNDS_TO_INFINITY:
        return half  # not so for NaN
    return wide if bool((half.isinf() & ~wide.isinf()).any()) else half
