"""Gaps of a replica are filled beside what is loaded, by what lies on disks and what is free."""

from __future__ import annotations

from dataclasses import replace

from mesh.capacity import Device, Speed
from mesh.models.cuts import Cuts
from mesh.routing.gaps import beside, fill
from mesh.routing.machines import Demand, HeldLayers, Machine, ModelShape
from mesh.types import LayerRange, NodeId
from tests.routing.shapes import model_of

GB = 1 << 30
MODEL = model_of("m", (200 << 20,) * 8, "bf16")
GAP = LayerRange(4, 8)
DEMAND = Demand(quant="none", context=16)


def machine(name: str, gb: float, gb_s: float = 20.0, **more: object) -> Machine:
    free = int(gb * GB)
    device = Device("cpu", free, free, (Speed("bf16", gb_s, 50.0, 0.3),))
    return replace(Machine(NodeId(name), name, (device,)), **more)


def filled(*machines: Machine) -> list[tuple[str, str, int]]:
    found = fill(MODEL, machines, GAP, DEMAND)
    assert found is not None
    return [(shard.node, str(shard.layers), shard.fetch_bytes) for shard in found]


def test_layers_are_numbered_as_in_the_model_and_those_on_disk_are_not_fetched() -> None:
    there = (HeldLayers(LayerRange(2, 5)),)
    assert filled(machine("a", 9, held=there)) == [("a", "4-7", 3 * (200 << 20))]
    split = fill(MODEL, [machine("a", 0.8), machine("b", 1.0)], GAP, DEMAND)
    assert split is not None
    assert split[0].layers.start == GAP.start
    assert split[0].layers.stop == split[1].layers.start
    assert split[1].layers.stop == GAP.stop


def test_what_is_loaded_stays_and_makes_no_room() -> None:
    loaded = (HeldLayers(LayerRange(2, 6), "cpu", 4 * GB),)
    assert fill(MODEL, [machine("a", 0.1, held=loaded)], GAP, DEMAND) is None
    assert filled(machine("a", 0.1, held=loaded), machine("b", 9, gb_s=1.0))[0][0] == "b"


def test_the_next_gap_has_what_the_first_left() -> None:
    machines = [machine("a", 1.5)]
    first = fill(MODEL, machines, GAP, DEMAND)
    assert first is not None
    assert fill(MODEL, beside(machines, first), LayerRange(0, 4), DEMAND) is None
    # On its disk as well, where those of the first need no room again.
    machines = [machine("a", 9, disk_bytes=6 * (200 << 20))]
    first = fill(MODEL, machines, GAP, DEMAND)
    assert first is not None
    left = beside(machines, first)
    assert fill(MODEL, left, LayerRange(0, 4), DEMAND) is None
    assert filled(*left) == [("a", "4-7", 0)]
    assert fill(MODEL, left, LayerRange(2, 8), DEMAND) is not None


def cut_before(layers: range) -> ModelShape:
    return replace(MODEL, cuts=Cuts(frozenset(range(8)) - {*layers}))


def test_layers_of_a_gap_that_see_keys_of_each_other_lie_on_one_machine() -> None:
    model, two = cut_before(range(6)), [machine("a", 1.4), machine("b", 1.4)]
    split = fill(model, two, LayerRange(2, 8), DEMAND)
    assert split is not None
    assert str(split[-1].layers) in {"3-7", "4-7", "5-7"}
    assert fill(cut_before(range(2)), two, LayerRange(1, 8), DEMAND) is None
    pairs = fill(cut_before(range(0, 8, 2)), two, LayerRange(0, 8), DEMAND)
    assert pairs is not None
    assert [each.layers.start % 2 for each in pairs] == [0, 0]
    assert fill(model, two, LayerRange(0, 5), DEMAND) is not None


def test_the_ends_are_counted_with_the_model_s_own_first_and_last_layer_only() -> None:
    """Where a thin asker leaves them to the shards."""
    model = model_of("m", (200 << 20,) * 8, "bf16", ends_bytes=4 * GB, head_bytes=2 * GB)
    thin = replace(DEMAND, thin=True)
    assert fill(model, [machine("a", 2)], LayerRange(2, 6), thin) is not None
    for end in (LayerRange(0, 4), LayerRange(4, 8)):
        assert fill(model, [machine("a", 2)], end, thin) is None
        whole = fill(model, [machine("a", 9)], end, thin)
        assert whole is not None
        assert whole[0].need.weights == 4 * (200 << 20) + 6 * GB
        with_both = [machine("a", 8, gb_s=2.0), machine("b", 0.9)]
        split = fill(model, with_both, end, thin)
        assert split is not None
        assert sum(shard.need.weights for shard in split) == 4 * (200 << 20) + 6 * GB
