"""What is computed again behind a lost shard has the bits that were lost, in 16 and in few bits."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from mesh.pipeline.history import CHUNK_ROWS, History, rows_of
from mesh.shard.loading import load_shard
from mesh.shard.runtime import Runtime, StepInput
from mesh.wire.messages import WireTensor
from tests.shard.compiled.spans import compiled
from tests.shard.spans import HIDDEN, rows
from tests.shard.test_int4 import plan
from tests.shard.test_lean import needs_packed_bf16, runtime

STEPS = [CHUNK_ROWS, 40, *[1] * 30, 5, *[1] * 20, 60, *[1] * 11]
"""A prompt in two pieces, an answer, what was drafted, another turn of a chat and its answer."""
SPANS = {
    "llama": lambda: runtime("llama", dtype=torch.bfloat16),
    "qwen3_moe": lambda: runtime("qwen3_moe", dtype=torch.bfloat16),
    "qwen3_5": lambda: runtime("qwen3_5", dtype=torch.bfloat16),
    "llama in int8": lambda: compiled("int8", "llama", positions=512),
    "gemma4 in int4, by torch": lambda: load_shard(plan("gemma4")).load(),
    "qwen3_moe in int4": lambda: compiled("int4", "qwen3_moe", positions=512),
}


def after(span: Runtime, pieces: Iterable[tuple[int, int]]) -> torch.Tensor:
    """What a row gives behind these pieces, each its first position and its rows."""
    hidden = rows(sum(STEPS) + 1).to(span.dtype)
    cache, end = span.new_cache(512), 0
    for start, count in pieces:
        end = start + count
        span.forward([StepInput(cache, start, hidden[:, start:end])])
    return span.forward([StepInput(cache, end, hidden[:, end : end + 1])])[0]


@needs_packed_bf16
@pytest.mark.parametrize("name", SPANS)
def test_a_row_behind_a_replay_is_the_row_that_it_would_have_been(name: str) -> None:
    span, history, pieces = SPANS[name](), History(), []
    for count in STEPS:
        pieces.append((history.length, count))
        history.append(WireTensor("fp16", (1, count, HIDDEN), bytes(2 * count * HIDDEN)))
    replay = list(history.chunks(CHUNK_ROWS, joined=span.short_rows or None))
    assert len(replay) < len(pieces) / 5
    again = [(position, rows_of(tensor)) for position, tensor in replay]
    assert torch.equal(after(span, again), after(span, pieces))
