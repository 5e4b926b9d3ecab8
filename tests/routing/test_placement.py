"""Plans: never over memory, all layers in a row, as fast as the best of all ways, and why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.capacity import Device, Speed
from mesh.models.cuts import Cuts
from mesh.routing.fitting import Bench, benches
from mesh.routing.forecast import Forecast, Placed
from mesh.routing.machines import Demand, HeldLayers, Machine, ModelShape, Timed
from mesh.routing.placement import Layout, lay_out
from mesh.types import HALVED_FORMAT, LayerRange, NodeId
from tests.routing.shapes import model_of, with_layers

GB = 2**30
ASKER = NodeId("a")


def model(layers: int = 16, mb: int = 200, *, ends_mb: int = 100) -> ModelShape:
    ends = ends_mb << 20
    return model_of(
        "m", (mb << 20,) * layers, "bf16", ends_bytes=ends, head_bytes=ends,
        hidden_size=2048, kv_numbers=512,
    )  # fmt: skip


def cpu(gb: float, gb_s: float = 20.0) -> Device:
    speeds = [Speed(name, gb_s, 100.0, 0.05) for name in ("fp32", "bf16", "int8", "int4")]
    return Device("cpu", int(gb * GB), int(gb * GB) + GB, tuple(speeds))


def machine(name: str, gb: float, gb_s: float = 20.0, rtt_ms: float = 0.3) -> Machine:
    return Machine(NodeId(name), name, (cpu(gb, gb_s),), 0.0 if name == ASKER else rtt_ms)


def places(found: Layout, replica: int = 0) -> list[tuple[str, str]]:
    assert found.refusal is None, found.refusal
    return [(shard.node, str(shard.layers)) for shard in found.replicas[replica].shards]


def reason(found: Layout, name: str) -> str:
    return next(row.why for row in found.machines if row.node == name)


def test_one_machine_that_holds_all_is_preferred_to_a_split() -> None:
    found = lay_out(model(), [machine("a", 9), machine("b", 9)], Demand(asker=ASKER, quant="none"))
    assert places(found) == [("a", "0-15")]
    assert "faster without it" in reason(found, "b")


def test_what_one_cannot_hold_is_split_and_the_quick_one_gets_what_fits() -> None:
    machines = [machine("a", 2.5, 10), machine("b", 2.5, 40)]
    found = lay_out(model(), machines, Demand(asker=ASKER, quant="none"))
    most = {row.node: row.layers_that_fit for row in found.machines}
    shares = {shard.node: len(shard.layers) for shard in found.replicas[0].shards}
    assert shares == {"b": most["b"], "a": 16 - most["b"]}


def test_a_full_disk_takes_what_it_holds_and_no_more() -> None:
    full = replace(machine("b", 9, 40), disk_bytes=100 << 20)
    found = lay_out(model(), [machine("a", 9), full], Demand(asker=ASKER, quant="none"))
    assert places(found) == [("a", "0-15")]
    assert reason(found, "b") == ("no room on its disk: one layer is 200 MiB, 100 MiB are free")
    holds = replace(full, held=(HeldLayers(LayerRange(4, 16)),))
    found = lay_out(model(), [machine("a", 9), holds], Demand(asker=ASKER, quant="none"))
    assert places(found) == [("a", "0-3"), ("b", "4-15")]


def test_copies_that_share_a_machine_share_its_disk() -> None:
    def fetched(*machines: Machine) -> Counter[str]:
        found = lay_out(model(), machines, Demand(replicas=2, quant="none"))
        assert found.refusal is None
        sizes: Counter[str] = Counter()
        for shard in (shard for replica in found.replicas for shard in replica.shards):
            sizes[shard.node] += shard.fetch_bytes // (200 << 20)
        return sizes

    # What one of them fetches, the next one finds there.
    assert fetched(replace(machine("a", 9), disk_bytes=16 * (200 << 20))) == {"a": 16}
    small = [replace(machine(*each), disk_bytes=5 * (200 << 20)) for each in (("a", 1.5), ("b", 8))]
    assert fetched(*small, machine("c", 8, 10))["b"] <= 5


def test_disks_that_are_too_full_are_named() -> None:
    machines = [replace(machine(name, 9), disk_bytes=900 << 20) for name in "ab"]
    refusal = lay_out(model(), machines, Demand(asker=ASKER, quant="none")).refusal
    assert refusal is not None
    assert "the disks of the machines that may be used have room for 8 of 16" in refusal.message
    assert refusal.missing_bytes == 8 * (200 << 20)
    assert "hearthnet rm" in refusal.fix
    # Of a machine with memory for several copies, and of one that is given its layers.
    full = replace(machine("b", 30), disk_bytes=100 << 20)
    refusal = lay_out(model(), [full], Demand(replicas=2, quant="none")).refusal
    assert refusal is not None
    assert "the disks of the machines that may be used have room for 0 of 32" in refusal.message
    pins = ((NodeId("b"), LayerRange(0, 8)),)
    refusal = lay_out(model(), [machine("a", 9), full], Demand(pins=pins, quant="none")).refusal
    assert refusal is not None
    assert refusal.message == "b lacks 1.5 GiB on its disk for layers 0-7."
    assert (refusal.node, refusal.missing_bytes) == ("b", 1500 << 20)


def test_a_slow_machine_gets_no_layers() -> None:
    machines = [machine("a", 3), machine("b", 3), machine("slow", 8, gb_s=0.5)]
    found = lay_out(model(), machines, Demand(asker=ASKER, quant="none"))
    assert {name for name, _ in places(found)} == {"a", "b"}
    assert "faster without it" in reason(found, "slow")


def test_a_slow_machine_is_used_where_there_is_no_other() -> None:
    machines = [machine("a", 2.5), machine("slow", 8, gb_s=0.5)]
    assert "slow" in {name for name, _ in places(lay_out(model(), machines, Demand(quant="none")))}


def test_a_far_machine_loses_to_a_nearer_one() -> None:
    machines = [machine("a", 0.5), machine("wifi", 9, rtt_ms=30.0), machine("wire", 9)]
    assert places(lay_out(model(), machines, Demand(asker=ASKER, quant="none"))) == [
        ("wire", "0-15")
    ]


def test_several_devices_of_a_node_are_several_places() -> None:
    gpus = tuple(
        Device(f"cuda:{i}", int(2.2 * GB), 3 * GB, (Speed("bf16", 300.0, 9000.0),))
        for i in range(2)
    )
    found = lay_out(model(), [Machine(NodeId("g"), "g", gpus)], Demand(quant="none"))
    assert {shard.device for shard in found.replicas[0].shards} == {"cuda:0", "cuda:1"}
    # With one disk, whose room goes to whichever takes most.
    full = Machine(NodeId("g"), "g", gpus, disk_bytes=12 * (200 << 20))
    found = lay_out(model(), [full, machine("z", 9)], Demand(quant="none"))
    assert sorted(len(shard.layers) for shard in found.replicas[0].shards) == [3, 4, 9]
    assert [shard.fetch_bytes for shard in found.replicas[0].shards if shard.node == "z"] == [
        4 * (200 << 20)
    ]
    refused = lay_out(model(), [full], Demand(quant="none"))
    assert refused.machines[0].layers_that_fit == 12
    assert refused.refusal is not None
    assert "have room for 12 of 16 layers" in refused.refusal.message


def test_devices_share_a_disk_also_where_layers_stay_that_lie_there() -> None:
    drawn = (
        ("a", ((1536, 100), (3072, 400)), 3.0, 2, None),
        ("b", ((6144, 400), (819, 50), (3072, 100)), 0.2, 4, LayerRange(7, 9)),
        ("c", ((6144, 400), (6144, 100)), 3.0, 4, LayerRange(2, 6)),
    )
    machines = []
    for name, devices, rtt_ms, disk, held in drawn:
        cards = tuple(
            Device(f"cuda:{number}", mb << 20, 8 * GB, (Speed("bf16", gb_s, 9000.0),))
            for number, (mb, gb_s) in enumerate(devices)
        )
        there = () if held is None else (HeldLayers(held),)
        machines.append(
            Machine(NodeId(name), name, cards, rtt_ms, held=there, disk_bytes=disk * (200 << 20))
        )
    (replica,) = lay_out(model(), machines, Demand(quant="none")).replicas
    fetched: Counter[str] = Counter()
    for shard in replica.shards:
        fetched[shard.node] += shard.fetch_bytes
    assert all(fetched[each.name] <= disk_of(each) for each in machines)


def test_replicas_on_one_node_lie_on_a_device_each_whatever_fits_on_the_first() -> None:
    speeds = (Speed("bf16", 300.0, 9000.0),)
    gpus = tuple(Device(f"cuda:{i}", 40 * GB, 40 * GB, speeds) for i in range(3))
    found = lay_out(model(), [Machine(NodeId("g"), "g", gpus)], Demand(replicas=3, quant="none"))
    devices = [[shard.device for shard in replica.shards] for replica in found.replicas]
    assert sorted(devices) == [["cuda:0"], ["cuda:1"], ["cuda:2"]]


def test_auto_takes_int8_where_it_is_faster_and_int4_where_nothing_else_fits() -> None:
    assert lay_out(model(), [machine("a", 9)], Demand()).quant == "int8"
    gpu = Machine(NodeId("g"), "g", (Device("cuda:0", 8 * GB, 8 * GB, (Speed("bf16", 900, 9e4),)),))
    assert lay_out(model(), [machine("a", 9), gpu], Demand()).quant == "none"
    assert lay_out(model(), [machine("a", 1.8)], Demand()).quant == "int4"


def test_auto_takes_int4_for_a_model_that_is_stored_so() -> None:
    stored_so = replace(model(), is_int4=True)
    assert lay_out(stored_so, [machine("a", 9)], Demand()).quant == "int4"
    assert lay_out(stored_so, [machine("a", 9)], Demand(quant="int8")).quant == "int8"
    speeds = tuple(Speed(name, 900, 9e4) for name in ("bf16", "int4"))
    card = Machine(NodeId("g"), "g", (Device("cuda:0", 8 * GB, 8 * GB, speeds),))
    assert lay_out(stored_so, [machine("a", 9), card], Demand()).quant == "none"


def test_a_card_that_computes_4_bit_takes_them_with_caches_of_16() -> None:
    def card(*speeds: Speed) -> Machine:
        return Machine(NodeId("g"), "g", (Device("cuda:0", 2 * GB, 2 * GB, speeds),))

    plain, few = Speed("bf16", 900, 9e4), Speed("int4", 900, 2e4)
    assert lay_out(model(), [card(plain, few)], Demand()).quant == "int4"
    (shard,) = lay_out(model(), [card(plain, few)], Demand(quant="int4")).replicas[0].shards
    on_cpu = machine("a", 9)
    (other,) = lay_out(model(), [on_cpu], Demand(quant="int4")).replicas[0].shards
    assert shard.need.weights == other.need.weights
    assert 2 * shard.need.caches == other.need.caches
    assert lay_out(model(), [card(plain)], Demand(quant="int4")).refusal is not None


def test_bf16_counts_as_fp32_where_it_is_not_computed() -> None:
    old = Device("cpu", 9 * GB, 9 * GB, (Speed("fp32", 20.0, 100.0),))
    found = lay_out(model(), [Machine(ASKER, "a", (old,))], Demand(quant="none"))
    assert found.replicas[0].shards[0].format == "fp32"
    assert found.replicas[0].shards[0].need.weights == 2 * 16 * (200 << 20)


def test_weights_stay_in_16_bit_where_they_are_widened_on_the_way() -> None:
    fp32, halved = Speed("fp32", 20.0, 100.0, 0.5), Speed(HALVED_FORMAT, 10.0, 100.0, 0.1)
    device = Device("cpu", 9 * GB, 9 * GB, (fp32, halved))
    standard, other = replace(model(), is_standard=True), model()

    def planned(shape: ModelShape, *speeds: Speed, timed: tuple[Timed, ...] = ()) -> Placed:
        one = Machine(ASKER, "a", (replace(device, speeds=speeds),), timed=timed)
        (shard,) = lay_out(shape, [one], Demand(quant="none")).replicas[0].shards
        return shard

    kept = planned(standard, fp32, halved)
    assert (kept.format, kept.need.weights) == (HALVED_FORMAT, 16 * (200 << 20))
    assert kept.decode_ms == pytest.approx(16 * (0.1 + (200 << 20) / 10e6))
    # Families whose layers are not standard, fp32 asked for explicitly, and older nodes.
    for wide in (planned(other, fp32, halved), planned(standard, fp32)):
        assert (wide.format, wide.need.weights) == ("fp32", 2 * 16 * (200 << 20))
        assert wide.need.caches == kept.need.caches, "fp32 is computed either way"
    fast = planned(standard, fp32, Speed("bf16", 20.0, 100.0), halved)
    assert (fast.format, 2 * fast.need.caches) == ("bf16", kept.need.caches)
    # All in one format, as an owner may wish.
    assert planned(replace(standard, dtype="fp32"), Speed("bf16", 20.0, 100.0)).format == "bf16"
    took = planned(standard, fp32, halved, timed=(Timed("cpu", HALVED_FORMAT, 3.0),))
    assert took.decode_ms == pytest.approx(48.0)


def test_what_layers_took_counts_before_what_they_should_take() -> None:
    lame = replace(machine("a", 9), timed=(Timed("cpu", "bf16", decode_ms=500.0),))
    assert places(lay_out(model(), [lame, machine("b", 9)], Demand(quant="none"))) == [
        ("b", "0-15")
    ]


def test_longer_contexts_need_more() -> None:
    short, long = (
        lay_out(model(), [machine("a", 30)], Demand(context=context, streams=4))
        .replicas[0]
        .shards[0]
        for context in (1024, 8192)
    )
    assert long.need.caches == 8 * short.need.caches
    assert long.need.total > short.need.total
    assert short.need.head_room >= 0.15 * (short.need.weights + short.need.caches)


def test_pins_hold_and_the_rest_is_found_around_them() -> None:
    machines = [machine("a", 9), machine("b", 9), machine("c", 9, 5)]
    wish = Demand(pins=((NodeId("c"), LayerRange(4, 8)),), quant="none")
    found = places(lay_out(model(), machines, wish))
    assert ("c", "4-7") in found
    assert [layers for _, layers in found] == ["0-3", "4-7", "8-15"]


def test_pins_of_one_layer_range_are_replicas() -> None:
    machines = [machine("a", 9), machine("b", 9)]
    pins = tuple((NodeId(name), LayerRange(0, 16)) for name in "ab")
    assert lay_out(model(), machines, Demand(pins=pins)).refusal is not None
    found = lay_out(model(), machines, Demand(pins=pins, replicas=2))
    assert [places(found, 0), places(found, 1)] == [[("a", "0-15")], [("b", "0-15")]]


def test_replicas_lie_on_different_machines_while_there_are_any() -> None:
    machines = [machine("a", 3), machine("b", 3, 40), machine("c", 3, 40), machine("d", 3)]
    found = lay_out(model(), machines, Demand(replicas=2, quant="none"))
    first, second = ({name for name, _ in places(found, i)} for i in range(2))
    assert not first & second
    shared = lay_out(model(), [machine("a", 20)], Demand(replicas=2, quant="none"))
    assert [places(shared, 0), places(shared, 1)] == [[("a", "0-15")], [("a", "0-15")]]


def test_replicas_that_share_machines_lie_on_all_of_them() -> None:
    machines = [machine("a", 30, 40), machine("b", 30), machine("c", 30)]
    for replicas, counts in ((3, (1, 1, 1)), (4, (2, 1, 1)), (7, (3, 2, 2))):
        found = lay_out(model(), machines, Demand(replicas=replicas, quant="none"))
        used = Counter(name for i in range(replicas) for name, _ in places(found, i))
        assert tuple(sorted(used.values(), reverse=True)) == counts
    # A machine that is full already is no reason to have fewer.
    found = lay_out(model(), [machine("a", 30), machine("b", 5)], Demand(replicas=4, quant="none"))
    assert Counter(n for i in range(4) for n, _ in places(found, i)) == {"a": 3, "b": 1}


def test_layers_stay_where_they_are_when_that_costs_little() -> None:
    held = replace(machine("b", 9), held=(HeldLayers(LayerRange(0, 16)),))
    wish = Demand(quant="none")
    assert places(lay_out(model(), [machine("a", 9, 20.2), held], wish)) == [("b", "0-15")]
    assert places(lay_out(model(), [machine("a", 9, 30.0), held], wish)) == [("a", "0-15")]
    assert lay_out(model(), [held], wish).replicas[0].shards[0].fetch_bytes == 0


def test_what_is_loaded_makes_room_for_what_replaces_it() -> None:
    loaded = HeldLayers(LayerRange(0, 8), "cpu", 8 * (200 << 20))
    full = replace(machine("a", 2.5), held=(loaded,))
    shard = lay_out(model(), [full], Demand(quant="none")).replicas[0].shards[0]
    assert str(shard.layers) == "0-15"
    assert shard.gap
    for fits in (replace(full, devices=(cpu(9),)), replace(full, held=())):
        assert not lay_out(model(), [fits], Demand()).replicas[0].shards[0].gap


def test_who_asks_keeps_room_for_the_ends() -> None:
    big_ends = model(ends_mb=3000)
    found = lay_out(
        big_ends, [machine("a", 7), machine("b", 12)], Demand(asker=ASKER, quant="none")
    )
    assert places(found) == [("b", "0-15")]
    refused = lay_out(
        big_ends, [machine("a", 3), machine("b", 9)], Demand(asker=ASKER, quant="none")
    )
    assert refused.refusal is not None
    assert refused.refusal.node == "a"


def test_whoever_takes_layers_keeps_room_to_ask_as_well() -> None:
    wish = Demand(asker=NodeId("z"), quant="none")
    idle = [machine("a", 4), machine("z", 1)]
    assert places(lay_out(model(ends_mb=100), idle, wish)) == [("a", "0-15")]
    full = lay_out(model(ends_mb=400), idle, wish)
    assert full.refusal is not None
    asks_already = [replace(idle[0], has_ends=True), idle[1]]
    assert places(lay_out(model(ends_mb=400), asks_already, wish)) == [("a", "0-15")]


def test_the_ends_are_counted_where_a_thin_asker_leaves_them() -> None:
    thin = Demand(asker=NodeId("z"), quant="none", thin=True)
    machines = [machine("a", 3), machine("b", 3), machine("z", 0.1)]
    shards = lay_out(model(ends_mb=300), machines, thin).replicas[0].shards
    for quick in ("a", "b"):  # which is filled as far as it goes, at either end
        others = [machine(n, 3, 40 if n == quick else 20) for n in ("a", "b")]
        shards = lay_out(model(ends_mb=300), [*others, machines[2]], thin).replicas[0].shards
        assert all(shard.need.total <= shard.have for shard in shards)
    ends = 2 * (300 << 20)  # the head is held twice for a while
    assert [shard.need.weights - len(shard.layers) * (200 << 20) for shard in shards] == [ends] * 2
    alone = lay_out(model(ends_mb=300), [machine("a", 9)], replace(thin, asker=None))
    assert alone.replicas[0].shards[0].need.weights == 16 * (200 << 20) + ends
    # Who holds no ends asks from a machine that has no room for them.
    assert lay_out(model(ends_mb=300), machines, replace(thin, thin=False)).refusal is not None


def test_a_refusal_says_how_much_is_missing_and_what_would_fit() -> None:
    found = lay_out(model(mb=400), [machine("a", 3.4), machine("b", 1)], Demand(quant="none"))
    assert not found.replicas
    assert found.refusal is not None
    assert found.refusal.code == "not_enough_memory"
    assert found.refusal.missing_bytes > 2 * GB
    assert "--quant int4" in found.refusal.fix
    assert all(row.layers_that_fit < 16 for row in found.machines)


def test_all_copies_that_a_machine_has_room_for_are_counted_before_some_are_missing() -> None:
    two, three = (Demand(replicas=copies, quant="none") for copies in (2, 3))
    assert lay_out(model(), [machine("a", 9)], two).refusal is None
    refusal = lay_out(model(), [machine("a", 9)], three).refusal
    assert refusal is not None
    assert "have room for 37 of 48 layers of 3 copies" in refusal.message
    assert 11 * (200 << 20) < refusal.missing_bytes < 12 * (200 << 20)


def test_machines_that_have_measured_nothing_yet_are_not_said_to_lack_memory() -> None:
    unmeasured = [Machine(NodeId(name), name, (replace(cpu(9), speeds=()),), 0.0) for name in "ab"]
    found = lay_out(model(), unmeasured, Demand(asker=ASKER))
    assert found.refusal is not None
    assert "measured itself yet" in found.refusal.message
    assert found.refusal.fix.endswith("ask again then.")
    assert reason(found, "b") == "it has not measured itself yet"


def test_a_pin_that_does_not_fit_names_its_machine() -> None:
    pins = ((NodeId("b"), LayerRange(0, 16)),)
    found = lay_out(model(), [machine("a", 9), machine("b", 1)], Demand(pins=pins, quant="none"))
    assert found.refusal is not None
    assert (found.refusal.node, found.refusal.missing_bytes > GB) == ("b", True)


@pytest.mark.parametrize(
    "demand",
    [
        Demand(quant="int3"),
        Demand(replicas=0),
        Demand(context=0),
        Demand(only=frozenset({NodeId("nobody")})),
        Demand(pins=((ASKER, LayerRange(10, 20)),)),
        Demand(pins=((ASKER, LayerRange(0, 9)), (NodeId("b"), LayerRange(8, 16)))),
    ],
)
def test_wishes_that_make_no_sense_are_refused(demand: Demand) -> None:
    found = lay_out(model(), [machine("a", 9), machine("b", 9)], demand)
    assert found.refusal is not None
    assert found.refusal.code == "bad_request"
    assert len(found.machines) == 2


def test_who_may_not_take_layers_takes_none_and_says_why() -> None:
    machines = [
        machine("a", 9), replace(machine("b", 90, 90), refusal="it is paused"),
        machine("c", 90, 90), machine("d", 90, 90), Machine(NodeId("e"), "e", ()),
        machine("f", 0.1),
    ]  # fmt: skip
    only = frozenset(map(NodeId, "abcef"))
    found = lay_out(model(), machines, Demand(only=only, without=frozenset({NodeId("c")})))
    assert places(found) == [("a", "0-15")]
    assert reason(found, "b") == "it is paused"
    assert reason(found, "c") == "left out, as wished"
    assert reason(found, "d") == "not among the nodes that were named"
    assert "does not say" in reason(found, "e")
    assert "no memory" in reason(found, "f")


def test_the_bottleneck_is_named_with_what_helps() -> None:
    slow = lay_out(model(), [machine("a", 9, 5)], Demand(asker=ASKER, quant="none")).replicas[0]
    assert (slow.bottleneck.what, slow.bottleneck.node) == ("computing", "a")
    assert "--quant int8" in slow.bottleneck.help
    far = lay_out(model(), [machine("b", 9, 900, 40.0)], Demand(quant="none")).replicas[0]
    assert far.bottleneck.what == "way"
    assert "cable" in far.bottleneck.help


def test_streams_together_are_faster_than_one_and_never_faster_than_the_slowest_hop() -> None:
    machines = [machine("a", 2.5), machine("b", 2.5)]
    one, many = (
        lay_out(model(), machines, Demand(streams=streams, context=512, quant="none")).replicas[0]
        for streams in (1, 8)
    )
    assert one.all_tokens_per_second == pytest.approx(one.tokens_per_second)
    assert many.all_tokens_per_second > 1.5 * many.tokens_per_second


# Against all ways there are.

Drawn = tuple[float, float, float, int, int | None]
"""Of a machine: GiB, GB/s, ms, how many layers it holds, MiB of its disk."""

HOUSES = st.lists(
    st.tuples(
        st.sampled_from((0.0, 1.0, 1.5, 2.2, 4.0)),
        st.sampled_from((1.0, 9.0, 10.0, 40.0)),
        st.sampled_from((0.0, 0.3, 5.0)),
        st.integers(0, 3),
        st.sampled_from((None, None, 0, 220, 400)),
    ),
    min_size=1,
    max_size=4,
)
LAYERS = st.lists(st.sampled_from((100, 100, 100, 250)), min_size=1, max_size=7)


def house(drawn: Sequence[Drawn], layers: int) -> list[Machine]:
    machines = []
    for index, (gb, gb_s, rtt_ms, has, disk_mb) in enumerate(drawn):
        held = (HeldLayers(LayerRange(0, min(has, layers))),) if has else ()
        disk = None if disk_mb is None else disk_mb << 20
        node = f"n{index}"
        machines.append(
            Machine(NodeId(node), node, (cpu(gb, gb_s),), rtt_ms, held=held, disk_bytes=disk)
        )
    return machines


def all_ways(
    found: Sequence[Bench], total: int, pins: dict[str, LayerRange]
) -> Iterator[list[tuple[Bench, LayerRange]]]:
    """Every contiguous cover that fits and has what is pinned."""
    for count in range(1, min(total, len(found)) + 1):
        for cuts in combinations(range(1, total), count - 1):
            spans = [LayerRange(a, b) for a, b in zip((0, *cuts), (*cuts, total), strict=True)]
            for chosen in permutations(found, count):
                parts = list(zip(chosen, spans, strict=True))
                fits = all(b.need(span).total <= b.have_bytes for b, span in parts)
                fits = fits and all(b.fetched(span) <= disk_of(b.machine) for b, span in parts)
                there = {b.machine.node_id: span for b, span in parts}
                if fits and all(there.get(NodeId(n)) == span for n, span in pins.items()):
                    yield parts


def disk_of(one: Machine) -> float:
    return math.inf if one.disk_bytes is None else one.disk_bytes


def layers_ms(replica: Forecast) -> float:
    return replica.token_ms - replica.head_ms


@settings(max_examples=150)
@given(HOUSES, LAYERS, st.integers(0, 3), st.sets(st.integers(1, 5)), st.integers(0, 2**32))
def test_a_plan_is_as_good_as_any(
    drawn: list[Drawn], sizes: list[int], pinned: int, tied: set[int], seed: int
) -> None:
    shape = with_layers(model(), [mb << 20 for mb in sizes])
    shape = replace(shape, cuts=Cuts(frozenset(each for each in tied if each < len(sizes))))
    machines = house(drawn, len(sizes))
    pins: dict[str, LayerRange] = {}
    if pinned == 1:
        start = seed % len(sizes)
        pins[machines[seed % len(machines)].node_id] = LayerRange(start, len(sizes))
    wish = Demand(
        asker=machines[0].node_id,
        quant="none",
        pins=tuple((NodeId(node), span) for node, span in pins.items()),
    )
    found = lay_out(shape, machines, wish)
    shuffled = list(machines)
    Random(seed).shuffle(shuffled)
    assert lay_out(shape, shuffled, wish) == found

    possible = [bench for each in machines for bench in benches(shape, each, wish, "none")]
    ways = [
        sum(bench.cost(span) for bench, span in way)
        for way in all_ways(possible, len(sizes), pins)
        if all(shape.cuts.allow(span) for _, span in way)
    ]
    ends_fit = benches(shape, machines[0], wish, "none")[0].have_bytes >= 0
    if found.refusal is not None:
        assert not ways or not ends_fit
        return
    (replica,) = found.replicas
    assert [s.layers.start for s in replica.shards] == [
        0,
        *(s.layers.stop for s in replica.shards[:-1]),
    ]
    assert replica.shards[-1].layers.stop == len(sizes)
    assert all(shard.need.total <= shard.have for shard in replica.shards)
    assert all(shape.cuts.allow(shard.layers) for shard in replica.shards)
    assert all((s.layers == pins[s.node_id]) for s in replica.shards if s.node_id in pins)
    assert pins.keys() <= {shard.node_id for shard in replica.shards}
    assert layers_ms(replica) <= 1.05 * min(ways)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from((0.5, 1.0, 2.0, 4.0)),
            st.sampled_from((1.0, 9.0, 10.0, 40.0)),
            st.sampled_from((0.3, 5.0)),
            st.integers(0, 3),
            st.sampled_from((None, None, 0, 500)),
        ),
        min_size=6,
        max_size=12,
    ),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_many_machines_are_never_filled_beyond_their_memory(
    drawn: list[Drawn], replicas: int, most: int
) -> None:
    machines = house(drawn, 10)
    found = lay_out(
        model(10, 300), machines, Demand(replicas=replicas, quant="none", max_shards=most)
    )
    taken: dict[str, int] = {}
    fetched: Counter[str] = Counter()
    disks = {each.node_id: disk_of(each) for each in machines}
    for replica in found.replicas:
        assert len(replica.shards) <= most
        assert sum(len(shard.layers) for shard in replica.shards) == 10
        for shard in replica.shards:
            taken[shard.node_id] = taken.get(shard.node_id, 0) + shard.need.total
            fetched[shard.node_id] += shard.fetch_bytes
    assert all(size <= disks[node] for node, size in fetched.items())
    assert all(taken.get(m.node_id, 0) <= m.devices[0].free_bytes for m in machines)
    assert bool(found.replicas) == (found.refusal is None)
