"""Models for plans, by what they take as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mesh.routing.machines import ITEMSIZE, ModelShape
from mesh.types import ModelId


def model_of(
    model_id: str,
    layer_bytes: Sequence[int],
    dtype: str,
    *,
    ends_bytes: int = 0,
    head_bytes: int = 0,
    hidden_size: int = 4096,
    kv_numbers: int = 2048,
    **more: Any,
) -> ModelShape:
    """A model whose layers, ends and head take so much, all of it in `dtype`."""
    size = int(ITEMSIZE[dtype])
    return ModelShape(
        ModelId(model_id), more.pop("weights_sha256", "a" * 64),
        tuple(each // size for each in layer_bytes), ends_bytes // size, head_bytes // size, dtype,
        tuple(layer_bytes), ends_bytes, hidden_size, kv_numbers, **more,
    )  # fmt: skip


def with_layers(model: ModelShape, layer_bytes: Sequence[int]) -> ModelShape:
    """The model with layers that take so much."""
    size = int(ITEMSIZE[model.dtype])
    weights = tuple(each // size for each in layer_bytes)
    return replace(model, layer_weights=weights, layer_bytes=tuple(layer_bytes))
