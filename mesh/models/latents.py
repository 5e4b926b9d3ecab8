"""The layer that makes keys and values of a latent, where it is stored as a matrix for each head.

GGUF files have the two apart (`mesh.models.gguf.deepseeks`), models in one tensor: of each head the
rows for keys, and behind them those for values. Never imports torch: the daemon reads checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mesh.errors import BadCheckpoint
from mesh.models.header import Coding, TensorEntry, made_of

LAYER, KEYS, VALUES = "kv_b_proj", "k_b_proj", "v_b_proj"
"""What models call the layer, and what the stacks are called here."""

_LAYER, _KEYS, _VALUES = (f".{name}.weight" for name in (LAYER, KEYS, VALUES))


def with_latents(stored: Mapping[str, TensorEntry]) -> Mapping[str, TensorEntry]:
    """The tensors of the model by name, of those that are `stored`: two of those that stand for
    one have become that, with a `coding`. Raises BadCheckpoint where they do not fit together."""
    found = {}
    for name, entry in stored.items():
        stem = name.removesuffix(_KEYS).removesuffix(_VALUES)
        if stem == name:
            found[name] = entry
            continue
        keys, values = (stored.get(stem + end) for end in (_KEYS, _VALUES))
        if keys is None or values is None or f"{stem}{_LAYER}" in stored:
            raise _unfit(entry)
        found[f"{stem}{_LAYER}"] = _joined(f"{stem}{_LAYER}", keys, values)
    return found


def _joined(name: str, keys: TensorEntry, values: TensorEntry) -> TensorEntry:
    """(heads * (key + value width), rank) of (heads, rank, key width) and (heads, value width,
    rank)."""
    if (len(keys.shape), len(values.shape)) != (3, 3):
        raise _unfit(keys)
    (heads, rank, wide), (others, width, columns) = keys.shape, values.shape
    if (heads, rank) != (others, columns):
        raise _unfit(keys)
    parts = {
        "keys": replace(keys, shape=(heads * rank, wide)),
        "values": replace(values, shape=(heads * width, rank)),
    }
    shape = heads * (wide + width), rank
    return made_of(name, shape, keys.dtype, Coding("latent", parts, 1, rank))


def _unfit(entry: TensorEntry) -> BadCheckpoint:
    return BadCheckpoint(
        f"{entry.file} cannot be used: of {entry.name}, {list(entry.shape)}, and what belongs to it"
        " no layer can be made that gives each head its keys and values.",
        fix="Download the file again.",
    )
