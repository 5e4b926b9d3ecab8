"""The cheapest route, against all routes there are, and when it is taken instead of the greedy."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import NoRoute
from mesh.models.cuts import Cuts
from mesh.routing.cheapest import cheapest_cover, cover
from mesh.routing.cover import Candidate, CoverRules, greedy_cover, home_layers, key_of
from mesh.routing.fitting import HOP_MS
from mesh.types import LayerRange, RouteHop
from tests.routing.test_cover import RULES, WHOLE, layers_of, nodes_of, shard


def timed(
    layers: str, node: str, layer_ms: float | None = 1.0, rtt_ms: float | None = 0.4, **more: object
) -> Candidate:
    one = shard(layers, node, **more)  # type: ignore[arg-type]
    return replace(one, layer_ms=layer_ms, rtt_ms=rtt_ms)


def test_a_slow_shard_is_left_out_though_its_queue_is_shortest() -> None:
    shards = [timed("0-15", "slow", 30.0), timed("0-15", "quick", 1.0, queue=1)]
    assert nodes_of(greedy_cover(shards, WHOLE, RULES)) == ["slow"]
    assert nodes_of(cover(shards, WHOLE, RULES)) == ["quick"]


def test_one_machine_is_preferred_to_a_split_where_it_is_faster() -> None:
    split = [timed("0-7", "a"), timed("8-15", "b"), timed("0-15", "c", 1.1, queue=0)]
    assert nodes_of(cover(split, WHOLE, RULES)) == ["c"]
    far = [timed("0-7", "a", 0.1), timed("8-15", "b", 0.1), timed("0-15", "c", 9.0)]
    assert nodes_of(cover(far, WHOLE, RULES)) == ["a", "b"]


def test_a_route_changes_shards_inside_a_range_where_that_pays() -> None:
    shards = [timed("0-15", "long", 5.0), timed("4-11", "quick", 0.5)]
    assert layers_of(cover(shards, WHOLE, RULES)) == ["0-3", "4-11", "12-15"]


def test_a_far_shard_costs_its_way() -> None:
    shards = [timed("0-15", "far", 0.5, 60.0), timed("0-15", "near", 2.0)]
    assert nodes_of(cover(shards, WHOLE, RULES)) == ["near"]


def test_what_waits_counts() -> None:
    shards = [timed("0-15", "busy", 1.0, queue=5), timed("0-15", "free", 3.0)]
    assert nodes_of(cover(shards, WHOLE, replace(RULES, policy="cheapest"))) == ["free"]


@pytest.mark.parametrize("unknown", [{"layer_ms": None}, {"rtt_ms": None}])
def test_the_greedy_cover_stands_while_something_was_not_measured(
    unknown: dict[str, None],
) -> None:
    shards = [timed("0-15", "slow", 30.0), timed("0-15", "quick", 1.0, queue=1)]
    shards[1] = replace(shards[1], **unknown)  # type: ignore[arg-type]
    assert cheapest_cover(shards, WHOLE, RULES) is None
    assert nodes_of(cover(shards, WHOLE, RULES)) == ["slow"]


def test_near_equals_take_turns() -> None:
    shards = [
        replace(timed("0-15", name, ms), lot=lot)
        for name, ms, lot in (("a", 1.0, 2.0), ("b", 1.1, 1.0))
    ]
    assert nodes_of(cover(shards, WHOLE, RULES)) == ["b"]
    assert nodes_of(cover(shards, WHOLE, replace(RULES, policy="cheapest"))) == ["a"]
    assert nodes_of(cover(shards, WHOLE, replace(RULES, policy="greedy"))) == ["b"]


def test_what_failed_comes_last_whatever_it_would_take() -> None:
    shards = [replace(timed("0-15", "failed", 0.1), penalty=1), timed("0-15", "slow", 9.0)]
    assert nodes_of(cover(shards, WHOLE, RULES)) == ["slow"]


def test_the_askers_own_shard_is_not_first_unless_it_may_or_must() -> None:
    shards = [timed("0-15", "own", 0.1, 0.0, is_self=True), timed("0-15", "other", 9.0)]
    assert nodes_of(cover(shards, WHOLE, RULES)) == ["other"]
    assert nodes_of(cover(shards, WHOLE, CoverRules(allow_self_as_first=True))) == ["own"]
    assert nodes_of(cover(shards[:1], WHOLE, RULES)) == ["own"]


def test_home_layers_stay_at_home() -> None:
    shards = [timed("0-15", "own", 9.0, 0.0, is_self=True), timed("0-15", "other", 0.1)]
    rules = CoverRules(home=home_layers(16, 2, 1), policy="cheapest")
    assert layers_of(cover(shards, WHOLE, rules)) == ["0-1", "2-14", "15-15"]
    with pytest.raises(NoRoute, match="this machine"):
        cover(shards[1:], WHOLE, rules)
    tied = home_layers(16, 2, 1, Cuts(frozenset({2, 3, 14, 15})))
    assert layers_of(cover(shards, WHOLE, replace(rules, home=tied))) == ["0-3", "4-12", "13-15"]


def test_formats_are_not_mixed_unless_that_is_allowed() -> None:
    shards = [timed("0-7", "a", 0.1, dtype="int8"), timed("8-15", "b", 0.1, dtype="int4")]
    with pytest.raises(NoRoute, match="different formats"):
        cover(shards, WHOLE, RULES)
    assert nodes_of(cover(shards, WHOLE, CoverRules(mix_formats=True))) == ["a", "b"]


def test_a_lost_hop_is_replaced_by_its_like() -> None:
    like = timed("0-15", "gone").descriptor
    shards = [timed("0-15", "other", 0.1, kernels="gpu"), timed("0-15", "same", 9.0)]
    assert nodes_of(cover(shards, WHOLE, RULES, like=like)) == ["same"]
    quantised = [timed("0-15", "int8", 0.1, dtype="int8"), timed("0-15", "same", 9.0)]
    assert nodes_of(cover(quantised, WHOLE, RULES, like=like)) == ["same"]


def test_excluded_shards_are_not_used() -> None:
    gone = timed("0-15", "gone", 0.1)
    shards = [gone, timed("0-15", "slow", 9.0)]
    exclude = {key_of(gone.descriptor)}
    assert nodes_of(cover(shards, WHOLE, RULES, exclude)) == ["slow"]


def test_a_route_that_only_the_search_finds_short_enough_is_taken() -> None:
    # By queues, the greedy cover takes the short ones first.
    shards = [
        timed("0-7", "a"),
        timed("4-11", "b"),
        timed("8-15", "c"),
        timed("0-15", "d", queue=1),
    ]
    rules = CoverRules(max_shards=1)
    with pytest.raises(NoRoute, match="the limit"):
        greedy_cover(shards, WHOLE, rules)
    assert nodes_of(cover(shards, WHOLE, rules)) == ["d"]


LAYERS = 5
RANGES = st.tuples(st.integers(0, LAYERS - 1), st.integers(0, LAYERS - 1)).map(sorted)
CANDIDATES = st.lists(
    st.tuples(
        RANGES,
        st.sampled_from((0.1, 1.0, 1.3, 6.0)),
        st.sampled_from((0.0, 0.4, 9.0)),
        st.integers(0, 2),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


def cost(hops: tuple[RouteHop, ...], by_node: dict[str, Candidate]) -> float:
    total = 0.0
    for hop in hops:
        each = by_node[hop.shard.node_name]
        total += (each.layer_ms or 0) * (1 + each.queue_depth) * len(hop.layers)
        total += HOP_MS + (each.rtt_ms or 0)
    return total


@settings(max_examples=120)
@given(CANDIDATES, st.sampled_from((0, 1)))
def test_no_route_is_cheaper(
    drawn: list[tuple[list[int], float, float, int, bool]], keep: int
) -> None:
    shards = [
        timed(f"{lo}-{hi}", f"n{i}", ms, rtt, queue=queue, is_self=own)
        for i, ((lo, hi), ms, rtt, queue, own) in enumerate(drawn)
    ]
    by_node = {each.descriptor.node_name: each for each in shards}
    rules = CoverRules(allow_self_as_first=True, home=home_layers(LAYERS, keep, 0))
    if keep == 0:
        rules = replace(rules, home=())
    span = LayerRange(0, LAYERS)
    found = cheapest_cover(shards, span, rules)

    best = float("inf")
    for chosen in product(shards, repeat=LAYERS):
        if any(layer not in c.descriptor.layers for layer, c in enumerate(chosen)):
            continue
        if any(rules.keeps(layer) and not c.is_self for layer, c in enumerate(chosen)):
            continue
        hops, start = [], 0
        for each, run in groupby(chosen):
            stop = start + len(list(run))
            hops.append(RouteHop(each.descriptor, LayerRange(start, stop)))
            start = stop
        best = min(best, cost(tuple(hops), by_node))
    if found is None:
        assert best == float("inf")
        return
    assert [hop.layers.start for hop in found] == [0, *(hop.layers.stop for hop in found[:-1])]
    assert found[-1].layers.stop == LAYERS
    assert all(hop.shard.layers.covers(hop.layers) for hop in found)
    assert cost(found, by_node) == pytest.approx(best)
