"""With how many rows products are computed at least, so that a row's bits are always the same.

In 4 bit, onnxruntime's kernels for AVX2 add up a single row in another order than two and more; two
take no longer than one. What this CPU does is looked at once for each format.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

from mesh.shard.alike_rows import alike_rows
from mesh.shard.compiled.engine import Binding, compiled
from mesh.shard.compiled.formats import BITS, BlockMatrix, quantise
from mesh.shard.compiled.graph import Product, product_model

_SHAPE = (64, 512)
_COMPANY = 4
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
