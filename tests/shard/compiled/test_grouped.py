"""Attention that reads a key once for all queries that share it, where that changes no bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
import torch

from mesh.shard.compiled.attention_graph import grouped_model
from mesh.shard.compiled.lone_rows import have_same_rows, is_grouped
from mesh.shard.compiled.parts import Attention
from mesh.shard.compiled.passes import PassPlace
from mesh.shard.compiled.runtime import CompiledRuntime
from mesh.shard.compiled.slots import Bank, CacheShape, KeyShape
from tests.shard.compiled.spans import APART, GROUPED, WINDOWED, compiled
from tests.shard.spans import relative_error, rows, step, whole_model

SHARED = Attention(
    (), torch.nn.Identity(), 14, 2, 64, 0.125, 0.0, None, None, None, None, norm_whole=False
)


@pytest.fixture(scope="module")
def on_this_cpu() -> bool:
    """Whether a row alone has the bits here that it has in a piece of a prompt."""
    both = (grouped_model(SHARED, 0, alone=alone) for alone in (True, False))
    return have_same_rows(SHARED, *both)


@pytest.mark.parametrize("family", GROUPED)
def test_where_many_queries_share_a_key_kernels_say_so(family: str, on_this_cpu: bool) -> None:
    if not on_this_cpu:
        pytest.skip("a row alone has other bits than in a piece of a prompt here")
    assert compiled("int8", family).kernels.endswith("+int8+grouped")


def test_a_key_for_each_query_and_what_hides_little_are_computed_as_ever(on_this_cpu: bool) -> None:
    assert "grouped" not in compiled("int8", APART).kernels
    assert is_grouped(SHARED) == is_grouped(replace(SHARED, kv_heads=7)) == on_this_cpu
    assert not is_grouped(replace(SHARED, kv_heads=14))
    assert is_grouped(replace(SHARED, window=128, kv_heads=14)) == on_this_cpu
    assert not is_grouped(replace(SHARED, window=127))
    assert not is_grouped(replace(SHARED, window=4096))
    assert is_grouped(replace(SHARED, window=128, sinks=torch.zeros(14))) == on_this_cpu
    assert not is_grouped(replace(SHARED, sinks=torch.zeros(14)))


def in_pieces(runtime: CompiledRuntime, hidden: torch.Tensor, *sizes: int) -> torch.Tensor:
    """What becomes of `hidden` in pieces of these sizes, in turns."""
    found: list[torch.Tensor] = []
    cache = runtime.new_cache(512)
    for size in cycle(sizes):
        at = cache.length
        if at == hidden.shape[1]:
            return torch.cat(found, 1)
        found.append(step(runtime, cache, at, hidden[:, at : at + size]))
    raise AssertionError


@pytest.mark.parametrize("family", WINDOWED)
def test_keys_that_a_window_hides_are_left_out_and_change_nothing(family: str) -> None:
    hidden, plain = rows(430), compiled(None, family, positions=512)
    assert "grouped" in plain.kernels
    found = in_pieces(plain, hidden, 200, 1, 64)
    assert relative_error(found, whole_model(family, hidden)) < 1e-4
    runtime = compiled("int8", family, positions=512)
    expected = in_pieces(runtime, hidden, 430)
    for sizes in ([1], [7, 2], [200, 1, 64]):
        assert torch.equal(in_pieces(runtime, hidden, *sizes), expected), sizes


def test_what_takes_weight_and_gives_nothing_does_so_beside_a_window() -> None:
    hidden, runtime = rows(430), compiled(None, "gpt_oss/4x2x64x128", positions=512)
    assert "grouped" in runtime.kernels
    found = in_pieces(runtime, hidden, 200, 1, 64)
    assert relative_error(found, whole_model("gpt_oss/4x2x64x128", hidden)) < 1e-4
    short = rows(160)
    assert torch.equal(in_pieces(runtime, short, 1), in_pieces(runtime, short, 7))


@pytest.mark.parametrize("family", ["llama/8x2", APART, "glm4_moe_lite"])
def test_what_was_cut_off_or_lies_in_another_slot_changes_no_bit(family: str) -> None:
    """Attention takes keys behind a session's end, in as much room as the session once had."""
    runtime, hidden = compiled("int8", family), rows(200)
    straight = runtime.new_cache(256)
    expected = step(runtime, straight, 0, hidden)[:, 60:]
    caches = [runtime.new_cache(256) for _ in range(3)]
    for cache, lost in zip(caches, (20, 140), strict=False):
        step(runtime, cache, 0, hidden[:, :60])
        step(runtime, cache, 60, torch.full_like(hidden[:, :lost], torch.nan))
        cache.cut(60)
    caches[2].copy(straight, 60)
    for cache in caches:
        found = [step(runtime, cache, at, hidden[:, at : at + 70]) for at in range(60, 200, 70)]
        assert torch.equal(torch.cat(found, 1), expected)


def test_one_bit_of_a_row_that_is_alone_is_seen() -> None:
    """Kernels that add up a row alone in another order are not there to be had everywhere."""
    several = grouped_model(SHARED, 0, alone=False)
    nearly = replace(SHARED, scale=float(torch.nextafter(torch.tensor(0.125), torch.tensor(1.0))))
    assert not have_same_rows(SHARED, grouped_model(nearly, 0, alone=True), several)


def test_a_long_piece_is_computed_in_parts_that_see_those_before() -> None:
    bank = Bank(CacheShape((KeyShape(1, 4),), positions=8))
    whole = PassPlace(bank, 2, 10, 7)
    parts = [(part.slot, part.start, part.rows, part.reads) for part in whole.pieces(3)]
    assert parts == [(2, 10, 3, 0), (2, 13, 3, 1), (2, 16, 1, 1)]
    assert {part.writes for part in whole.pieces(3)} == {1}
    assert list(whole.pieces(7)) == [whole]
