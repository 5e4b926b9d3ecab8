"""With how many rows products are computed at least, so that a row's bits are always the same.

In 4 bit, onnxruntime's kernels for AVX2 add up a single row in another order than two and more; two
take no longer than one. What this CPU does is looked at once for each format, and for each form of
attention that computes a single row in another way than several.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import cycle

import torch

from mesh.shard.alike_rows import alike_rows
from mesh.shard.compiled.attention_graph import grouped_model, may_group, padding, row_shape
from mesh.shard.compiled.builder import Product
from mesh.shard.compiled.engine import Binding, compiled
from mesh.shard.compiled.formats import BITS, BlockMatrix, quantise
from mesh.shard.compiled.graph import product_model
from mesh.shard.compiled.parts import Attention
from mesh.shard.compiled.slots import FEWEST_ROWS, room_for

_SHAPE = (64, 512)
_COMPANY = 4
_POSITIONS = 530
"""Beyond 512 products over positions are added up in several parts; and so many beyond a window."""
_PIECES = (1, 2, 63, 64, 127, 3, 200, 70)
"""Rows of pieces of a prompt, one after the other, and all again."""
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
    share = attention.heads // attention.kv_heads  # of one key head: others are as it is
    numbers = attention.width, attention.scale, attention.softcap, attention.window
    return may_group(attention) and _is_alike(share, *numbers, attention.sinks is not None)


@cache
def _is_alike(
    share: int, width: int, scale: float, softcap: float, window: int | None, sinks: bool
) -> bool:
    nothing, some = torch.nn.Identity(), torch.zeros(share) if sinks else None
    attention = Attention(
        (), nothing, share, 1, width, scale, softcap, window, None, None, None, norm_whole=False,
        sinks=some,
    )  # fmt: skip
    models = (grouped_model(attention, 0, alone=alone) for alone in (True, False))
    return have_same_rows(attention, *models)


def have_same_rows(attention: Attention, alone: bytes, several: bytes) -> bool:
    """Whether a row of attention has the same bits by the graph for one that is alone, with little
    room behind it, as by that for pieces of a prompt with more; neither turns by position."""
    heads, kv_heads, width = attention.heads, attention.kv_heads, attention.width
    positions = _POSITIONS + (attention.window or 0)
    source = torch.Generator().manual_seed(0)
    rows = torch.randn(1, positions, (heads + 2 * kv_heads) * width, generator=source)
    memory = torch.zeros(2, 1, kv_heads, positions + 1, width)
    one, any_rows = compiled(alone, 1), compiled(several, 1)

    def attended(start: int, count: int) -> torch.Tensor:
        """Of rows from `start` on; their keys and values are written, the same each time."""
        given = count + padding(count) if count > 1 else 1
        room = positions + 1 if count > 1 else room_for(start + 1, FEWEST_ROWS)
        keys, values = held = memory[..., :room, :].contiguous()
        inputs = row_shape(count) | {
            "projected": rows[:, start : start + count].contiguous(), "keys": keys,
            "values": values, "at": torch.tensor([start]), "end": torch.tensor([start + given]),
            "positions": torch.arange(start, start + given)[None],
            "sinks": torch.linspace(-2, 2, heads),
        }  # fmt: skip
        found = torch.empty(1, count, heads * width)
        outputs = {"attended": found, "new_keys": keys, "new_values": values}
        Binding.of(any_rows if count > 1 else one, inputs, outputs).run()
        memory[..., :room, :] = held
        return found

    pieces, start = [], 0
    for count in cycle(_PIECES):
        if start == positions:
            break
        pieces.append(attended(start, min(count, positions - start)))
        start += pieces[-1].shape[1]
    together = torch.cat(pieces, 1)
    looked_at = range(0, positions, _EACH)
    return all(torch.equal(attended(at, 1), together[:, at : at + 1]) for at in looked_at)
