"""Whether what a session is asked for is here at all. Knows no sessions and no limits."""

from __future__ import annotations

from mesh.errors import BadRequest, NoRoute, WeightsMismatch
from mesh.types import LayerRange, ShardDescriptor
from mesh.wire.messages import Open


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
