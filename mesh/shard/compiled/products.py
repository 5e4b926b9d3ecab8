"""Which linear layers of a decoder layer make one product, and how its rows replace them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from mesh.shard.compiled.builder import (
    BESIDE_DOWN,
    BESIDE_UP,
    DOWN,
    FORGETTING,
    GATES,
    INPUTS_GATE,
    INPUTS_PROJECTION,
    LATENT_KEYS,
    LATENT_VALUES,
    NARROWING,
    OUTPUT,
    QKV,
    QUERIES,
    RATES,
    SHARED_DOWN,
    SHARED_GATE,
    SHARED_UP,
    UP,
    WIDENING,
    Product,
)
from mesh.shard.compiled.experts import ExpertMatrices, Experts, put_blocks
from mesh.shard.compiled.feed_forward import FeedForward
from mesh.shard.compiled.formats import BlockLinear, BlockMatrix, Quant, dense_weight, rows_of
from mesh.shard.compiled.latent import LatentLinear, LatentRows
from mesh.shard.compiled.parts import Attention, ChannelDeltaNet, LayerParts, Mixer


def product_modules(parts: LayerParts) -> dict[str, tuple[nn.Module, ...]]:
    """The linear layers that each product of a layer is made of."""
    mixer, feed_forward = parts.mixer, parts.feed_forward
    found: dict[str, tuple[nn.Module, ...]] = {}
    if mixer is not None:
        found = {QKV: mixer.projections, OUTPUT: (mixer.output,), **_modules_within(mixer)}
        if mixer.rates:
            found[RATES] = mixer.rates
    if (beside := parts.beside) is not None:
        found |= {BESIDE_UP: (beside.up,), BESIDE_DOWN: (beside.down,)}
    if (inputs := parts.inputs) is not None:
        found |= {INPUTS_GATE: (inputs.gate,), INPUTS_PROJECTION: (inputs.projection,)}
    if feed_forward is None:
        return found
    if not isinstance(feed_forward, Experts):
        return {**found, UP: feed_forward.up, DOWN: (feed_forward.down,)}
    found |= {UP: (feed_forward.up,), DOWN: (feed_forward.down,)}
    if (gate := feed_forward.shared_gate) is not None:
        found[SHARED_GATE] = (gate,)
    sides = {NARROWING: feed_forward.narrowing, WIDENING: feed_forward.widening}
    found |= {name: (module,) for name, module in sides.items() if module is not None}
    if (shared := feed_forward.shared) is not None:
        found |= {SHARED_UP: shared.up, SHARED_DOWN: (shared.down,)}
    return found


def _modules_within(mixer: Mixer) -> dict[str, tuple[nn.Module, ...]]:
    """Those whose rows are what others give."""
    each: dict[str, nn.Module | None] = {}
    if isinstance(mixer, ChannelDeltaNet):
        each = {FORGETTING: mixer.forgetting, GATES: mixer.gates}
    elif isinstance(mixer, Attention) and (latent := mixer.latent) is not None:
        each = {QUERIES: latent.queries, LATENT_KEYS: latent.keys, LATENT_VALUES: latent.values}
    return {name: (module,) for name, module in each.items() if module is not None}


def latent_rows(mixer: Mixer | None) -> list[tuple[LatentRows, nn.Module]]:
    """Those of a mixer, with the layer that they are of."""
    latent = mixer.latent if isinstance(mixer, Attention) else None
    both = () if latent is None else (latent.keys, latent.values)
    return [(rows, rows.linear) for rows in both if rows is not None]


def quant_of(name: str, quant: Quant) -> Quant:
    """In how few bits the product of that name is, of a span in `quant`."""
    return "int8" if name in (RATES, FORGETTING, SHARED_GATE) else quant


def put_products(layer: nn.Module, parts: LayerParts, products: Mapping[str, Product]) -> None:
    """Have the modules of a layer compute with these products, which were made of them."""
    _replace(layer, {**_linears(parts, products), **_latent(parts, products)})
    _put_experts(parts, products)


def _linears(parts: LayerParts, products: Mapping[str, Product]) -> dict[int, BlockLinear]:
    """By the ids of the linear layers, their rows of the products; others are none."""
    found = {}
    for name, linears in product_modules(parts).items():
        if any(isinstance(each, ExpertMatrices | LatentRows) for each in linears):
            continue
        product, first = products[name], 0
        assert isinstance(product.matrix, BlockMatrix)  # noqa: S101 - of a quantised span
        for linear in linears:
            rows = slice(first, first + count_rows(linear))
            bias = None if product.bias is None else product.bias[rows]
            transposed = isinstance(linear, Conv1D)
            of_rows = rows_of(product.matrix, rows)
            found[id(linear)] = BlockLinear(of_rows, bias, transposed=transposed)
            first = rows.stop
    return found


def _latent(parts: LayerParts, products: Mapping[str, Product]) -> dict[int, LatentLinear]:
    """The same of the layer that makes keys and values of a latent."""
    found = {}
    for linear in {linear for _, linear in latent_rows(parts.mixer)}:
        keys, values = (products[name].matrix for name in (LATENT_KEYS, LATENT_VALUES))
        assert isinstance(keys, BlockMatrix)  # noqa: S101 - of a quantised span
        assert isinstance(values, BlockMatrix)  # noqa: S101 - as well
        found[id(linear)] = LatentLinear(keys, values)
    return found


def _put_experts(parts: LayerParts, products: Mapping[str, Product]) -> None:
    """Have the modules of experts compute with these."""
    for name, (first, *_) in product_modules(parts).items():
        if isinstance(first, ExpertMatrices):
            matrix = products[name].matrix
            assert isinstance(matrix, BlockMatrix)  # noqa: S101 - of a quantised span
            put_blocks(first, matrix)


def _replace(layer: nn.Module, linears: Mapping[int, nn.Module]) -> None:
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in linears:
                setattr(parent, name, linears[id(child)])


def without_modules(parts: LayerParts) -> LayerParts:
    """What a graph needs of it: the modules would keep the weights that were rounded."""
    mixer = None if parts.mixer is None else _bare_mixer(parts.mixer)
    if (inputs := parts.inputs) is not None:
        inputs = replace(inputs, gate=nn.Identity(), projection=nn.Identity())
    parts, part = replace(parts, mixer=mixer, inputs=inputs), parts.feed_forward
    if isinstance(part, Experts):
        shared = None if part.shared is None else _bare(part.shared)
        gate = None if part.shared_gate is None else nn.Identity()
        part = replace(part, shared=shared, shared_gate=gate, narrowing=None, widening=None)
        return replace(parts, feed_forward=part)
    return replace(parts, feed_forward=None if part is None else _bare(part))


def _bare_mixer(mixer: Mixer) -> Mixer:
    mixer = replace(mixer, projections=(), rates=(), output=nn.Identity())
    if isinstance(mixer, Attention) and mixer.latent is not None:
        latent = replace(mixer.latent, queries=None, keys=None, values=None)
        return replace(mixer, latent=latent)
    if isinstance(mixer, ChannelDeltaNet):
        return replace(mixer, gates=None, forgetting=None)
    return mixer


def _bare(part: FeedForward) -> FeedForward:
    return replace(part, up=(), down=nn.Identity())


def bias_of(linears: Sequence[nn.Module]) -> torch.Tensor | None:
    """That of their product."""
    biases: list[Any] = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            torch.zeros(count_rows(linear)) if bias is None else bias.detach().float()
            for linear, bias in zip(linears, biases, strict=True)
        ]
    )


def count_rows(linear: nn.Module) -> int:
    """Of its matrix, or of those of all experts."""
    if isinstance(linear, ExpertMatrices):
        return linear.shape[0] * linear.shape[1]
    return int(dense_weight(linear).shape[0])


def count_columns(linear: nn.Module) -> int:
    """Of its matrix."""
    if isinstance(linear, ExpertMatrices):
        return linear.shape[2]
    return int(dense_weight(linear).shape[1])
