"""Where the planner of `mesh.routing` lays what a deployment lacks: gaps, then replicas. Pure.

What is loaded stays where it is, so that it makes no room. `RoomAdjustments` says what else of
a machine's free memory is spoken for, and which spans it has refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mesh.capacity import Device, Speed
from mesh.deployments.laid import Gap, Laid
from mesh.deployments.wishes import Plan, Quant, Replica, Span, Wish
from mesh.errors import NotEnoughMemory, UnsupportedFamily, WeightsMismatch
from mesh.models.standard import other_formats
from mesh.routing.appraisal import Appraisal
from mesh.routing.fitting import SPARE_BYTES, Bench, benches
from mesh.routing.forecast import Placed
from mesh.routing.gaps import beside, fill, layout_of
from mesh.routing.machines import ITEMSIZE, Demand, HeldLayers, Machine, ModelShape
from mesh.routing.placement import NO_SUCH_FORMAT, Layout, lay_out, not_apart
from mesh.routing.seating import layers_within
from mesh.types import LayerRange, NodeId
from mesh.units import memory_size

REFUSED_SHARE = (15, 16)
"""Of what a refused span needs, a machine is believed to have so much at most: each refusal makes
the next span there clearly smaller."""

_ANY = tuple(Speed(name, 1.0, 1.0) for name in ITEMSIZE)
"""For a machine that nobody has measured: how much fits does not depend on how fast it is."""


@dataclass(frozen=True, slots=True)
class RoomAdjustments:
    """`freed_mb` are so much more than what is free of each machine, less than 0 where it is spoken
    for. `refused` are spans for which a machine had no room."""

    freed_mb: Mapping[NodeId, int] = field(default_factory=dict)
    refused: Sequence[Span] = ()


NOTHING = RoomAdjustments()


def require_possible(model: ModelShape, wish: Wish, quant: str) -> None:
    """Raise WeightsMismatch where a wish for these weights counts other layers than they have, and
    UnsupportedFamily where it is certain that no machine serves them in this format, or parted as
    it is wished."""
    if model.total_layers != wish.total_layers:
        raise WeightsMismatch(
            f"the wish for {wish.model_id} counts {wish.total_layers} layers, its weights have"
            f" {model.total_layers}.",
            fix=f"`hearthnet evict {wish.model_id}`, and deploy it again.",
            param="total_layers",
        )
    if quant not in ("auto", *model.quants):
        raise UnsupportedFamily(
            f"{wish.model_id} {NO_SUCH_FORMAT} {quant}.",
            fix=other_formats(model.quants),
            param="quant",
        )
    for pin in wish.pins:
        if not model.cuts.allow(pin.layers):
            why, fix = not_apart(model, pin.layers)
            raise UnsupportedFamily(why, fix=fix, param="layers")


def lay(
    model: ModelShape,
    machines: Sequence[Machine],
    wish: Wish,
    before: Plan | None,
    open_gaps: Sequence[Gap],
    demand: Demand,
    said: RoomAdjustments = NOTHING,
) -> Laid:
    """The gaps of `before` first, then the replicas that it lacks on what they leave. `demand` says
    who asks, in which format and with how long caches."""
    ready = [_ready(model, each, demand, said) for each in machines]
    kept = [] if before is None else before.replicas[: wish.replicas]
    lying = [(replica.number, span) for replica in kept for span in replica.spans]
    refusal: NotEnoughMemory | None = None
    for pin in wish.pins if kept else ():
        if pin not in kept[0].spans:
            lying.append((kept[0].number, pin))
            ready, lacking_there = _pinned(model, ready, pin, kept[0], demand)
            refusal = refusal or lacking_there
    filled: dict[Gap, tuple[Span, ...]] = {}
    for gap in open_gaps:
        same = gap.shared_with(lying)
        most = max(1, demand.max_shards - gap.kept)
        asked = replace(demand, max_shards=most)
        shards = fill(model, ready, gap.layers, replace(asked, without=_known(same, ready)))
        shards = shards or fill(model, ready, gap.layers, asked)
        if shards is None:
            found = layout_of(model, ready, gap.layers, asked)
            refusal = refusal or _refusal(found, f"layers {gap.layers} of {wish.model_id}")
            continue
        ready = beside(ready, shards)
        filled[gap] = _spans(shards)
        lying += [(gap.replica, span) for span in filled[gap]]
    if (lacking := wish.replicas - len(kept)) < 1:
        return Laid((), filled, refusal)
    holding = {span.node for _, span in lying}
    pins = () if kept else tuple((pin.node, pin.layers) for pin in wish.pins)
    asked = replace(demand, replicas=lacking, pins=pins, without=_known(holding, ready))
    found = lay_out(model, ready, asked)
    if found.refusal is not None:  # on machines that hold none; then on any
        found = lay_out(model, ready, replace(asked, without=frozenset()))
    replicas = tuple(_spans(replica.shards) for replica in found.replicas)
    more = f"{lacking} more of {wish.model_id}" if kept else str(wish.model_id)
    quant: Quant = found.quant if demand.quant == "auto" and not kept else ""
    return Laid(replicas, filled, refusal or _refusal(found, more), quant=quant)


def rooms(
    model: ModelShape, machines: Sequence[Machine], demand: Demand, said: RoomAdjustments = NOTHING
) -> Laid:
    """How many layers each machine has room for, measured or not, of further replicas as well, and
    what lies on their disks; those are left out that do not say what they have."""
    found: dict[NodeId, int] = {}
    extra = 0
    for machine in machines:
        known = replace(machine, devices=tuple(map(_of_any_speed, machine.devices)))
        ready = _ready(model, known, demand, said)
        for bench in _benches(model, ready, demand):
            most = _room(bench)
            found[machine.node_id] = max(found.get(machine.node_id, 0), most)
            beside_bytes = bench.layer_bytes + bench.scratch_bytes + SPARE_BYTES
            beside_bytes += bench.edge_bytes
            least = min(bench.weight_bytes) + bench.cache_bytes
            extra = max(extra, math.ceil(beside_bytes / least))
    held = {each.node_id: tuple(part.layers for part in each.held) for each in machines}
    return Laid(rooms=found, extra=extra, held=held, cuts=model.cuts)


def with_more(machine: Machine, more_bytes: int) -> Machine:
    """The machine, were so much more free, or less; nobody says on which device. What gets free
    is added in their order, to each what it has at most. What is spoken for is taken from the
    first that has it, or from all in turn."""
    taking = (n for n, each in enumerate(machine.devices) if each.free_bytes >= -more_bytes)
    order = [next(taking, 0), *range(len(machine.devices))] if machine.devices else []
    devices, rest = list(machine.devices), more_bytes
    for number in order:
        each = devices[number]
        most = max(0, each.total_bytes - each.free_bytes)
        change = min(rest, most) if rest > 0 else max(rest, -each.free_bytes)
        devices[number] = replace(each, free_bytes=each.free_bytes + change)
        rest -= change
    return replace(machine, devices=tuple(devices))


def _pinned(
    model: ModelShape, machines: Sequence[Machine], pin: Span, replica: Replica, demand: Demand
) -> tuple[list[Machine], NotEnoughMemory | None]:
    """The machines with what layers leave that are pinned anew to one of them, instead of those
    that they overlap there; and why they do not fit."""
    own = [span.layers for span in replica.spans if span.node == pin.node]
    given_up = [layers for layers in own if layers.overlaps(pin.layers)]

    def freed(machine: Machine) -> Machine:
        if machine.node_id != pin.node or not given_up:
            return machine
        bench = next(iter(_benches(model, machine, demand)), None)
        taken = 0 if bench is None else sum(bench.need(layers).total for layers in given_up)
        return with_more(machine, taken)

    ready = [freed(machine) for machine in machines]
    only = replace(demand, only=frozenset({pin.node}), max_shards=1)
    if (shards := fill(model, ready, pin.layers, only)) is not None:
        return beside(ready, shards), None
    found = layout_of(model, ready, pin.layers, only)
    return ready, _refusal(found, f"layers {pin.layers} of {model.model_id}")


def _room(bench: Bench) -> int:
    """Layers that the bench has room for: more than the model has where it takes several times."""
    seat = bench.seat(None)
    most = layers_within(seat)
    if most < len(seat.layer_bytes):
        return most
    return most + (seat.room_bytes - sum(seat.layer_bytes)) // max(seat.layer_bytes)


def _of_any_speed(device: Device) -> Device:
    return replace(device, speeds=_ANY) if device.kind == "cpu" and not device.speeds else device


def _ready(model: ModelShape, machine: Machine, demand: Demand, said: RoomAdjustments) -> Machine:
    """The machine as it may be given layers."""
    held = tuple(HeldLayers(each.layers) for each in machine.held)
    freed_bytes = said.freed_mb.get(machine.node_id, 0) << 20
    ready = with_more(replace(machine, held=held), freed_bytes)
    for span in said.refused:
        if span.node == machine.node_id:
            ready = _humbled(model, ready, span.layers, demand)
    return ready


def _humbled(model: ModelShape, machine: Machine, layers: LayerRange, demand: Demand) -> Machine:
    """The machine with less free than these layers need, on each device: it has said that it lacks
    that."""
    part, whole = REFUSED_SHARE
    excess = {
        bench.device.name: bench.have_bytes - bench.need(layers).total * part // whole
        for bench in _benches(model, machine, demand)
    }
    devices = (
        replace(each, free_bytes=max(0, each.free_bytes - max(0, excess.get(each.name, 0))))
        for each in machine.devices
    )
    return replace(machine, devices=tuple(devices))


def _benches(model: ModelShape, machine: Machine, demand: Demand) -> list[Bench]:
    for quant in model.quants:
        if demand.quant in ("auto", quant) and (found := benches(model, machine, demand, quant)):
            return found
    return []


def _refusal(found: Layout, what: str) -> NotEnoughMemory | None:
    """What a layout lacks, machine by machine; None where it lacks nothing but sense."""
    refusal = found.refusal
    if refusal is None or refusal.code != NotEnoughMemory.code:
        return None
    have = "; ".join(_appraised(row) for row in found.machines)
    return NotEnoughMemory(
        f"{what} does not fit: {refusal.message.rstrip('.')}. {have}.",
        fix=f"{refusal.fix} Or have fewer replicas (--replicas), use other machines (--nodes), or"
        " `hearthnet evict` what may go.",
    )


def _appraised(row: Appraisal) -> str:
    """Of one machine, which asks as well as it serves."""
    if row.why:
        return f"{row.node}: {row.why}"
    return f"{row.node} has {memory_size(row.free_bytes)} free, for {row.layers_that_fit} layers"


def _known(nodes: Iterable[NodeId], machines: Iterable[Machine]) -> frozenset[NodeId]:
    return frozenset(nodes) & {each.node_id for each in machines}


def _spans(shards: Iterable[Placed]) -> tuple[Span, ...]:
    return tuple(Span(shard.node_id, shard.layers) for shard in shards)
