"""The sizes of a checkpoint that plans are made from, out of its manifest. Reads nothing itself."""

from __future__ import annotations

import math
import re

from mesh.models.coded.scheme import is_decoded
from mesh.models.end_names import is_inputs
from mesh.models.manifest import Manifest
from mesh.models.standard import (
    experts_met,
    goes_by_torch,
    has_other_layers,
    has_standard_layers,
)
from mesh.routing.machines import QUANTS, ModelShape, Quant
from mesh.shard.footprint import cached_numbers, computing_bytes, state_bytes, weight_bytes
from mesh.shard.settings import ShardSettings
from mesh.types import LayerRange

_EXPERTS = re.compile(r"\.experts\.|\.block_sparse_moe\.(in|out)put_linear\.")
"""In names of weights; the second are Granite's, which has those of all experts in one tensor."""
_SHORT = {"float16": "fp16", "bfloat16": "bf16"}


def shape_of(manifest: Manifest, context: int) -> ModelShape:
    """Of this checkpoint, whose prompts are up to `context` long. Blocks for a moment."""
    ends = [each for each in manifest.ends_weights() if not is_inputs(each.name)]
    inputs = [each for each in manifest.ends_weights() if is_inputs(each.name)]
    total = manifest.total_layers
    whole, settings = LayerRange(0, total), ShardSettings()
    each = [LayerRange(layer, layer + 1) for layer in range(total)]
    share = experts_met(manifest.config)
    return ModelShape(
        manifest.model_id,
        manifest.weights_sha256,
        tuple(weight_bytes(manifest.layer_weights(one), 1) for one in each),
        weight_bytes(ends, 1),
        max((weight_bytes([entry], 1) for entry in ends), default=0),
        manifest.dtype if is_decoded(manifest.dtype) else _SHORT.get(manifest.dtype, "fp32"),
        manifest.layer_bytes,
        manifest.ends_bytes,
        manifest.row_size,
        _kv_numbers(cached_numbers(manifest, whole)),
        computing_bytes(manifest, settings.prefill_rows, context),
        quants=_quants(manifest),
        state_bytes=math.ceil(
            settings.max_concurrent_streams * state_bytes(manifest, whole) / total
        ),
        is_int4=manifest.is_int4,
        is_standard=has_standard_layers(manifest.config, manifest.model_type),
        inputs_weights=weight_bytes(inputs, 1),
        cuts=manifest.cuts,
        layer_read=tuple(_read(manifest, one, share) for one in each) if share < 1 else (),
    )


def _quants(manifest: Manifest) -> tuple[Quant, ...]:
    if not has_other_layers(manifest.config):
        return QUANTS
    return ("none", "int4") if goes_by_torch(manifest.config, manifest.model_type) else ("none",)


def _kv_numbers(each: list[int]) -> int:
    """Of the layer that adds most; of an average one where some, between others, add nothing."""
    return max(each) if min(each) else math.ceil(sum(each) / len(each))


def _read(manifest: Manifest, layers: LayerRange, share: float) -> int:
    """How many numbers a row reads of these, which goes through such a share of the experts."""
    tensors = manifest.layer_weights(layers)
    experts = weight_bytes([entry for entry in tensors if _EXPERTS.search(entry.name)], 1)
    return weight_bytes(tensors, 1) - experts + math.ceil(experts * share)
