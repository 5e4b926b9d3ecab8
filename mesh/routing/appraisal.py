"""Why machines are used or not, and what is missing where a layout fails: the words of a layout.

Decides nothing; looks at what was decided.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mesh.capacity import MEASURING_MB
from mesh.routing.fitting import UNKNOWN_DISK_BYTES, Bench, benches, ends_lack
from mesh.routing.forecast import with_one_more
from mesh.routing.machines import Demand, Machine, ModelShape, Quant
from mesh.routing.seating import layers_within
from mesh.types import LayerRange, NodeId
from mesh.units import memory_size


@dataclass(frozen=True, slots=True)
class Appraisal:
    """A machine in a layout: how many layers fit there, and, where it takes none, why."""

    node_id: NodeId
    node: str
    free_bytes: int
    total_bytes: int
    layers_that_fit: int
    used: bool
    why: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a layout is not what was wished. `code` as of errors: ``not_enough_memory``,
    ``bad_request``. `missing_bytes` lack on machine `node`, or, if that is empty, in all."""

    code: str
    message: str
    fix: str
    missing_bytes: int = 0
    node: str = ""


def appraise(
    model: ModelShape,
    machines: Sequence[Machine],
    demand: Demand,
    quant: Quant,
    laid: Sequence[Sequence[tuple[Bench, LayerRange]]],
) -> tuple[Appraisal, ...]:
    """A line for each machine, with what the replicas in `laid` leave to it."""
    used = {bench.machine.node_id for parts in laid for bench, _ in parts}
    rows = []
    for machine in machines:
        found = benches(model, machine, demand, quant)
        fit = _layers_on_disks(found, 1)
        is_used = machine.node_id in used
        why = "" if is_used else _why(model, machine, demand, quant, laid)
        rows.append(
            Appraisal(
                machine.node_id,
                machine.name,
                sum(device.free_bytes for device in machine.devices),
                sum(device.total_bytes for device in machine.devices),
                min(fit, model.total_layers),
                is_used,
                why,
            )
        )
    return tuple(rows)


def too_little(
    model: ModelShape,
    usable: Sequence[Machine],
    demand: Demand,
    quant: Quant,
    remedies: Iterable[tuple[str, Demand]],
) -> Refusal:
    """What is missing, where, and what could be asked for instead."""
    instead = ", ".join(name for name, _ in remedies)
    more = "Free memory, or let another machine join."
    fix = f"It fits with: {instead}. {more}" if instead else more
    asker = next((each for each in usable if each.node_id == demand.asker), None)
    lacking = ends_lack(model, asker, demand) if asker is not None else 0
    if asker is not None and lacking > 0:
        return Refusal(
            "not_enough_memory",
            f"{asker.name} asks, so it holds embedding and head: it lacks {memory_size(lacking)}.",
            fix,
            lacking,
            asker.name,
        )
    found = [bench for machine in usable for bench in benches(model, machine, demand, quant)]
    for node, layers in demand.pins:
        own = [bench for bench in found if bench.machine.node_id == node]
        if own and (refusal := _no_room_for(own, layers, fix)) is not None:
            return refusal
    if not found:
        return _unknown(model, usable, quant, fix)
    return _in_all(model, found, demand, fix)


def _unknown(model: ModelShape, usable: Sequence[Machine], quant: Quant, fix: str) -> Refusal:
    """Nobody computes in this format, as far as is known, or nobody may be used."""
    if not usable:
        return Refusal(
            "not_enough_memory",
            "no machine may be used now.",
            f"Each machine is listed with its reason. {fix}",
        )
    if not any(map(_is_measured, usable)):
        return Refusal(
            "not_enough_memory",
            "no machine that may be used has measured itself yet.",
            "They do so within a few minutes of their start, once they have"
            f" {MEASURING_MB} MiB of memory free; ask again then.",
        )
    return Refusal(
        "not_enough_memory",
        f"no machine that may be used can compute {model.model_id} in {quant}.",
        f"Each machine is listed with its reason. {fix}",
    )


def _no_room_for(own: Sequence[Bench], layers: LayerRange, fix: str) -> Refusal | None:
    """What a machine lacks for the layers that it is given; None where they fit."""
    name, there = own[0].machine.name, ""
    lacks = min(bench.need(layers).total - bench.have_bytes for bench in own)
    if lacks <= 0:
        lacks = own[0].fetched(layers) - own[0].seat(layers).disk_bytes
        there, fix = " on its disk", f"Free room there (`hearthnet rm`). {fix}"
    if lacks <= 0:
        return None
    message = f"{name} lacks {memory_size(lacks)}{there} for layers {layers}."
    return Refusal("not_enough_memory", message, fix, lacks, name)


def _in_all(model: ModelShape, found: Sequence[Bench], demand: Demand, fix: str) -> Refusal:
    wanted = model.total_layers * demand.replicas
    on_disk = _layers_on_disks(found, demand.replicas)
    held = sum(_layers_of(bench, demand.replicas, on_any_disk=True) for bench in found)
    if on_disk < wanted <= held:
        missing = (wanted - on_disk) * max(model.layer_bytes)
        return Refusal(
            "not_enough_memory",
            f"the disks of the machines that may be used have room for {on_disk} of {wanted}"
            f" layers; {memory_size(missing)} are missing there.",
            f"Free room on the disks (`hearthnet rm` there). {fix}",
            missing,
        )
    a_layer = max(sum(b.weight_bytes) / len(b.weight_bytes) + b.cache_bytes for b in found)
    lacking = max(1, wanted - held)
    missing = round(lacking * a_layer)
    if not held:  # then all that goes beside them is missing as well
        all_layers = LayerRange(0, model.total_layers)
        missing = max(missing, min(b.need(all_layers).total - b.have_bytes for b in found))
    copies = "" if demand.replicas == 1 else f" of {demand.replicas} copies"
    if held >= wanted:
        message = (
            f"the machines hold {held} layers, but not the {wanted}{copies} in a row, as asked."
        )
    else:
        message = (
            f"the machines that may be used have room for {held} of {wanted} layers{copies};"
            f" {memory_size(missing)} are missing."
        )
    return Refusal("not_enough_memory", message, fix, missing)


def _why(
    model: ModelShape,
    machine: Machine,
    demand: Demand,
    quant: Quant,
    laid: Sequence[Sequence[tuple[Bench, LayerRange]]],
) -> str:
    """Why a machine takes no layers."""
    if barred := _barred(machine, demand):
        return barred
    found = benches(model, machine, demand, quant)
    if not found:
        return _no_speed(machine, quant)
    fitting = [(bench, most) for bench in found if (most := layers_within(bench.seat(None)))]
    if not fitting:
        return _no_room(model, machine, found)
    if not laid:
        return ""
    before = sum(bench.cost(layers) for bench, layers in laid[0])
    more = min(with_one_more(laid[0], bench, most) for bench, most in fitting)
    if more <= 1e-9:
        return "as fast without it"
    return f"faster without it: {before:.1f} ms a token, at best {before + more:.1f} with it"


def _no_speed(machine: Machine, quant: Quant) -> str:
    if not _is_measured(machine):
        return "it has not measured itself yet"
    kinds = ", ".join(device.name for device in machine.devices)
    return f"its speed in {quant} on {kinds} is not known"


def _is_measured(machine: Machine) -> bool:
    return any(device.speeds for device in machine.devices)


def _no_room(model: ModelShape, machine: Machine, found: Sequence[Bench]) -> str:
    if any(_layers_of(bench, 1, on_any_disk=True) for bench in found):
        least, have = min(model.layer_bytes), machine.disk_bytes or 0
        return (
            f"no room on its disk: one layer is {memory_size(least)}, {memory_size(have)} are free"
        )
    least = min(bench.need(LayerRange(0, 1)).total for bench in found)
    have = max(0, *(bench.have_bytes for bench in found))
    return f"no memory: one layer needs {memory_size(least)}, {memory_size(have)} are free"


def _layers_on_disks(found: Iterable[Bench], copies: int) -> int:
    """How many layers fit, of as many copies as that, where the devices of a machine share its
    disk; copies of the same layers are there once."""
    by_node: defaultdict[NodeId, list[Bench]] = defaultdict(list)
    for bench in found:
        by_node[bench.machine.node_id].append(bench)
    held = 0
    for own in by_node.values():
        on_disk = layers_within(replace(own[0].seat(None), room_bytes=UNKNOWN_DISK_BYTES))
        held += min(copies * on_disk, sum(_layers_of(bench, copies) for bench in own))
    return held


def _layers_of(bench: Bench, copies: int, *, on_any_disk: bool = False) -> int:
    """How many layers fit there, of as many copies as that."""
    held = used_bytes = 0
    for _ in range(copies):
        seat = bench.seat(None, used_bytes)
        if on_any_disk:
            seat = replace(seat, disk_bytes=UNKNOWN_DISK_BYTES)
        most = layers_within(seat)
        if not most:
            break
        held += most
        used_bytes += bench.need(LayerRange(0, most)).total
    return held


def _barred(machine: Machine, demand: Demand) -> str:
    if machine.refusal:
        return machine.refusal
    if machine.node_id in demand.without:
        return "left out, as wished"
    if demand.only and machine.node_id not in demand.only:
        return "not among the nodes that were named"
    if not machine.devices:
        return "it does not say what it has: update hearthnet there, or wait until it has measured"
    return ""
