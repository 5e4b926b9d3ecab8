"""Models that turn short texts otherwise than long ones, as graphs: each session by its own."""

from __future__ import annotations

import torch

from mesh.shard.rotary import Rotary
from mesh.shard.runtime import StepInput
from tests.checkpoints import LONGROPE
from tests.shard.compiled.spans import compiled
from tests.shard.spans import relative_error, rows, step, whole_model

_FAMILY, _SHORT = "phi4_mini/1x1", int(LONGROPE["original_max_position_embeddings"])


def test_a_short_text_and_a_long_one_that_are_computed_together_are_turned_each_as_itself() -> None:
    graphs, hidden = compiled(None, _FAMILY), rows(_SHORT + 21)
    caches = [graphs.new_cache(_SHORT), graphs.new_cache(_SHORT + 21)]
    assert [each.short for each in caches] == [_SHORT, 0]
    begun = hidden[:, :20]
    both = graphs.forward([StepInput(each, 0, begun) for each in caches])
    assert relative_error(*both) > 1e-3
    # To the last position that a short text may have, with one row alone there.
    for cache, first, ends in zip(caches, both, (2, 3), strict=True):
        parts = [first] + [
            step(graphs, cache, cache.length, hidden[:, cache.length : end])
            for end in (_SHORT - 1, _SHORT, _SHORT + 21)[:ends]
        ]
        expected = whole_model(_FAMILY, hidden[:, : cache.length])
        assert relative_error(torch.cat(parts, 1), expected) < 1e-4
    # In the place of the short one.
    del cache
    caches.clear()
    again = graphs.new_cache(_SHORT + 1)
    assert torch.equal(step(graphs, again, 0, begun), both[1])


def test_of_texts_of_both_kinds_each_has_the_tables_of_its_own() -> None:
    """Also where what fills up a short one stands where none of its rows may."""
    rotary, like = Rotary(compiled(None, _FAMILY).loaded.module, [""]), torch.zeros(1)
    positions = torch.tensor([[5, 6, _SHORT + 7], [5, 6, _SHORT]])
    near = positions[:1, :2]
    long, short = (rotary.halves(like, near, "", [is_long]) for is_long in (True, False))
    mixed = rotary.halves(like, positions, "", [True, False])
    for of_both, of_long, of_short in zip(mixed, long, short, strict=True):
        assert torch.equal(of_both[0, :2], of_long[0])
        assert torch.equal(of_both[1, :2], of_short[0])
        assert not torch.equal(of_long, of_short)
