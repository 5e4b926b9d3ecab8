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


def test_sinks_take_weight_and_give_nothing_in_however_many_pieces() -> None:
    heads, kv_heads, rows, keys, width = 8, 2, 70, 20_000, 8
    seeded = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads, rows, width, generator=seeded)
    key, value = torch.randn(2, 1, kv_heads, keys, width, generator=seeded)
    sinks = 8 * torch.rand(heads, generator=seeded)
    scores = query @ key.repeat_interleave(4, 1).transpose(2, 3) * 0.5
    scores += torch.full((rows, keys), float("-inf")).triu(keys - rows + 1)
    beside = sinks[:, None, None].expand(heads, rows, 1)[None]
    weights = torch.cat([scores, beside], -1).softmax(-1)[..., :-1]
    attend = attention_of(None, sinks)
    found = attend(query, key, value, CausalRule(None), 0.5)
    torch.testing.assert_close(found, weights @ value.repeat_interleave(4, 1), atol=1e-5, rtol=0)
    last = attend(query[:, :, -1:], key, value, CausalRule(None), 0.5)
    torch.testing.assert_close(last, found[:, :, -1:], atol=1e-5, rtol=0)
