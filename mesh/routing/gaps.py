"""Where the layers go that a machine took with it: the rest of the replica stays where it is.

A gap is planned as a model of its own, of these layers only, on what is free beside all that is
loaded. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mesh.capacity import Device
from mesh.routing.forecast import Placed
from mesh.routing.machines import Demand, HeldLayers, Machine, ModelShape
from mesh.routing.placement import lay_out
from mesh.types import LayerRange


def fill(
    model: ModelShape, machines: Sequence[Machine], gap: LayerRange, demand: Demand
) -> tuple[Placed, ...] | None:
    """The shards that take the layers of `gap`, in their order and in the model's own numbers; None
    where no machines of the demand have room for them. Its replicas and pins are not looked at."""
    beside = [replace(each, held=tuple(_on_disk(each.held, gap))) for each in machines]
    found = lay_out(model.part(gap), beside, replace(demand, replicas=1, pins=()))
    if found.refusal is not None:
        return None
    return tuple(
        replace(shard, layers=_moved(shard.layers, gap.start)) for shard in found.replicas[0].shards
    )


def beside(machines: Iterable[Machine], placed: Sequence[Placed]) -> list[Machine]:
    """The machines with what these shards leave free."""
    taken: dict[tuple[str, str], int] = {}
    for shard in placed:
        key = (shard.node_id, shard.device)
        taken[key] = taken.get(key, 0) + shard.need.total

    def left(machine: Machine, device: Device) -> Device:
        size = taken.get((machine.node_id, device.name), 0)
        return replace(device, free_bytes=max(0, device.free_bytes - size))

    return [
        replace(each, devices=tuple(left(each, device) for device in each.devices))
        for each in machines
    ]


def _on_disk(held: Iterable[HeldLayers], gap: LayerRange) -> Iterable[HeldLayers]:
    """What of the gap lies on a machine's disk, numbered from its first layer; what is loaded there
    stays, so that it makes no room."""
    for each in held:
        start, stop = max(each.layers.start, gap.start), min(each.layers.stop, gap.stop)
        if start < stop:
            yield HeldLayers(_moved(LayerRange(start, stop), -gap.start))


def _moved(layers: LayerRange, by: int) -> LayerRange:
    return LayerRange(layers.start + by, layers.stop + by)
