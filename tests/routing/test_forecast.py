"""What a copy is said to do, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from mesh.capacity import Device, Speed
from mesh.routing.fitting import Bench
from mesh.routing.forecast import Bottleneck, Forecast, forecast, with_one_more
from mesh.routing.machines import Machine
from mesh.types import LayerRange, NodeId
from tests.routing.shapes import model_of

LAYERS = 8
MODEL = model_of(
    "m", (2_000_000,) * LAYERS, "bf16", ends_bytes=20_000_000, head_bytes=20_000_000,
    hidden_size=1024,
)  # fmt: skip
ASKER = Machine(
    NodeId("z"), "z", (Device("cpu", 1 << 30, 1 << 30, (Speed("bf16", 20.0, 100.0),)),),
    asker_ms=3.0,
)  # fmt: skip


def bench(
    name: str, decode_ms: float, prefill_ms: float, rtt_ms: float, mb_s: float, *speeds: Speed
) -> Bench:
    """A device where a layer takes so much for a token, and for 512 rows."""
    device = Device("cpu", 1 << 30, 1 << 30, speeds)
    return Bench(
        Machine(NodeId(name), name, (device,), rtt_ms, mb_s), device, "bf16", (1,) * LAYERS, 1, 1,
        0, (decode_ms,) * LAYERS, (prefill_ms,) * LAYERS, 1 << 30, (0,) * LAYERS,
    )  # fmt: skip


A, B = bench("a", 2.0, 64.0, 0.4, 100.0), bench("b", 4.0, 512.0, 0.9, 50.0)
SPLIT = ((A, LayerRange(0, 5)), (B, LayerRange(5, 8)))
WAYS_MS = 1.0 + 1.5
"""A hop takes 0.6 ms besides the way."""


def of(parts: tuple[tuple[Bench, LayerRange], ...], asker: Machine | None = None) -> Forecast:
    return forecast(MODEL, parts, asker, "none", 1)


def test_a_token_takes_head_asker_hops_and_layers_one_after_the_other() -> None:
    found = of(SPLIT, ASKER)
    assert (found.head_ms, found.asker_ms) == (1.0, 3.0)
    assert [(each.decode_ms, each.hop_ms) for each in found.shards] == [(10.0, 1.0), (12.0, 1.5)]
    assert found.token_ms == pytest.approx(4 + 10 + 12 + WAYS_MS)
    assert found.tokens_per_second == pytest.approx(1000 / found.token_ms)
    # What tokens of this very model took counts first.
    for asked_ms, head_ms in ((2.5, 1.0), (0.4, 0.4)):
        found = of(SPLIT, replace(ASKER, asked_ms=asked_ms))
        assert (found.head_ms, found.asker_ms) == (head_ms, asked_ms - head_ms)


def test_the_first_token_of_512_waits_for_the_slowest_hop_of_each_chunk() -> None:
    chunk_mb = 128 * 1024 * 2 / 1e6  # there, and back
    slow, quick = 3 * 512 / 4 + 2e3 * chunk_mb / 50, 5 * 64 / 4 + 2e3 * chunk_mb / 100
    assert of(SPLIT, ASKER).first_token_ms == pytest.approx(quick + 4 * slow + WAYS_MS + 4)


@pytest.mark.parametrize(
    ("parts", "asker", "streams", "ms"),
    [
        (SPLIT, ASKER, 1, 4 + 10 + 12 + WAYS_MS),
        # Two groups of 6: weights are read once in `a`, and rows computed each in `b`.
        (SPLIT, ASKER, 12, 6 * 4 + 10 + 6 * 3 + WAYS_MS),
        # Of 20: whoever takes longest has the groups one after the other.
        (SPLIT, ASKER, 40, 2 * 20 * 4),
        (SPLIT, None, 40, 2 * (20 * 3 + 0.6)),
        # Rows alone are never dearer than a step of each.
        (((bench("c", 1.0, 1024.0, 0.4, 100.0), LayerRange(0, 8)),), None, 3, 3 * 8 + 1.0),
    ],
)
def test_all_streams_together(
    parts: tuple[tuple[Bench, LayerRange], ...], asker: Machine | None, streams: int, ms: float
) -> None:
    found = forecast(MODEL, parts, asker, "none", streams)
    assert found.all_tokens_per_second == pytest.approx(1000 * streams / ms)


def test_the_bottleneck_is_what_takes_most_and_comes_with_a_remedy() -> None:
    ms = 4 + 10 + 12 + WAYS_MS
    more = "More free memory at a: a layer takes 2.00 ms there, 4.00 at b."
    assert of(SPLIT, ASKER).bottleneck == Bottleneck("computing", "b", 12.0, 12 / ms, more)
    waits = of(SPLIT, replace(ASKER, asker_ms=30.0)).bottleneck
    assert (waits.what, waits.node, waits.ms) == ("asker", "z", 30.0)
    reads = of(SPLIT, replace(ASKER, asked_ms=100.0)).bottleneck
    assert (reads.what, reads.ms) == ("asker", 99.0)
    lame = replace(ASKER, devices=(Device("cpu", 1, 1, (Speed("bf16", 0.5, 1.0),)),))
    assert (of(SPLIT, lame).bottleneck.what, of(SPLIT, lame).bottleneck.ms) == ("head", 40.0)


@pytest.mark.parametrize(
    ("quick_ms", "int8_gb_s", "help_"),
    [
        (3.3, 1.0, "A machine with faster memory."),
        (3.1, 1.0, "More free memory at a: a layer takes 3.10 ms there, 4.00 at b."),
        # 7 layers of 1.125 MB, and 0.2 ms for each beside that.
        (4.0, 1.125, "--quant int8: 8.4 instead of 28.0 ms there. A machine with faster memory."),
        (4.0, 0.32, "A machine with faster memory."),
    ],
)
def test_what_would_make_computing_quicker(quick_ms: float, int8_gb_s: float, help_: str) -> None:
    speed = Speed("int8", int8_gb_s if quick_ms == 4.0 else 0.1, 100.0, 0.2)
    parts = (
        (bench("a", quick_ms, 64.0, 0.4, 100.0), LayerRange(0, 1)),
        (bench("b", 4.0, 64.0, 0.4, 100.0, speed), LayerRange(1, 8)),
    )
    assert of(parts).bottleneck.help == help_


@pytest.mark.parametrize(
    ("rtt_ms", "hops", "help_"),
    [
        (1.1, 2, "A cable to a: wired ways take 0.3 ms."),
        (1.0, 2, "Fewer machines, with more memory each."),
        (1.0, 1, "Guessed tokens (draft_tokens): a step then says several."),
    ],
)
def test_what_would_make_ways_shorter(rtt_ms: float, hops: int, help_: str) -> None:
    near = bench("a", 0.01, 1.0, rtt_ms, 100.0)
    parts = ((near, LayerRange(0, 4)), (bench("b", 0.01, 1.0, 0.1, 100.0), LayerRange(4, 8)))
    found = of(parts if hops == 2 else ((near, LayerRange(0, 8)),))
    assert (found.bottleneck.what, found.bottleneck.node) == ("way", "a")
    assert found.bottleneck.help == help_


@pytest.mark.parametrize("ms", [1.0, 2.5, 3.9, 9.0])
def test_what_one_more_machine_would_cost_is_the_best_of_all_ways(ms: float) -> None:
    """However many layers it takes of each shard; a shard that loses all is passed by."""
    extra = bench("x", ms, 64.0, 1.4, 100.0)
    parts = ((A, LayerRange(0, 1)), (B, LayerRange(1, 4)), (A, LayerRange(4, 8)))
    shares = [*product(*(range(len(layers) + 1) for _, layers in parts))]

    def more_ms(share: tuple[int, ...]) -> float:
        saved = sum(
            count * bench.decode_ms[0] + bench.hop_ms * (count == len(layers))
            for count, (bench, layers) in zip(share, parts, strict=True)
        )
        return extra.hop_ms + ms * sum(share) - saved

    for most in range(1, LAYERS + 1):
        least = min(more_ms(share) for share in shares if 1 <= sum(share) <= most)
        assert with_one_more(parts, extra, most) == pytest.approx(least)
