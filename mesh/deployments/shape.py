"""The sizes of a checkpoint that plans are made from, out of its manifest. Reads nothing itself."""

from __future__ import annotations

from mesh.models.manifest import Manifest
from mesh.routing.fitting import PREFILL_ROWS
from mesh.routing.machines import ITEMSIZE, ModelShape
from mesh.shard.footprint import computing_bytes, position_bytes
from mesh.types import LayerRange

_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def shape_of(manifest: Manifest, context: int) -> ModelShape:
    """Of this checkpoint, whose prompts are up to `context` long.

    Weights in a format of which plans know nothing count as if they were stored in 16 bit.
    """
    ends = [entry.nbytes for entry in manifest.ends_tensors()]
    name = _SHORT.get(manifest.dtype, manifest.dtype)
    return ModelShape(
        manifest.model_id,
        manifest.weights_sha256,
        manifest.layer_bytes,
        name if name in ITEMSIZE else "bf16",
        manifest.ends_bytes,
        max(ends, default=0),
        manifest.hidden_size,
        position_bytes(manifest, LayerRange(0, 1), 1),
        computing_bytes(manifest, PREFILL_ROWS, context),
    )
