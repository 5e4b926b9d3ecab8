"""Tolerances: two honest machines agree, whatever the batch; a small lie does not hide in them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from mesh.models.load import load_ends
from mesh.pipeline.watch.evidence import digest, disagreement, tolerance
from mesh.pipeline.watch.sanity import Floats, rows_as_floats
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import WireDtype
from mesh.wire.activations import to_wire
from tests.checkpoints import STATEFUL
from tests.fakes import descriptor
from tests.shard.spans import checkpoint, runtime, step

ROWS = 48
SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
ONE = descriptor("attic", "0-3")


@cache
def span_of(family: str, dtype: torch.dtype) -> TorchRuntime:
    return runtime(family, dtype=dtype)


def computed(family: str, dtype: torch.dtype, pieces: list[int]) -> torch.Tensor:
    """(1, ROWS, hidden) behind four layers, fed in pieces of these lengths."""
    ends = load_ends(checkpoint(family), dtype=torch.float32, device=torch.device("cpu"))
    ids = torch.arange(1, ROWS + 1)[None] * 7 % 384
    with torch.inference_mode():
        hidden = ends.embed(ids, 0).to(dtype)
        span = span_of(family, dtype)
        cache = span.new_cache(ROWS)
        edges = [0, *itertools.accumulate(pieces)]
        parts = [step(span, cache, a, hidden[:, a:b]) for a, b in itertools.pairwise(edges)]
    return torch.cat(parts, 1)


def on_wire(hidden: torch.Tensor, dtype: WireDtype) -> Floats:
    return rows_as_floats(to_wire(hidden, dtype))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float32), ("llama", torch.float16), ("llama", torch.bfloat16),
     ("gemma3", torch.float32), ("qwen3_5", torch.float32), ("qwen3_5", torch.bfloat16),
     ("lfm2", torch.bfloat16)],
)  # fmt: skip
def test_steps_and_a_replay_in_chunks_agree(family: str, dtype: torch.dtype) -> None:
    steps = computed(family, dtype, [8, *[1] * (ROWS - 8)])
    replay = computed(family, dtype, [32, ROWS - 32])
    shard = replace(ONE, dtype=SHORT[dtype])
    for wire in WireDtype:
        allowed = tolerance(wire, shard, shard, routed=family in STATEFUL)
        excess = disagreement(on_wire(steps, wire), on_wire(replay, wire), allowed)
        print(f"\n{family} {dtype} wire {wire}: {excess:.2f} of the tolerance")
        assert excess <= 1.0


def test_one_channel_scaled_by_two_percent_shows_also_in_a_wide_row() -> None:
    rng = np.random.default_rng(3)
    honest = rng.standard_normal((200, 4096)).astype(np.float32)
    noisy = honest * (1 + 2.0**-11 * rng.uniform(-1, 1, honest.shape)).astype(np.float32)
    shard = replace(ONE, dtype="fp32")
    allowed = tolerance("fp16", shard, shard, routed=False)
    assert disagreement(noisy, honest, allowed) <= 1.0
    lied = noisy.copy()
    lied[:, 77] *= 1.02
    found = [disagreement(lied[i : i + 1], honest[i : i + 1], allowed) > 1 for i in range(200)]
    assert np.mean(found) > 0.8


def test_garbage_shows_in_any_format() -> None:
    rng = np.random.default_rng(3)
    honest, garbage = rng.standard_normal((2, 4, 64)).astype(np.float32)
    for wire, kind, routed in itertools.product(WireDtype, ("fp32", "bf16", "int8"), (False, True)):
        shard = replace(ONE, dtype=kind)
        other = replace(shard, determinism_class="another")
        assert disagreement(garbage, honest, tolerance(wire, shard, other, routed=routed)) > 1


def test_another_class_is_given_more_room() -> None:
    shard = replace(ONE, dtype="fp32")
    other = replace(shard, determinism_class="another")
    same = tolerance("fp32", shard, shard, routed=False)
    assert tolerance("fp32", shard, other, routed=False).value > 2 * same.value


def test_what_is_no_number_agrees_with_nothing() -> None:
    rows = np.ones((2, 8), np.float32)
    broken = rows.copy()
    broken[1, 3] = np.nan
    allowed = tolerance("fp32", ONE, ONE, routed=True)
    assert disagreement(broken, rows, allowed) == float("inf")
    assert disagreement(rows[:1], rows, allowed) == float("inf")


def test_a_digest_survives_rounding_and_shows_a_difference() -> None:
    rows = np.full((2, 8), 1.01, np.float32)
    other = rows.copy()
    other[0, 0] = -1.0
    assert digest(rows) == digest(rows * np.float32(1 + 1e-4))
    assert digest(rows) != digest(other)
