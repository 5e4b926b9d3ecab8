"""Rotary embeddings that depend on how long a text is, as configs of transformers say them."""

from __future__ import annotations

from typing import Any


def rope_types(config: Any) -> frozenset[str]:
    """The kinds of rotary embedding in use, over all layer types."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return frozenset({str(parameters["rope_type"])})
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    return frozenset(str(p["rope_type"]) for p in nested if "rope_type" in p)


def short_positions(config: Any) -> int:
    """Texts of up to so many positions are turned otherwise than longer ones, all of which are
    turned alike (LongRoPE, https://arxiv.org/abs/2402.13753, of Phi 3 and 4); 0 where the length of
    a text makes no such difference."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "longrope":
        return 0
    pairs = ("short_factor", "long_factor"), ("short_mscale", "long_mscale")
    if all(parameters.get(short) == parameters.get(long) for short, long in pairs):
        return 0
    return int(parameters["original_max_position_embeddings"])
