"""The greedy cover, against the mesh specification's rule and its own example."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import NoRoute, WeightsMismatch
from mesh.routing.cover import (
    FAR_HOP_WEIGHT,
    Candidate,
    CoverRules,
    greedy_cover,
    home_layers,
    key_of,
    missing_layers,
    positions_held,
)
from mesh.routing.router import ShardRouter
from mesh.types import (
    Endpoint,
    LayerRange,
    ModelId,
    NodeId,
    Pipeline,
    RouteHop,
    ShardDescriptor,
    shard_id,
)

MODEL = ModelId("m")
RULES = CoverRules()
WHOLE = LayerRange(0, 16)


def shard(
    layers: str,
    node: str = "",
    *,
    queue: int = 0,
    weights: str = "a" * 64,
    is_self: bool = False,
    hop_weight: float = 1.0,
    dtype: str = "fp32",
    kernels: str = "cpu",
) -> Candidate:
    span = LayerRange.parse(layers)
    name = node or f"node-{layers}"
    descriptor = ShardDescriptor(
        shard_id(MODEL, span), MODEL, weights, span, 16, 100, 4, NodeId(name), name,
        Endpoint("wss://127.0.0.1:1"), dtype, f"{kernels}/{dtype}", datetime.now(UTC),
    )  # fmt: skip
    return Candidate(descriptor, queue, hop_weight, is_self)


def layers_of(hops: tuple[object, ...]) -> list[str]:
    return [str(hop.layers) for hop in hops]  # type: ignore[attr-defined]


def nodes_of(hops: tuple[object, ...]) -> list[str]:
    return [hop.shard.node_name for hop in hops]  # type: ignore[attr-defined]


def test_the_specifications_example_ignores_the_overlapping_shard() -> None:
    shards = [shard("0-7"), shard("4-11"), shard("8-15")]
    assert layers_of(greedy_cover(shards, LayerRange(0, 16), RULES)) == ["0-7", "8-15"]


def test_a_shorter_queue_beats_a_longer_reach() -> None:
    shards = [shard("0-7"), shard("4-11", queue=0), shard("8-15", queue=3), shard("12-15")]
    assert layers_of(greedy_cover(shards, LayerRange(0, 16), RULES)) == ["0-7", "8-11", "12-15"]


def test_the_lan_is_preferred_to_what_lies_beyond() -> None:
    shards = [shard("0-15", "far", hop_weight=5.0), shard("0-15", "near")]
    assert nodes_of(greedy_cover(shards, LayerRange(0, 16), RULES)) == ["near"]


def test_what_is_far_serves_only_when_nobody_near_can() -> None:
    far = shard("0-15", "far", hop_weight=2.0)
    near = shard("0-15", "near", queue=7, hop_weight=1.5)
    assert nodes_of(greedy_cover([far, near], LayerRange(0, 16), RULES)) == ["near"]
    failed = replace(near, penalty=1)
    assert nodes_of(greedy_cover([far, failed], LayerRange(0, 16), RULES)) == ["far"]


def test_of_near_ones_the_queue_decides_then_the_way_then_the_reach_then_the_lot() -> None:
    shards = [
        shard("0-15", "queued", queue=1, hop_weight=0.5),
        shard("0-15", "slower", hop_weight=1.5),
        shard("0-14", "shorter"),
        replace(shard("0-15", "a-later"), lot=2.0),
        replace(shard("0-15", "next"), lot=1.0),
    ]
    left, order = list(shards), []
    while left:
        (hop,) = greedy_cover(left, LayerRange(0, 12), RULES)
        order.append(hop.shard.node_name)
        left = [each for each in left if each.descriptor.node_name != order[-1]]
    assert order == ["next", "a-later", "shorter", "slower", "queued"]


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.5, 1.0, 1.5, 2.0, 4.0]))))
def test_no_near_shard_with_a_shorter_queue_is_passed_over(ways: list[tuple[int, float]]) -> None:
    shards = [
        shard("0-15", f"n{n}", queue=queue, hop_weight=weight)
        for n, (queue, weight) in enumerate(ways)
    ]
    if not shards:
        return
    (hop,) = greedy_cover(shards, LayerRange(0, 16), RULES)
    taken = next(each for each in shards if each.descriptor is hop.shard)
    near = [each for each in shards if each.hop_weight < FAR_HOP_WEIGHT]
    assert taken.queue_depth == min(each.queue_depth for each in near or shards)
    assert taken in (near or shards)


def test_the_asker_is_not_its_own_first_hop_unless_allowed_or_alone() -> None:
    own, other = shard("0-15", "a-self", is_self=True), shard("0-15", "other", queue=2)
    span = LayerRange(0, 16)
    assert nodes_of(greedy_cover([own, other], span, RULES)) == ["other"]
    allowed = CoverRules(allow_self_as_first=True)
    assert nodes_of(greedy_cover([own, other], span, allowed)) == ["a-self"]
    assert nodes_of(greedy_cover([own], span, RULES)) == ["a-self"]


def test_the_asker_may_be_a_later_hop() -> None:
    shards = [shard("0-7"), shard("8-15", "a-self", is_self=True), shard("8-15", "z-other")]
    assert nodes_of(greedy_cover(shards, LayerRange(0, 16), RULES)) == ["node-0-7", "a-self"]


def test_a_shard_at_its_limit_is_passed_over() -> None:
    shards = [replace(shard("0-15", "full"), penalty=1), shard("0-15", "free", queue=9)]
    assert nodes_of(greedy_cover(shards, LayerRange(0, 16), RULES)) == ["free"]


def test_missing_layers_are_named() -> None:
    with pytest.raises(NoRoute, match=r"layers 4-15") as raised:
        greedy_cover([shard("0-3")], LayerRange(0, 16), RULES)
    assert raised.value.code == "shard_unavailable"


def test_an_excluded_shard_is_named_as_failed() -> None:
    bad = shard("0-15", "bad")
    with pytest.raises(NoRoute, match="Tried in vain: bad"):
        greedy_cover([bad], LayerRange(0, 16), RULES, {key_of(bad.descriptor)})


def test_a_cover_of_too_many_shards_is_refused() -> None:
    shards = [shard(f"{n}-{n}") for n in range(16)]
    with pytest.raises(NoRoute, match="takes 16 shards; the limit is 15"):
        greedy_cover(shards, LayerRange(0, 16), CoverRules(max_shards=15))


class Known:
    def __init__(self, *shards: Candidate) -> None:
        self._shards = shards

    def candidates(self, model_id: ModelId) -> list[Candidate]:
        return [s for s in self._shards if s.descriptor.model_id == model_id]


def pick(router: ShardRouter, weights: str = "a" * 64) -> tuple[RouteHop, ...]:
    return router.pick(MODEL, weights, 16).hops


def test_other_weights_under_the_same_name_are_a_mismatch_that_names_the_node() -> None:
    router = ShardRouter(Known(shard("0-7"), shard("8-15", "odd", weights="b" * 64)), RULES)
    with pytest.raises(WeightsMismatch, match=r"odd \(8-15, bbbbbbbbbbbb\)") as raised:
        pick(router)
    assert raised.value.code == "weights_mismatch"


def test_other_weights_are_no_mismatch_where_they_would_not_help_or_are_not_missed() -> None:
    odd = shard("8-11", "odd", weights="b" * 64)
    with pytest.raises(NoRoute, match="no node serves layers 8-15"):
        pick(ShardRouter(Known(shard("0-7"), odd), RULES))
    lost, odd = shard("0-15", "lost"), shard("0-15", "odd", weights="b" * 64)
    with pytest.raises(NoRoute, match="Tried in vain: lost"):
        ShardRouter(Known(lost, odd), RULES).pick(
            MODEL, "a" * 64, 16, exclude={key_of(lost.descriptor)}
        )


def test_other_weights_do_not_disturb_a_cover_that_exists() -> None:
    router = ShardRouter(Known(shard("0-15"), shard("8-15", "odd", weights="b" * 64)), RULES)
    assert layers_of(pick(router)) == ["0-15"]


def test_shards_are_as_free_as_those_that_would_be_picked_else() -> None:
    first, second, spare = shard("0-7"), shard("8-15", "b"), shard("8-15", "c")

    def are_as_free(*now: Candidate) -> bool:
        hops = pick(ShardRouter(Known(first, second), RULES))
        others = pick(ShardRouter(Known(first, spare), RULES))
        return ShardRouter(Known(*now), RULES).are_as_free(hops, others)

    assert are_as_free(first, second, spare)
    assert are_as_free(replace(first, penalty=2, queue_depth=3), second, spare), "there is no other"
    assert not are_as_free(first, replace(second, queue_depth=1), spare)
    assert are_as_free(first, replace(second, queue_depth=1), replace(spare, queue_depth=1))
    assert not are_as_free(first, replace(second, penalty=1), replace(spare, queue_depth=5))
    assert not are_as_free(first, spare), "it is gone"


def test_repick_excludes_the_lost_shard() -> None:
    first, second, spare = shard("0-7"), shard("8-15", "b"), shard("8-15", "c", queue=5)
    router = ShardRouter(Known(first, second, spare), RULES)
    pipeline = router.pick(MODEL, "a" * 64, 16)
    assert nodes_of(router.repick(pipeline, 1, {key_of(second.descriptor)})) == ["c"]
    both = {key_of(second.descriptor), key_of(spare.descriptor)}
    with pytest.raises(NoRoute, match="Tried in vain: b, c"):
        router.repick(pipeline, 1, both)


def test_a_lost_hop_may_be_replaced_by_two() -> None:
    shards = [shard("0-7"), shard("8-15", "b"), shard("8-11", "c"), shard("10-15", "d")]
    router = ShardRouter(Known(*shards), RULES)
    pipeline = router.pick(MODEL, "a" * 64, 16)
    hops = router.repick(pipeline, 1, {key_of(shards[1].descriptor)})
    assert layers_of(hops) == ["8-11", "12-15"]


def test_a_lost_hop_is_replaced_by_one_that_computes_as_it_did_if_it_is_in_good_standing() -> None:
    first, lost = shard("0-7"), shard("8-15", "lost", kernels="gpu")
    spares = [
        shard("8-15", "other-format", dtype="bf16", kernels="gpu"),
        shard("8-15", "other-kernels", queue=2),
        shard("8-15", "same", queue=4, kernels="gpu"),
        replace(shard("8-15", "failed", kernels="gpu"), penalty=1),
    ]
    router = ShardRouter(Known(first, lost, *spares), RULES)
    pipeline = Pipeline(MODEL, "a" * 64, 16, pick(ShardRouter(Known(first, lost), RULES)))
    exclude, order = {key_of(lost.descriptor)}, []
    for _ in spares:
        (hop,) = router.repick(pipeline, 1, exclude)
        exclude.add(key_of(hop.shard))
        order.append(hop.shard.node_name)
    assert order == ["same", "other-kernels", "other-format", "failed"]
    assert nodes_of(pick(router)) == ["node-0-7", "lost"], "the first pick takes the shortest queue"


@st.composite
def topologies(draw: st.DrawFn) -> tuple[int, list[Candidate]]:
    total = draw(st.integers(1, 24))
    shards = []
    for number in range(draw(st.integers(0, 10))):
        start = draw(st.integers(0, total - 1))
        stop = draw(st.integers(start + 1, total))
        shards.append(
            shard(
                str(LayerRange(start, stop)),
                f"n{number}",
                queue=draw(st.integers(0, 3)),
                is_self=draw(st.booleans()),
            )
        )
    return total, shards


@given(topologies())
def test_a_cover_is_complete_and_disjoint_or_the_missing_layers_are_named(
    topology: tuple[int, list[Candidate]],
) -> None:
    total, shards = topology
    span = LayerRange(0, total)
    rules = CoverRules(max_shards=24)
    missing = missing_layers(shards, span)
    if missing:
        with pytest.raises(NoRoute):
            greedy_cover(shards, span, rules)
        return
    hops = greedy_cover(shards, span, rules)
    assert [layer for hop in hops for layer in range(hop.layers.start, hop.layers.stop)] == list(
        range(total)
    )
    for hop in hops:
        assert hop.shard.layers.covers(hop.layers)


def at_home(keep_first: int = 0, keep_last: int = 0) -> CoverRules:
    return CoverRules(home=home_layers(16, keep_first, keep_last))


def test_layers_that_are_kept_run_at_home() -> None:
    shards = [
        shard("0-15", "far"), shard("0-1", "home", queue=9, is_self=True),
        shard("14-15", "home", queue=9, is_self=True),
    ]  # fmt: skip
    hops = greedy_cover(shards, LayerRange(0, 16), at_home(2, 2))
    assert list(zip(nodes_of(hops), layers_of(hops), strict=True)) == [
        ("home", "0-1"), ("far", "2-13"), ("home", "14-15"),
    ]  # fmt: skip
    hops = greedy_cover(shards, LayerRange(0, 16), at_home(keep_first=1))
    assert layers_of(hops) == ["0-0", "1-15"]


def test_layers_that_are_kept_go_nowhere_else_whatever_a_host_says_of_itself() -> None:
    liar = shard("0-15", "far")
    liar = replace(liar, descriptor=replace(liar.descriptor, total_layers=10_000))
    home = shard("0-7", "home", is_self=True)
    with pytest.raises(NoRoute, match=r"layers 15-15 have to run on this machine"):
        greedy_cover([liar, home], LayerRange(0, 16), at_home(1, 1))


def test_a_lost_hop_at_home_is_not_replaced_elsewhere() -> None:
    shards = [shard("0-15", "far"), shard("0-1", "home", is_self=True)]
    with pytest.raises(NoRoute, match="keep_first"):
        greedy_cover(shards, LayerRange(0, 2), at_home(2), exclude={key_of(shards[1].descriptor)})


def test_one_own_shard_over_kept_and_other_layers_is_one_hop() -> None:
    hops = greedy_cover([shard("0-15", "home", is_self=True)], LayerRange(0, 16), at_home(3, 2))
    assert layers_of(hops) == ["0-15"]


@given(st.integers(1, 40), st.integers(0, 50), st.integers(0, 50))
def test_home_layers_are_the_ends_and_nothing_else(total: int, first: int, last: int) -> None:
    rules = CoverRules(home=home_layers(total, first, last))
    for layer in range(total):
        assert rules.keeps(layer) == (layer < first or layer >= total - last)


def test_one_route_has_one_format() -> None:
    shards = [
        shard("0-7", "a", dtype="int8"), shard("0-7", "b"), shard("8-15", "c"),
        shard("8-15", "d", dtype="int8", queue=3),
    ]  # fmt: skip
    for best, other in (("a", ["a", "d"]), ("b", ["b", "c"])):
        preferred = [replace(each, lot=each.descriptor.node_name != best) for each in shards]
        found = greedy_cover(preferred, WHOLE, RULES)
        assert [hop.shard.node_name for hop in found] == other


def test_a_format_that_covers_only_a_part_gives_way_to_one_that_covers_all() -> None:
    shards = [shard("0-7", "a", dtype="int8"), shard("0-15", "b", queue=5), shard("8-15", "c")]
    assert [hop.shard.node_name for hop in greedy_cover(shards, WHOLE, RULES)] == ["b"]


def test_mixed_formats_are_refused_by_name_unless_they_are_allowed() -> None:
    shards = [shard("0-7", "a", dtype="int8"), shard("8-15", "b", dtype="int4")]
    with pytest.raises(NoRoute, match="0-7 in int8 at a, 8-15 in int4 at b") as refused:
        greedy_cover(shards, WHOLE, RULES)
    assert "mix_formats" in refused.value.fix
    mixed = greedy_cover(shards, WHOLE, CoverRules(mix_formats=True))
    assert layers_of(mixed) == ["0-7", "8-15"]


def test_sixteen_and_thirty_two_bits_are_one_format() -> None:
    shards = [shard("0-7", "a", dtype="bf16"), shard("8-15", "b", dtype="fp32")]
    assert layers_of(greedy_cover(shards, WHOLE, RULES)) == ["0-7", "8-15"]


def test_a_lost_shard_is_replaced_by_one_of_its_format_only() -> None:
    lost = shard("8-15", "lost", dtype="int8")
    shards = [shard("8-15", "near"), shard("8-15", "far", dtype="int8", queue=9)]
    span = LayerRange(8, 16)
    (hop,) = greedy_cover(shards, span, RULES, like=lost.descriptor)
    assert hop.shard.node_name == "far"
    with pytest.raises(NoRoute, match="in other formats than int8 only: 8-15 in fp32 at near"):
        greedy_cover(shards[:1], span, RULES, like=lost.descriptor)


def test_who_has_no_ends_goes_through_the_first_and_the_last_layer_where_they_are_run() -> None:
    with_first = shard("0-5", "a", queue=5)
    with_first = replace(with_first, descriptor=replace(with_first.descriptor, embeds=True))
    with_last = shard("11-15", "c", queue=5)
    with_last = replace(with_last, descriptor=replace(with_last.descriptor, head=True))
    plain = [shard("0-5", "x"), shard("6-10", "b"), shard("11-15", "y")]
    rules = CoverRules(remote_ends=True)

    def route(*shards: Candidate) -> Pipeline:
        return ShardRouter(Known(*shards), rules).pick(MODEL, "a" * 64, 16)

    found = route(*plain, with_first, with_last)
    assert nodes_of(found.hops) == ["a", "b", "c"]
    for there, lacking in (
        ([with_last], "the embedding"), ([with_first], "the head"),
        ([], "the embedding or the head"),
    ):  # fmt: skip
        with pytest.raises(NoRoute, match=f"0-15 runs {lacking} for it"):
            route(*plain, *there)
    with pytest.raises(NoRoute, match=r"no node serves layers 6-10"):
        route(with_first, with_last)
    router = ShardRouter(Known(*plain, with_first), rules)
    with pytest.raises(NoRoute, match="11-15 runs the head for it"):
        router.repick(found, 2, {key_of(with_last.descriptor)})


def test_a_prompt_may_be_as_long_as_the_caches_of_those_who_have_most_for_each_layer() -> None:
    def held(*said: tuple[str, int]) -> int | None:
        shards = [replace(shard(layers).descriptor, kv_tokens=most) for layers, most in said]
        return positions_held(shards, 16)

    assert held(("0-7", 100), ("0-7", 300), ("8-15", 200)) == 200
    assert held(("0-7", 100), ("4-11", 300), ("8-15", 200)) == 100
    assert held(("0-7", 100), ("0-15", 0), ("8-15", 200)) is None, "one has nobody knows how many"
    assert held(("0-7", 100), ("8-15", 0)) == held(("0-7", 100)) == 100
    assert held() is None
