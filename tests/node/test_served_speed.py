"""What is learnt of answers that have ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh.node.served_speed import AskedTimes
from mesh.types import Done, HopTiming, LayerRange, NodeId, RouteHop, ShardId
from tests.discovery.network import advertised

NEAR, FAR = NodeId("near"), NodeId("far")


def answer(tokens_per_second: float, near_ms: float = 3.0, far_ms: float = 5.0) -> Done:
    """Of two hops, each of which computes for 2 ms."""
    route = [RouteHop(advertised(node, "0-1").descriptor, LayerRange(0, 2)) for node in (NEAR, FAR)]
    hops = [
        HopTiming(ShardId("m:0-1"), node, "0-1", 32, ms, ms, 2.0, mb_s)
        for node, ms, mb_s in ((NEAR, near_ms, 0.0), (FAR, far_ms, 12.0))
    ]
    return Done(
        "length", 4, 0, 32, tuple(range(32)), tuple(route), 0, False, 10.0, tokens_per_second,
        tuple(hops),
    )  # fmt: skip


def test_a_token_s_time_is_the_asker_s_but_for_its_hops() -> None:
    times = AskedTimes()
    model = answer(1.0).route[0].shard.model_id
    times.take(answer(100.0))
    assert times.of(model) is None, "one answer may have been an odd one"
    times.take(answer(100.0, near_ms=4.0))
    assert times.of(model) == pytest.approx((2.0 + 1.0) / 2)
    assert times.way_ms(NEAR) == pytest.approx(1.5)
    assert times.way_ms(FAR) == pytest.approx(3.0)
    assert times.way_ms(NodeId("nobody")) is None
    assert times.mb_s(FAR) == 12.0
    assert times.mb_s(NEAR) is None, "no step was long enough to tell"


@pytest.mark.parametrize(
    "odd",
    [{"drafted_tokens": 3}, {"failovers": 1}, {"fallback": True}, {"completion_tokens": 2},
     {"tokens_per_second": 0.0}, {"route": ()}],
)  # fmt: skip
def test_nothing_is_learnt_of_answers_that_came_otherwise(odd: dict[str, object]) -> None:
    times = AskedTimes()
    for _ in range(3):
        times.take(replace(answer(100.0), **odd))  # type: ignore[arg-type]
    assert times.of(answer(1.0).route[0].shard.model_id) is None
    assert times.way_ms(NEAR) is None


def test_what_is_remembered_is_bounded() -> None:
    times = AskedTimes()
    for number in range(200):
        for _ in range(2):
            once = replace(answer(100.0), route=(_hop(f"n{number}"),), hops=answer(1.0).hops[:1])
            times.take(once)
    known = [n for n in range(200) if times.way_ms(NodeId(f"n{n}")) is not None]
    assert known == list(range(200 - 64, 200))


def _hop(node: str) -> RouteHop:
    return RouteHop(advertised(NodeId(node), "0-1").descriptor, LayerRange(0, 2))
