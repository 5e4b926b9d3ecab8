"""Whether what is asked of a shard is something that it can do. Knows no sessions and no limits."""

from __future__ import annotations

from mesh.errors import BadRequest, NoRoute, WeightsMismatch
from mesh.types import LayerRange, ShardDescriptor
from mesh.wire.messages import Open, Step

_WIRE_DTYPES = frozenset({"fp16", "bf16", "fp32"})


def layers_asked(request: Open, here: ShardDescriptor) -> LayerRange:
    """The layers of `here` that a session is asked for.

    Raises WeightsMismatch, NoRoute (layers or model not here), or BadRequest for what is none.
    """
    if request.weights_sha256 != here.weights_sha256 and request.model_id == here.model_id:
        raise WeightsMismatch(
            f"{here.node_name} serves {here.model_id} with other weights.",
            fix="Use shards of one checkpoint; compare weights_sha256.",
        )
    if not 0 <= request.start < request.stop or request.max_tokens < 1:
        raise BadRequest(
            f"Layers [{request.start}, {request.stop}) with {request.max_tokens} tokens are not"
            " a session.",
            fix="Ask for at least one layer and one token.",
        )
    layers = LayerRange(request.start, request.stop)
    if request.model_id != here.model_id or not here.layer_range.covers(layers):
        raise NoRoute(
            f"{here.node_name} serves {here.shard_id}, not {request.model_id}:{layers}.",
            fix="Use a shard that covers these layers.",
        )
    return layers


def check_tensor(step: Step, hidden_size: int) -> None:
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
    if tensor.dtype not in _WIRE_DTYPES or tensor.gradient or len(tensor.data) != whole:
        raise BadRequest(
            f"A {tensor.dtype} tensor of {len(tensor.data)} bytes is not a hidden state here.",
            fix="Send fp16, bf16 or fp32 activations of full length.",
            param="tensor",
        )
