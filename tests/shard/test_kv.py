from __future__ import annotations

import pytest
import torch

from mesh.errors import ContextTooLong
from mesh.shard.kv import SessionCache
from tests.shard.spans import relative_error, rows, runtime, step


def write(cache: SessionCache, count: int, value: float) -> torch.Tensor:
    states = torch.full((1, 2, count, 4), value)
    cache.reserve(count)
    keys, _ = cache.update(states, -states, 0)
    cache.commit(count)
    return keys


def test_positions_follow_each_other_through_growth() -> None:
    cache = SessionCache(1, 5000)
    for i in range(20):
        keys = write(cache, 60, float(i))
    assert keys.shape == (1, 2, 1200, 4)
    assert torch.equal(keys[0, 0, :, 0], torch.arange(20.0).repeat_interleave(60))


def test_buffers_start_small_and_stop_at_the_limit() -> None:
    cache = SessionCache(1, 10_000)
    write(cache, 1, 0.0)
    small = cache.allocated_bytes
    write(cache, 2000, 0.0)
    assert small < cache.allocated_bytes
    write(cache, 7999, 0.0)
    assert cache.allocated_bytes == 10_000 * 2 * 4 * 4 * 2
    with pytest.raises(ContextTooLong):
        cache.reserve(1)


def test_what_is_not_committed_does_not_exist() -> None:
    cache = SessionCache(1, 100)
    write(cache, 5, 1.0)
    cache.reserve(3)
    cache.update(torch.full((1, 2, 3, 4), 9.0), torch.zeros(1, 2, 3, 4), 0)
    keys = write(cache, 1, 2.0)
    assert keys[0, 0, :, 0].tolist() == [1.0] * 5 + [2.0]


def test_cutting_back_forgets_and_a_later_cut_changes_nothing() -> None:
    cache = SessionCache(1, 100)
    write(cache, 5, 1.0)
    cache.cut(7)
    assert cache.length == 5
    cache.cut(2)
    keys = write(cache, 1, 3.0)
    assert keys[0, 0, :, 0].tolist() == [1.0, 1.0, 3.0]


def test_what_layers_choose_by_grows_is_cut_and_copied_as_keys_are() -> None:
    span, hidden = runtime("axk2"), rows(310)
    cache, other = span.new_cache(400), span.new_cache(400)
    step(span, cache, 0, hidden[:, :250])
    expected = step(span, cache, 250, hidden[:, 250:])  # in buffers that grew meanwhile
    other.copy(cache, 280)
    cache.cut(260)
    for each, position in ((cache, 260), (other, 280)):
        found = step(span, each, position, hidden[:, position:])
        assert relative_error(found, expected[:, position - 250 :]) < 1e-4


def test_a_reset_gives_the_memory_back() -> None:
    cache = SessionCache(1, 100)
    write(cache, 5, 1.0)
    cache.reset()
    assert (cache.length, cache.allocated_bytes) == (0, 0)
    assert write(cache, 2, 4.0)[0, 0, :, 0].tolist() == [4.0, 4.0]
