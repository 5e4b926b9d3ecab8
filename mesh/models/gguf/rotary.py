"""Rotary embeddings as GGUF files describe them, as transformers' ``rope_parameters``.

Raises UnsupportedFamily for what transformers would compute in another way than llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mesh.models.gguf.settings import GgufSettings

_FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
SIDE_TENSORS = frozenset({_FREQUENCIES, _LONG, _SHORT})
"""Tensors of whole files that are settings."""

_NEAR = 1e-5
_STILL = 1e30
"""What frequencies are divided by that turn nothing."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def plain_rotary(said: GgufSettings, width: int, theta: float = 10000.0) -> dict[str, Any]:
    """For heads of `width` that are turned as a whole and not scaled."""
    if said.whole("rope.dimension_count", width) != width:
        said.refuse("it turns a part of each head")
    return {"rope_type": "default", "rope_theta": _base(said, theta)}


def _base(said: GgufSettings, default: float) -> float:
    theta = said.real("rope.freq_base", default)
    if not theta > 1:
        said.refuse(f"the base of its rotary embedding is {theta}")
    return theta


def full_rotary(said: GgufSettings, width: int, theta: float = 10000.0) -> dict[str, Any]:
    """For heads of `width` that are turned as a whole; scaled by yarn, linearly or as Llama 3's."""
    plain = plain_rotary(said, width, theta)
    kind = said.text("rope.scaling.type")
    factor = said.real("rope.scaling.factor", said.real("rope.scale_linear", 0.0))
    if said.has(_FREQUENCIES):
        if kind not in (None, "none"):
            said.refuse(f"its rotary embedding is scaled twice, as {kind} and by {_FREQUENCIES}")
        return plain | _by_frequency(said, plain["rope_theta"], width)
    if kind == "yarn":
        return plain | _yarn(said, factor)
    said.pass_over("rope.scaling.original_context_length")
    if kind == "linear" or (kind is None and factor):
        return plain | ({"rope_type": "linear", "factor": factor} if factor > 1 else {})
    if kind not in (None, "none"):
        said.refuse(f"its rotary embedding is scaled as {kind}")
    return plain


def partial_rotary(said: GgufSettings, width: int) -> dict[str, Any]:
    """As `full_rotary`, for heads of `width` of which the first part may be turned alone."""
    turned = said.whole("rope.dimension_count", width)
    if turned > width or turned % 2:
        said.refuse(f"it turns {turned} numbers of each head of {width}")
    return full_rotary(said, turned) | {"partial_rotary_factor": turned / width}


def proportional(said: GgufSettings, width: int) -> dict[str, Any]:
    """For heads of `width` of whose frequencies only the first turn anything: the file divides the
    others by so much that nothing is left of them."""
    if not said.has(_FREQUENCIES):
        said.refuse(f"it has no {_FREQUENCIES}")
    stored = said.numbers(_FREQUENCIES, below=2 * _STILL)
    turned, count = stored.count(1.0), len(stored)
    expected = [1.0] * turned + [_STILL] * (count - turned)
    if count != width // 2 or stored != expected or not turned:
        said.refuse(f"{_FREQUENCIES} is not for heads of {width} of which a part is turned")
    return plain_rotary(said, width, 1_000_000.0) | {
        "rope_type": "proportional",
        "partial_rotary_factor": turned / count,
    }


def _yarn(said: GgufSettings, factor: float) -> dict[str, Any]:
    # llama.cpp multiplies by what it calls the attention factor, transformers puts it in the place.
    for name in ("yarn_attn_factor", "attn_factor", "yarn_ext_factor"):
        if said.real(f"rope.scaling.{name}", 1.0) != 1.0:
            said.refuse(f"it says {name}")
    betas = {
        "beta_fast": said.real("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": said.real("rope.scaling.yarn_beta_slow", 1.0),
    }
    if not factor >= 1 or not all(betas.values()):
        said.refuse(f"its rotary embedding is scaled by {factor}, between {betas}")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": said.whole("rope.scaling.original_context_length"),
    } | betas


def _by_frequency(said: GgufSettings, theta: float, width: int) -> dict[str, Any]:
    """Llama 3's scaling, which files hold as what each frequency is divided by.

    transformers computes it from four numbers. Where none of the usual are found that give what the
    file holds, it is told what it holds.
    """
    stored = said.numbers(_FREQUENCIES)
    if len(stored) != width // 2:
        said.refuse(f"{_FREQUENCIES} is not for heads of {width}")
    factor = max(stored)
    for original in (2**power for power in range(5, 21)):
        made = _llama3(theta, width, factor, original)
        if all(abs(a - b) <= _NEAR * b for a, b in zip(made, stored, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "original_max_position_embeddings": original,
                **_LLAMA3,
            }
    return {
        "rope_type": "longrope",
        "long_factor": stored,
        "short_factor": stored,
        "attention_factor": 1.0,
        "original_max_position_embeddings": said.whole("context_length"),
    }


def _llama3(theta: float, width: int, factor: float, original: int) -> Sequence[float]:
    """What frequencies are divided by: of short waves nothing, of long ones all of `factor`."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    found = []
    for index in range(0, width, 2):
        length = 2 * math.pi * theta ** (index / width)
        share = min(1.0, max(0.0, (original / length - low) / (high - low)))
        found.append(1 / ((1 - share) / factor + share))
    return found


def longrope(said: GgufSettings, width: int, original: int) -> dict[str, Any]:
    """Phi-3's: a part of each head may be left alone; factors for contexts beyond `original`."""
    turned = said.whole("rope.dimension_count", width)
    found = {
        "rope_type": "default",
        "rope_theta": _base(said, 10000.0),
        "partial_rotary_factor": turned / width,
    }
    if said.text("rope.scaling.type") not in (None, "none", "longrope"):
        said.refuse("its rotary embedding is scaled in an unknown way")
    attention = said.real("rope.scaling.attn_factor", 1.0)
    if not said.has(_LONG) or not said.has(_SHORT):
        return found
    factors = said.numbers(_LONG), said.numbers(_SHORT)
    if any(len(each) != turned // 2 for each in factors):
        said.refuse(f"{_LONG} is not for heads of which {turned} are turned")
    scale = said.whole("context_length") / original
    expected = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    if abs(attention - expected) > _NEAR:
        found["attention_factor"] = attention
    long, short = factors
    return found | {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": original,
    }
