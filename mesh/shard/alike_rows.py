"""How many rows a kernel is to be given, so that a row's bits are the same in any company.

Libraries have kernels of their own for one row, or for two, that add up in another order than those
for more. What this CPU does is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def alike_rows(
    product: Callable[[torch.Tensor], torch.Tensor], columns: int, most: int
) -> Sequence[int]:
    """By how many rows there are, up to `most`: the fewest that are not less and all get the same
    bits, those of many rows; as many as there are where there is no such number.

    `product` takes (rows, columns), contiguous.
    """
    row = torch.randn(1, columns, generator=torch.Generator().manual_seed(0))
    many = 2 * most

    def computed(rows: int) -> torch.Tensor:
        return product(row.expand(rows, -1).contiguous())

    expected = computed(many)[:1]
    alike = [
        rows
        for rows in range(1, many)
        if torch.equal(found := computed(rows), expected.expand_as(found))
    ]
    return [0, *(next((n for n in alike if n >= rows), rows) for rows in range(1, most + 1))]
