"""Whether what a step bears are hidden states of this model."""

from __future__ import annotations

from mesh.errors import BadRequest
from mesh.types import HIDDEN_DTYPES
from mesh.wire.messages import Step


def require_hidden(step: Step, hidden_size: int) -> None:
    """Raise BadRequest unless the tensor is (1, rows > 0, hidden_size) in a floating wire dtype."""
    tensor = step.tensor
    shape_fits = len(tensor.shape) == 3 and tensor.shape[0] == 1 and tensor.shape[1] > 0
    if not shape_fits or tensor.shape[2] != hidden_size:
        raise BadRequest(
            f"The tensor has shape {tuple(tensor.shape)}; (1, rows, {hidden_size}) is expected.",
            fix="Send hidden states of this model.",
            param="tensor",
        )
    itemsize = 4 if tensor.dtype == "fp32" else 2
    whole = tensor.shape[1] * hidden_size * itemsize
    if tensor.dtype not in HIDDEN_DTYPES or tensor.gradient or len(tensor.data) != whole:
        raise BadRequest(
            f"A {tensor.dtype} tensor of {len(tensor.data)} bytes is not a hidden state here.",
            fix="Send fp16, bf16 or fp32 activations of full length.",
            param="tensor",
        )
