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
from mesh.routing.placement import Layout, lay_out
from mesh.types import LayerRange


def fill(
    model: ModelShape, machines: Sequence[Machine], gap: LayerRange, demand: Demand
) -> tuple[Placed, ...] | None:
    """The shards that take the layers of `gap`, in their order and in the model's own numbers; None
    where no machines of the demand have room for them. Its replicas and pins are not looked at."""
    found = layout_of(model, machines, gap, demand)
    if found.refusal is not None:
        return None
    return tuple(
        replace(shard, layers=_moved(shard.layers, gap.start)) for shard in found.replicas[0].shards
    )


def layout_of(
    model: ModelShape, machines: Sequence[Machine], gap: LayerRange, demand: Demand
) -> Layout:
    """As `fill`, with the layers numbered from the first of the gap, or with what is lacking."""
    there = [replace(each, held=tuple(_on_disk(each.held, gap))) for each in machines]
    return lay_out(model.part(gap), there, replace(demand, replicas=1, pins=()))


def beside(machines: Iterable[Machine], placed: Sequence[Placed]) -> list[Machine]:
    """The machines with what these shards leave free, in memory and on the disk."""

    def left(machine: Machine) -> Machine:
        own = [shard for shard in placed if shard.node_id == machine.node_id]
        disk_bytes = machine.disk_bytes
        if disk_bytes is not None:
            disk_bytes = max(0, disk_bytes - sum(shard.fetch_bytes for shard in own))
        held = (*machine.held, *(HeldLayers(shard.layers) for shard in own))
        devices = tuple(_less(device, own) for device in machine.devices)
        return replace(machine, devices=devices, held=held, disk_bytes=disk_bytes)

    return [left(each) for each in machines]


def _less(device: Device, own: Sequence[Placed]) -> Device:
    taken = sum(shard.need.total for shard in own if shard.device == device.name)
    return replace(device, free_bytes=max(0, device.free_bytes - taken))


def _on_disk(held: Iterable[HeldLayers], gap: LayerRange) -> Iterable[HeldLayers]:
    """What of the gap lies on a machine's disk, numbered from its first layer; what is loaded there
    stays, so that it makes no room."""
    for each in held:
        start, stop = max(each.layers.start, gap.start), min(each.layers.stop, gap.stop)
        if start < stop:
            yield HeldLayers(_moved(LayerRange(start, stop), -gap.start))


def _moved(layers: LayerRange, by: int) -> LayerRange:
    return LayerRange(layers.start + by, layers.stop + by)
