"""Stored tensors into the form a module wants, where the two differ.

transformers keeps, per architecture, a table of renamings and fusions (most mixtures of experts
store one matrix per expert and compute with one tensor for all). This module applies that table to
the tensors of a span; it knows nothing of files or of layer ranges.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
)
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from mesh.errors import BadCheckpoint

if TYPE_CHECKING:
    from collections.abc import Collection

_TWO, _ONE = ("experts.gate_proj", "experts.up_proj"), "experts.gate_up_proj"
"""Matrices of all experts that GGUF files store apart and some models take from one tensor."""
_SIDE_BY_SIDE = frozenset({"llama4_text"})
"""Those of them whose columns do not take turns."""

_QUERIES, _GATE = "linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"
_BY_KEY = "linear_attn.in_proj_qkvz.weight"
"""Matrices that GGUF files store apart and Qwen3-Next has as one, head after head."""

Unread: TypeAlias = Callable[[], torch.Tensor]
"""Gives a tensor when it is called, and keeps none."""

_WHOLES = {"glm4v_moe_text": "glm4v_moe", "qwen3_vl_moe_text": "qwen3_vl_moe"}
"""Text models whose table is that of the whole that they are in."""


def convert_tensors(
    module: Any, stored: Mapping[str, torch.Tensor | Unread]
) -> dict[str, torch.Tensor]:
    """`stored` under the names and in the shapes that `module` expects.

    Tensors that need no conversion are handed through without a copy; a name that nothing converts
    is kept, so that loading can complain about it. What is unread is read when its turn comes.
    """
    expected = module.state_dict().keys()
    stored = _by_key(_joined(stored, expected, module.config), expected, module.config)
    whole = _WHOLES.get(module.config.model_type)
    if whole is not None:
        table = get_checkpoint_conversion_mapping(whole)
    elif stored.keys() <= expected:
        table = []  # to build it takes a fifth of a small span's load
    else:
        table = get_model_conversion_mapping(module, add_legacy=False)
    if not table:
        return {name: _read(each) for name, each in stored.items()}
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_source = {source: entry for entry in converters for source in entry.source_patterns}
    converted: dict[str, torch.Tensor] = {}
    pending: dict[str, Any] = {}
    # Experts are stacked in the order they are added: by number, not by spelling.
    for name in sorted(stored, key=dot_natural_key):
        target, source = rename_source_key(name, renamings, converters)
        if source is None or (name in expected and whole is None):
            converted[name if name in expected else target] = _read(stored[name])
            continue
        if target not in pending:
            pending[target] = copy.deepcopy(by_source[source])
        # It reads them all at once where the first is to be read.
        pending[target].add_tensor(target, name, source, partial(_read, stored[name]))
    for target, converter in pending.items():
        made = converter.convert(target, model=module, config=module.config)
        for key, value in made.items():
            converted[key] = value[0] if isinstance(value, list) else value
    return converted


def _joined(
    stored: Mapping[str, torch.Tensor | Unread], expected: Collection[str], config: Any
) -> Mapping[str, torch.Tensor | Unread]:
    """With one tensor of two where a model has their columns in that: those of one behind those of
    the other, or in turns."""
    first, second = _TWO
    made = dict(stored)
    for name in stored:
        one, other = name.replace(first, _ONE), name.replace(first, second)
        if one != name and one in expected and name not in expected and other in stored:
            pair = _read(made.pop(name)), _read(made.pop(other))
            if config.model_type in _SIDE_BY_SIDE:
                made[one] = torch.cat(pair, dim=-1)
            else:
                made[one] = torch.stack(pair, dim=-1).flatten(-2)
    return made


def _by_key(
    stored: Mapping[str, torch.Tensor | Unread], expected: Collection[str], config: Any
) -> Mapping[str, torch.Tensor | Unread]:
    """With queries, keys, values and gates of one head for keys side by side, then those of the
    next, where a model has them so. Raises BadCheckpoint where they are not of so many heads."""
    made = dict(stored)
    for name in stored:
        stem = name.removesuffix(_QUERIES)
        whole, gate = stem + _BY_KEY, stem + _GATE
        if stem == name or whole not in expected or gate not in stored:
            continue
        first, second = _read(made.pop(name)), _read(made.pop(gate))
        heads = config.linear_num_key_heads
        keys = heads * config.linear_key_head_dim
        if len(first) - 2 * keys != len(second) or len(second) % heads:
            raise BadCheckpoint(
                f"Weights do not fit the config: {name} and {gate} are not of {heads} heads.",
                fix="Download the file again.",
            )
        parts = (first[:keys], first[keys : 2 * keys], first[2 * keys :], second)
        made[whole] = torch.cat(
            [each.reshape(heads, -1, each.shape[-1]) for each in parts], 1
        ).flatten(0, 1)
    return made


def _read(stored: torch.Tensor | Unread) -> torch.Tensor:
    return stored() if callable(stored) else stored
