"""With how many rows products are computed at least, so that a row's bits are always the same.

In 4 bit, onnxruntime's kernels for AVX2 add up a single row in another order than two and more; two
take no longer than one. What this CPU does is looked at once for each format.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

from mesh.shard.compiled.engine import Binding, compiled
from mesh.shard.compiled.formats import BITS, BlockMatrix, quantise
from mesh.shard.compiled.graph import Product, product_model

_SHAPE = (64, 512)
_MANY = 8
_COMPANY = 2
_QUANTS = {bits: quant for quant, bits in BITS.items()}


def fewest_rows(products: Iterable[Product]) -> int:
    """1; or 2 where a row of one of these products has other bits alone than beside another."""
    matrices = (product.matrix for product in products)
    formats = {matrix.bits for matrix in matrices if isinstance(matrix, BlockMatrix)}
    return max(map(_fewest_rows, formats), default=1)


@cache
def _fewest_rows(bits: int) -> int:
    seeded = torch.Generator().manual_seed(0)
    matrix = quantise(torch.randn(_SHAPE, generator=seeded), _QUANTS[bits])
    rows = torch.randn(_MANY, _SHAPE[1], generator=seeded)
    session = compiled(product_model(Product(matrix, None), *_SHAPE), threads=1)

    def first(count: int) -> torch.Tensor:
        found = torch.empty(count, _SHAPE[0])
        Binding.of(session, {"x": rows[:count]}, {"y": found}).run()
        return found[0]

    alone, beside, many = map(first, (1, _COMPANY, _MANY))
    is_other = torch.equal(beside, many) and not torch.equal(alone, many)
    return _COMPANY if is_other else 1
