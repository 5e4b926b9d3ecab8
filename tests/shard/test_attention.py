"""What attention gives does not depend on how it is cut."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mesh.shard.attention import CausalRule, attention_of
from mesh.shard.device import cpu_has_amx

ALL_LENGTHS = """
import psutil, torch
from mesh.shard.attention import CausalRule, attention_of
torch.set_num_threads(1)
attend, process, before = attention_of(None), psutil.Process(), 0
with torch.inference_mode():
    for number in range(300):
        rows = 64 + 3 * number % 137
        past = (0, 300, 977)[number % 3] + number % 3 * number
        window = 250 if number % 7 == 6 else None
        query = torch.randn(1, 4, rows, 64).bfloat16()
        key, value = torch.randn(2, 1, 2, rows + past, 64).bfloat16()
        found = attend(query, key, value, CausalRule(window), 0.1)
        if number % 29 in (0, 6, 13):
            expected = attend(query.float(), key.float(), value.float(), CausalRule(window), 0.1)
            assert float((found - expected).norm() / expected.norm()) < 0.01, (rows, past, window)
        if number == 20:
            before = process.memory_full_info().uss
print(process.memory_full_info().uss - before)
"""


@pytest.mark.skipif(not cpu_has_amx(), reason="this CPU has no matrix tiles")
def test_prompts_of_all_lengths_leave_no_kernel_for_each() -> None:
    """In a process of its own: what else a worker's heap does would be counted."""
    ended = subprocess.run(
        [sys.executable, "-c", ALL_LENGTHS], check=True, capture_output=True, timeout=120
    )
    assert int(ended.stdout) < 36 << 20


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
