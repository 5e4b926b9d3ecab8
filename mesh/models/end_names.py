"""Which tensors are a model's ends, embedding, final norm and head, by their names."""

from __future__ import annotations

import re

from mesh.models.layer_names import INDEXED

_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.(weight|bias)$")
_INPUTS = "embed_tokens_per_layer.weight"
_STREAMS = re.compile(r"(^|\.)altup_(unembed_)?projections\.[0-9]+\.weight$")
"""What makes several hidden states of one, and one of several (`mesh.models.streams`)."""


def is_head(name: str) -> bool:
    """Whether a stored tensor is one of an output head's own; with its weight, nothing is tied."""
    return _HEAD.search(name) is not None


def is_inputs(name: str) -> bool:
    """Whether the tensor of that name is the table of what each token gives all layers."""
    return name.endswith(_INPUTS)


def is_end(name: str, prefix: str) -> bool:
    """Whether a tensor is one of the ends, where those of layers begin with `prefix`; towers for
    other modalities have none."""
    if name.startswith(prefix):
        return False
    is_listed = INDEXED.match(name) and not _STREAMS.search(name)
    return (name.startswith(parent_of(prefix)) and not is_listed) or is_head(name)


def parent_of(layer_prefix: str) -> str:
    """What the names of the base model's own tensors begin with, where those of layers begin so."""
    head, dot, _ = layer_prefix.rstrip(".").rpartition(".")
    return head + dot
