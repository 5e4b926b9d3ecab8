"""What a shard will take, from its checkpoint's headers alone: before a byte of it is loaded.

Upper estimates, in MB of 2**20 bytes. Reads no tensor and asks no device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mesh.models.end_names import is_inputs
from mesh.models.header import TensorEntry
from mesh.models.manifest import Manifest
from mesh.types import LayerRange, ShardMemory

SPARE_MB = 64
"""What allocators, kernels and a runtime's own tables take beside everything that is counted."""

_CHOSEN_EXPERTS = (
    "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk",
)  # fmt: skip
"""What configs call the experts that a row goes to."""

_SHARED_KEYS = "num_kv_shared_layers"
"""How many of the last layers cache nothing, as they see keys and values of others."""

_STATES = 6
"""Of a session: as they are, as a step makes them, and as they were where two chunks and two drafts
began."""

_HEADS = "num_attention_heads", "n_head", "n_heads", "num_heads"
_SPELT_OUT = frozenset({"bloom", "codegen", "gpt_neo", "gptj", "mpt"})
"""Models whose attention computes the scores of all rows and heads before it goes on."""
_ATTENDS = re.compile(r"attn|attention|qkv|query|[qkv]_proj|kv_")
"""In the names of what layers have that see rows before them."""
_CHOOSES = "indexer.wk.weight"
"""What makes the keys that some layers choose by, to which positions they attend."""
_WHOLE = frozenset({"I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"})


def estimate(
    manifest: Manifest,
    layers: LayerRange,
    itemsize: int,
    *,
    kv_tokens: int,
    rows: int,
    streams: int = 1,
    weight_size: float | None = None,
) -> ShardMemory:
    """Of these layers in a dtype of `itemsize` bytes, with caches of `kv_tokens` positions in all,
    of `streams` sessions.

    `rows` is how many are computed at once, `weight_size` what a weight takes where that is not
    `itemsize`. The head room holds one layer twice, as while it is repacked or its caches grow.
    """
    plain = weight_bytes(manifest.layer_weights(layers), itemsize)
    weights = math.ceil(plain * (weight_size or itemsize) / itemsize)
    one_layer = math.ceil(plain / len(layers))
    activations = computing_bytes(manifest, rows, kv_tokens)
    return ShardMemory(
        weights_mb=_mb(weights),
        caches_mb=_mb(
            kv_tokens * position_bytes(manifest, layers, itemsize)
            + streams * state_bytes(manifest, layers)
        ),
        headroom_mb=SPARE_MB + _mb(one_layer + activations),
    )


def computing_bytes(manifest: Manifest, rows: int, context: int) -> int:
    """What computing so many rows behind so many positions takes beside weights and caches."""
    text, hidden = _text(manifest.config), manifest.hidden_size
    wide = _number(text, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    # Of mixtures each row goes to several experts, sorted by them.
    chosen = _number(text, *_CHOSEN_EXPERTS) or 0
    narrow = _number(text, "moe_intermediate_size") or wide
    routed = chosen * (3 * narrow + 2 * hidden)
    # fp32, whatever the weights are: inputs, projections and both sides of the gate; then a mask.
    longest = min(context, manifest.max_positions or context)
    mask = rows * longest * 4
    # An indexer scores each position with each of its heads, before and behind what cuts them off.
    scores = 2 * mask * (_number(text, "index_n_heads") or 0)
    if manifest.model_type in _SPELT_OUT:  # with what is added to them, and what they become
        scores += 3 * mask * (_number(text, *_HEADS) or 1)
    return rows * (8 * hidden + 3 * wide + routed) * 4 + mask + scores


def ends_mb(manifest: Manifest, itemsize: int, *, maps_inputs: bool = False) -> int:
    """What embedding, norm and head take at an asker, of which the head may be held twice.

    Of a table that layers are given something of for each token, only rows of tokens that come are
    read where it is mapped; a head is as large as the largest of the others.
    """
    tables = [entry for entry in manifest.ends_weights() if is_inputs(entry.name)]
    ends = [entry for entry in manifest.ends_weights() if not is_inputs(entry.name)]
    largest = max((weight_bytes([entry], itemsize) for entry in ends), default=0)
    taken = 0 if maps_inputs else weight_bytes(tables, itemsize)
    return _mb(weight_bytes(ends, itemsize) + largest + taken) + SPARE_MB


def weight_bytes(tensors: Iterable[TensorEntry], itemsize: int) -> int:
    """Of these tensors once the floating ones are in a dtype of `itemsize` bytes."""
    return sum(
        entry.nbytes if entry.dtype in _WHOLE else math.prod(entry.shape) * itemsize
        for entry in tensors
    )


def position_bytes(manifest: Manifest, layers: LayerRange, itemsize: int) -> int:
    """What one position takes in the caches of these layers."""
    return itemsize * sum(cached_numbers(manifest, layers))


def cached_numbers(manifest: Manifest, layers: LayerRange) -> list[int]:
    """What one position adds to the caches of each of these layers."""
    keys, values, attending = dict[str, int](), dict[str, int](), set[str]()
    chosen_by = dict[str, int]()
    states, linear = set[str](), set[str]()  # of the second, keys go into a state and nowhere else
    for entry in manifest.layer_weights(layers):
        index, _, name = entry.name.removeprefix(manifest.layer_prefix).partition(".")
        attending.update({index} if _ATTENDS.search(name) else ())
        if name.endswith("k_proj.weight"):
            keys[index] = entry.shape[0]
        elif name.endswith("v_proj.weight"):
            values[index] = entry.shape[0]
        elif name.endswith(_CHOOSES):
            chosen_by[index] = entry.shape[0]
        elif _is_convolution(entry):
            states.add(index)
            linear.update({index} if "k_conv" in name else ())
    said = _said_numbers(manifest)
    first_seeing = manifest.total_layers - (_number(_text(manifest.config), _SHARED_KEYS) or 0)
    # Layers may differ; where keys are values as well (Gemma 4), both are cached.
    own = {i: keys[i] + values.get(i, keys[i]) for i in keys.keys() - linear}
    otherwise = dict.fromkeys(attending - states, said)
    return [
        0
        if layer >= first_seeing
        else (otherwise | own).get(str(layer), 0) + chosen_by.get(str(layer), 0)
        for layer in range(layers.start, layers.stop)
    ]


def _said_numbers(manifest: Manifest) -> int:
    """The same as the config has it, for a layer that stores no projection to keys."""
    text = _text(manifest.config)
    heads = _number(text, "num_attention_heads", "n_head", "num_heads") or 1
    # A config that spells it n_head knows nothing of groups, whatever else it carries.
    groups = None if "n_head" in text else _number(text, "num_key_value_heads")
    groups = groups or _number(text, "n_head_kv") or heads
    width = _number(text, "head_dim") or manifest.hidden_size // heads
    if latent := _number(text, "kv_lora_rank"):  # what keys and values are made of is cached
        return latent + (_number(text, "qk_rope_head_dim") or 0)
    return 2 * groups * width


def state_bytes(manifest: Manifest, layers: LayerRange) -> int:
    """What one session takes in these layers whatever its length: their running states, with what
    is kept of them to go back to."""
    numbers = 0
    for layer in range(layers.start, layers.stop):
        tensors = manifest.layer_tensors(LayerRange(layer, layer + 1))
        shapes = [entry.shape for entry in _convolutions(tensors)]
        if shapes:  # their last inputs, and what is made of them
            numbers += sum(map(math.prod, shapes))
            numbers += _recurrent_numbers(manifest.config, sum(shape[0] for shape in shapes))
    return numbers * 4 * _STATES  # most are fp32, whatever the weights are


def _recurrent_numbers(config: Mapping[str, Any], channels: int) -> int:
    """How many a layer's state has behind a convolution of so many channels, at most."""
    text = _text(config)
    delta = text.get("linear_attn_config")
    delta = delta if isinstance(delta, dict) else {}
    key = _number(text, "linear_key_head_dim", "linear_head_dim") or _number(delta, "head_dim")
    value = _number(text, "linear_value_head_dim") or key
    heads = _number(text, "linear_num_value_heads", "linear_num_heads")
    heads = heads or _number(delta, "num_heads")
    if key and value and heads:  # a matrix for each head
        return heads * key * value
    return channels * (_number(text, "mamba_d_state", "ssm_state_size", "state_size") or 0)


def keeps_states(manifest: Manifest) -> bool:
    """Whether some of the model's layers keep a running state."""
    return any(_convolutions(manifest.tensors.values()))


def _convolutions(tensors: Iterable[TensorEntry]) -> Iterator[TensorEntry]:
    return filter(_is_convolution, tensors)


def _is_convolution(entry: TensorEntry) -> bool:
    """Whether it is the weight of one along the text: what keeps states begins with one."""
    is_by_channel = len(entry.shape) == 3 and entry.shape[1] == 1
    return is_by_channel and ".conv" in entry.name.replace("_conv", ".conv")


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    found = (config.get(name) for name in names)
    return next((value for value in found if type(value) is int and value > 0), None)


def _mb(size: float) -> int:
    return math.ceil(size / 2**20)
