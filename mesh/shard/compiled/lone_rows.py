"""With how many rows products are computed at least, so that a row's bits are always the same.

In 4 bit, onnxruntime's kernels for AVX2 add up a single row in another order than two and more; two
take no longer than one. What this CPU does is looked at once for each format, and for each form of
attention that computes a single row in another way than several.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from mesh.shard.alike_rows import alike_rows
from mesh.shard.compiled.attention_graph import grouped_model, may_group, padding
from mesh.shard.compiled.engine import Binding, compiled
from mesh.shard.compiled.formats import BITS, BlockMatrix, quantise
from mesh.shard.compiled.graph import Product, product_model
from mesh.shard.compiled.parts import Attention

_SHAPE = (64, 512)
_COMPANY = 4
_POSITIONS = 530
"""Beyond 512 products over positions are added up in several parts."""
_PIECES = (1, 2, 63, 64, 127, 3, 200, 70)
"""Rows of pieces of a prompt, which end at `_POSITIONS`."""
_EACH = 7
"""So far apart are the rows that are looked at: in all places of a tile."""

_QUANTS = {bits: quant for quant, bits in BITS.items()}


def fewest_rows(products: Iterable[Product]) -> int:
    """1; or 2 where a row of one of these products has other bits alone than beside another, and so
    on."""
    matrices = (product.matrix for product in products)
    formats = {matrix.bits for matrix in matrices if isinstance(matrix, BlockMatrix)}
    return max(map(_fewest_rows, formats), default=1)


@cache
def _fewest_rows(bits: int) -> int:
    weight = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0))
    product = Product(quantise(weight, _QUANTS[bits]), None)
    session = compiled(product_model(product, *_SHAPE), threads=1)

    def computed(rows: torch.Tensor) -> torch.Tensor:
        found = torch.empty(len(rows), _SHAPE[0])
        Binding.of(session, {"x": rows}, {"y": found}).run()
        return found

    return alike_rows(computed, _SHAPE[1], _COMPANY)[1]


def is_grouped(attention: Attention) -> bool:
    """Whether `grouped_model` is to compute this attention: it may, and each row has the same bits
    alone and in a piece of a prompt."""
    shape = attention.heads, attention.kv_heads, attention.width
    return may_group(attention) and _is_alike(*shape, attention.scale, attention.softcap)


@cache
def _is_alike(heads: int, kv_heads: int, width: int, scale: float, softcap: float) -> bool:
    nothing = torch.nn.Identity()
    attention = Attention(
        (), nothing, heads, kv_heads, width, scale, softcap, None, None, None, None,
        norm_whole=False,
    )  # fmt: skip
    source = torch.Generator().manual_seed(0)
    packed = (heads + 2 * kv_heads) * width
    rows = torch.randn(1, _POSITIONS, packed, generator=source)
    both = [compiled(grouped_model(attention, 0, alone=alone), 1) for alone in (True, False)]
    cache_of = torch.zeros(2, 1, kv_heads, _POSITIONS + 1, width)
    start, found = 0, []
    for piece in _PIECES:
        found.append(_attended(both[piece > 1], rows[:, start : start + piece], start, cache_of))
        start += piece
    together = torch.cat(found, 1)
    return all(
        torch.equal(
            _attended(both[0], rows[:, at : at + 1], at, cache_of), together[:, at : at + 1]
        )
        for at in range(0, _POSITIONS, _EACH)
    )


def _attended(session: Any, rows: torch.Tensor, at: int, cache_of: torch.Tensor) -> torch.Tensor:
    """What attention makes of rows that stand at `at` and behind; it writes their keys and values,
    which are the same each time."""
    count = rows.shape[1]
    given = count + padding(count) if count > 1 else 1
    keys, values = cache_of
    inputs = {
        "projected": rows.contiguous(), "keys": keys, "values": values,
        "at": torch.tensor([at]), "end": torch.tensor([at + given]),
        "rows": torch.tensor([count]), "padding": torch.tensor([0, 0, 0, 0, given - count, 0]),
    }  # fmt: skip
    heads = rows.shape[2] // values.shape[3] - 2 * values.shape[1]
    found = torch.empty(1, count, heads * values.shape[3])
    Binding.of(session, inputs, {"attended": found, "new_keys": keys, "new_values": values}).run()
    return found
