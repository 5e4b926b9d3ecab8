"""Attention of a decoder layer of transformers, in the terms in which a graph is built.

Reads modules and their config; `NotCompilable` says what it does not know.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mesh.shard.compiled.latent import Latent, latent_of
from mesh.shard.compiled.parts_reader import Norm, NotCompilable, OutputGate, PartsReader, rows_out

if TYPE_CHECKING:
    from torch import nn


_PATHS = ("self_attn", "attn", "attention", "self_attention")
"""What layers call it."""
_TOGETHER = "query_key_value"
_TURNED_NORM = "query_layernorm"
_HEAD_NORMS = ("q_norm", "q_layernorm", _TURNED_NORM), ("k_norm", "k_layernorm", "key_layernorm")


@dataclass(frozen=True, slots=True)
class Growth:
    """Queries are multiplied by ``1 + rate * log(1 + floor(position / first))`` (Llama 4)."""

    rate: float
    first: int

    def factors(self, positions: torch.Tensor) -> torch.Tensor:
        """Of the queries at these `positions`, fp32, in their shape."""
        return 1 + self.rate * torch.log(1 + torch.floor(positions.float() / self.first))


@dataclass(frozen=True, slots=True)
class Attention:
    """`projections` give queries, keys and values one behind the other: one module for all, or one
    for each. `table` names the rotary table; None leaves positions alone. `sinks` (heads,) are
    logits that take a share of each head's attention, and give nothing."""

    projections: tuple[nn.Module, ...]
    output: nn.Module
    heads: int
    kv_heads: int
    width: int
    scale: float
    softcap: float
    window: int | None
    table: str | None
    query_norm: Norm | None
    key_norm: Norm | None
    norm_whole: bool
    """Whether those norms go over all heads at once and not each."""
    sinks: torch.Tensor | None = None
    gate: OutputGate | None = None
    """Its numbers come with the queries, behind those of each head, or where the `gate_is_last`
    behind everything."""
    gate_is_last: bool = False
    value_norm: Norm | None = None
    shares_values: bool = False
    """Whether values are what keys are made of, and there is no projection to them."""
    turns_pairs: bool = False
    """Whether neighbours turn by position and not halves of a head."""
    turns_back: bool = False
    """Whether they turn the other way."""
    growth: Growth | None = None
    """Of queries that turn by position."""
    latent: Latent | None = None
    """What all heads' keys are made of: here the one key that they share, and the value as well."""
    rates: tuple[nn.Module, ...] = ()
    is_interleaved: bool = False
    """Whether each head's keys are projected beside its values and the queries that see them."""
    normed_turned: bool = False
    """Whether those of queries and keys come behind turning, and not before."""
    sees: int | None = None
    """The layer of the span whose keys and values it sees; None where it makes its own."""

    @property
    def projected(self) -> int:
        """How wide a row is before it."""
        both = 2 if self.latent is None else 1
        return (self.heads + both * self.kv_heads) * self.width

    @property
    def attended(self) -> int:
        """How wide a row is behind it."""
        return self.heads * (self.width if self.latent is None else self.latent.rank)


def attention_of(
    reader: PartsReader, config: Any, index: int, path: str | None = None
) -> Attention:
    """That which stands at `path` in the layer. Raises NotCompilable."""
    path = path or next((each for each in _PATHS if hasattr(reader.layer, each)), _PATHS[0])
    module = reader.get(path)
    if (found := latent_of(reader, module, path)) is not None:
        return _latent_attention(reader, config, index, *found)
    width = getattr(module, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if getattr(module, "is_kv_shared_layer", False):
        return _attention_to_others(reader, config, index, width)
    projections, kv_heads, kinds = _projections(reader, config, path, width)
    heads = _heads(config, index)
    rows = sum(rows_out(each) for each in projections) - (heads + kinds * kv_heads) * width
    if rows not in (0, heads * width):
        raise NotCompilable("its queries, keys and values have widths of their own")
    gates, gate = _behind_all(reader, path, heads)
    sinks = getattr(module, "sinks", None)
    query_norm, key_norm = (
        reader.norm(*(f"{path}.{name}" for name in names), width=width) for names in _HEAD_NORMS
    )
    return Attention(
        (*projections, *gates),
        reader.get(*(f"{path}.{name}" for name in ("o_proj", "c_proj", "out_proj", "dense"))),
        heads,
        kv_heads,
        width,
        _scale(module, width),
        float(getattr(module, "attn_logit_softcapping", None) or 0.0),
        _window(config, index),
        _table(module, config, index),
        query_norm,
        key_norm,
        norm_whole=query_norm is not None and len(query_norm.gamma) != width,
        sinks=None if sinks is None else sinks.detach().float().clone(),
        gate=OutputGate("sigmoid") if rows else gate,
        gate_is_last=gate is not None,
        value_norm=_value_norm(module, width),
        shares_values=kinds == 1,
        turns_pairs=_turned_by(module) == [-1.0, 0.0, -3.0, 2.0],
        turns_back=_turned_by(module) == [2.0, 3.0, 0.0, -1.0],
        growth=_growth(config),
        is_interleaved=_is_interleaved(reader, path),
        normed_turned=hasattr(module, _TURNED_NORM),
    )


def _attention_to_others(reader: PartsReader, config: Any, index: int, width: int) -> Attention:
    module: Any = reader.get("self_attn")
    kinds, heads = config.layer_types, config.num_attention_heads
    own = [*kinds[: len(kinds) - config.num_kv_shared_layers]]
    return Attention(
        (reader.get("self_attn.q_proj"),),
        reader.get("self_attn.o_proj"),
        heads,
        heads // module.num_key_value_groups,
        width,
        _scale(module, width),
        0.0,
        _window(config, index),
        _table(module, config, index),
        reader.norm("self_attn.q_norm"),
        None,
        norm_whole=False,
        sees=len(own) - 1 - own[::-1].index(kinds[index]),
    )


def _latent_attention(
    reader: PartsReader,
    config: Any,
    index: int,
    latent: Latent,
    projections: tuple[nn.Module, ...],
) -> Attention:
    module: Any = reader.get("self_attn")
    return Attention(
        projections,
        reader.get("self_attn.o_proj"),
        config.num_attention_heads,
        1,
        latent.width,
        float(module.scaling),
        0.0,
        _window(config, index),
        _table(module, config, index),
        None,
        None,
        norm_whole=False,
        turns_pairs=bool(getattr(config, "rope_interleave", _turns_complex(module))),
        growth=_growth(config),
        latent=latent,
    )


def _projections(
    reader: PartsReader, config: Any, path: str, width: int
) -> tuple[tuple[nn.Module, ...], int, int]:
    """Those of attention, how many heads keys have, and whether there are keys only (1) or values
    as well (2)."""
    if getattr(config, "clip_qkv", None):
        raise NotCompilable("it limits queries, keys and values")
    whole = reader.find(f"{path}.qkv_proj", f"{path}.c_attn", f"{path}.{_TOGETHER}")
    if whole is None:
        queries, keys = (reader.get(f"{path}.{name}_proj") for name in ("q", "k"))
        values = reader.find(f"{path}.v_proj")
        kv_heads = rows_out(keys) // width
        return (
            ((queries, keys), kv_heads, 1)
            if values is None
            else ((queries, keys, values), kv_heads, 2)
        )
    return (whole,), (rows_out(whole) // width - config.num_attention_heads) // 2, 2


def _heads(config: Any, index: int) -> int:
    each = getattr(config, "num_attention_heads_per_layer", None)
    return int(each[index] if each else config.num_attention_heads)


def _behind_all(
    reader: PartsReader, path: str, heads: int
) -> tuple[tuple[nn.Module, ...], OutputGate | None]:
    """What makes a gate's numbers by itself, and the gate: Arcee's, and Laguna's."""
    if (gate := reader.find(f"{path}.gate_proj")) is not None:
        return (gate,), OutputGate("sigmoid")
    if (gate := reader.find(f"{path}.g_proj")) is None:
        return (), None
    return (gate,), OutputGate("softplus", heads=heads if rows_out(gate) == heads else 0)


def _is_interleaved(reader: PartsReader, path: str) -> bool:
    """Raises NotCompilable where keys are kept for every head though several share them."""
    if reader.find(f"{path}.{_TOGETHER}") is None:
        return False
    module = reader.get(path)
    if getattr(module, "new_decoder_architecture", False):
        raise NotCompilable("it keeps keys and values for every head that sees them")
    return not getattr(module, "multi_query", False)


def _value_norm(module: Any, width: int) -> Norm | None:
    norm = getattr(module, "v_norm", None)
    if norm is None:
        return None
    if getattr(norm, "with_scale", True):
        raise NotCompilable("it normalises values by weights")
    return Norm(torch.ones(width), None, norm.eps)


def _turned_by(module: nn.Module) -> list[float]:
    """What a quarter of a turn makes of four numbers that count up from 0."""
    known = vars(sys.modules[type(module).__module__])
    # Where images are turned otherwise than text, it says which.
    rotate = known.get("rotate_half_llm", known.get("rotate_half"))
    return [] if rotate is None else [float(each) for each in rotate(torch.arange(4.0))]


def _turns_complex(module: nn.Module) -> bool:
    """Whether neighbours turn as the parts of a complex number."""
    return hasattr(sys.modules[type(module).__module__], "apply_rotary_emb")


def _growth(config: Any) -> Growth | None:
    rope = getattr(config, "rope_parameters", None) or {}
    rate = rope.get("llama_4_scaling_beta")
    return Growth(float(rate), int(rope["original_max_position_embeddings"])) if rate else None


def _scale(module: nn.Module, width: int) -> float:
    scale = getattr(module, "scaling", None)
    return float(width**-0.5 if scale is None else scale)


def _window(config: Any, index: int) -> int | None:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[index] not in ("full_attention", "sliding_attention"):
        raise NotCompilable(f"its attention is {kinds[index]}")
    if kinds is not None and kinds[index] == "full_attention":
        return None
    window = getattr(config, "sliding_window", None)
    return int(window) if window else None


def _table(module: nn.Module, config: Any, index: int) -> str | None:
    """Which rotary table it turns its queries and keys by: the layer's kind where each has one."""
    if getattr(config, "rope_parameters", None) is None:
        return None
    nested = all(isinstance(each, dict) for each in config.rope_parameters.values())
    is_local = nested or getattr(module, "is_local_attention", True)
    if not getattr(module, "use_rope", True) or not is_local:
        return None
    if getattr(config, "position_embedding_type", "rope") != "rope":
        return None
    if config.model_type.startswith("cohere2") and not (
        module.sliding_window or getattr(module, "force_rope", False)
    ):
        return None
    if (
        hasattr(module, "sliding_window_pattern")
        and module.sliding_window
        and not module.is_sliding
    ):
        return None  # of EXAONE 4 what sees everything knows no places
    kinds = getattr(config, "layer_types", None)
    return str(kinds[index]) if nested and kinds is not None else ""
