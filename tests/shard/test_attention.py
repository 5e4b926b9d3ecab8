"""What attention gives does not depend on how it is cut."""

from __future__ import annotations

import torch

from mesh.shard.attention import CausalRule, attention_of


def test_a_row_with_thousands_of_keys_has_the_bits_of_its_heads_apart() -> None:
    heads, keys, width = 12, 2048, 64
    seeded = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, rows, width, generator=seeded).bfloat16() for rows in (1, keys, keys)
    )
    attend, rule = attention_of(None), CausalRule(None)
    parts = [
        attend(query[:, n : n + 2], key[:, n : n + 2], value[:, n : n + 2], rule, 0.1)
        for n in range(0, heads, 2)
    ]
    assert torch.equal(attend(query, key, value, rule, 0.1), torch.cat(parts, 1))
