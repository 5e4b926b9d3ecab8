"""Layouts: which machines of a house hold which layers of a model, or what is missing for that.

A token passes its hops one after the other, so its time is the sum of what its layers take where
they lie and of the ways between; `lay_out` finds places for which that is least and that fit the
memory there. A slow machine gets no layers when all is faster without it, and a model lies
on one machine when that is fastest. Says nothing about how it comes to be so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from mesh.models.standard import other_formats
from mesh.routing.appraisal import Appraisal, Refusal, appraise, too_little
from mesh.routing.fitting import STAY_SHARE, Bench, benches, ends_lack, staying
from mesh.routing.forecast import Forecast, forecast
from mesh.routing.machines import QUANTS, Demand, Machine, ModelShape, Quant
from mesh.routing.seating import Seat, Seating, seat
from mesh.types import LayerRange, ModelId, NodeId

NO_SUCH_FORMAT = "has layers that are not standard: it cannot be served in"

_LEAST_CONTEXT = 512
_MAX_REPLICAS = 64


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a model is to lie: its replicas, or why there are not as many as wished.

    `refusal` is None exactly when all are there. `machines` has a line for each machine, used or
    not, by id. `positions` are the most that the caches of a shard are for.
    """

    model_id: ModelId
    weights_sha256: str
    total_layers: int
    quant: Quant
    context: int
    streams: int
    positions: int
    dedicated: bool
    replicas: tuple[Forecast, ...]
    machines: tuple[Appraisal, ...]
    refusal: Refusal | None = None


Laid = tuple[tuple[tuple[Bench, LayerRange], ...], ...]
"""The shards of each replica."""

Pins = Mapping[NodeId, LayerRange]


def lay_out(model: ModelShape, machines: Sequence[Machine], demand: Demand) -> Layout:
    """The fastest layout that fits. Depends on what the machines are, not on their order.

    A route is within 3 % of the fastest one where that spares fetching layers. More replicas lie on
    machines of their own; where there are none left, they share. Wishes that contradict themselves,
    and what does not fit, become the layout's refusal.
    """
    machines = sorted(machines, key=lambda each: each.node_id)
    refusal = _contradiction(model, machines, demand)
    if refusal is not None:
        return _refused(model, machines, demand, _quants(model, demand)[0], refusal)
    best: tuple[float, Quant, Laid] | None = None
    for quant in _quants(model, demand):
        is_auto = demand.quant == "auto" and best is not None
        if quant == "int4" and is_auto and not _loses_nothing(model, machines, demand):
            break  # what loses most is for where nothing else fits
        laid = _replicas_in(model, machines, demand, quant)
        if laid is None:
            continue
        cost = sum(_cost(replica) for replica in laid)
        if best is None or cost < best[0]:
            best = (cost, quant, laid)
    if best is None:
        quant = _quants(model, demand)[-1]
        usable = _usable(machines, demand)
        lacking = too_little(model, usable, demand, quant, _remedies(model, machines, demand))
        return _refused(model, machines, demand, quant, lacking)
    _, quant, laid = best
    asker = _asker(machines, demand)
    replicas = tuple(forecast(model, parts, asker, quant, demand.streams) for parts in laid)
    rows = appraise(model, machines, demand, quant, laid)
    most = max(bench.positions for parts in laid for bench, _ in parts)
    return _layout(model, demand, quant, most, replicas, rows)


def _layout(
    model: ModelShape,
    demand: Demand,
    quant: Quant,
    positions: int,
    replicas: tuple[Forecast, ...],
    rows: tuple[Appraisal, ...],
    refusal: Refusal | None = None,
) -> Layout:
    return Layout(
        model.model_id, model.weights_sha256, model.total_layers, quant, demand.context,
        demand.streams, positions, demand.dedicated, replicas, rows, refusal,
    )  # fmt: skip


def _refused(
    model: ModelShape, machines: Sequence[Machine], demand: Demand, quant: Quant, refusal: Refusal
) -> Layout:
    rows = appraise(model, machines, demand, quant, ())
    most = max((each.kv_tokens for each in _usable(machines, demand)), default=0)
    return _layout(model, demand, quant, max(most, demand.positions), (), rows, refusal)


def _quants(model: ModelShape, demand: Demand) -> list[Quant]:
    """The formats to try, in their order."""
    if demand.quant == "auto":
        return [quant for quant in QUANTS if quant in model.quants]
    return [quant for quant in QUANTS if quant == demand.quant] or ["none"]


def _loses_nothing(model: ModelShape, machines: Sequence[Machine], demand: Demand) -> bool:
    """Whether 4 bit is as good as more: where the model is stored so, but not on a card, which is
    slow in it for several answers at once."""
    devices = [device for machine in _usable(machines, demand) for device in machine.devices]
    return model.is_int4 and all(device.kind == "cpu" for device in devices)


def _usable(machines: Sequence[Machine], demand: Demand) -> list[Machine]:
    return [
        machine
        for machine in machines
        if not machine.refusal
        and machine.node_id not in demand.without
        and (not demand.only or machine.node_id in demand.only)
    ]


def _asker(machines: Sequence[Machine], demand: Demand) -> Machine | None:
    return next((each for each in machines if each.node_id == demand.asker), None)


def _cost(parts: Sequence[tuple[Bench, LayerRange]]) -> float:
    return sum(bench.cost(layers) for bench, layers in parts)


# Replicas


def _replicas_in(
    model: ModelShape, machines: Sequence[Machine], demand: Demand, quant: Quant
) -> Laid | None:
    """All replicas in this format; None when they do not fit."""
    usable = _usable(machines, demand)
    asker = _asker(machines, demand)
    if asker is not None and ends_lack(model, asker, demand) > 0:
        return None
    found = [bench for machine in usable for bench in benches(model, machine, demand, quant)]
    pins = _dealt(demand)
    if pins is None:
        return None
    if demand.replicas == 1:
        first = _replica(model, found, pins[0], demand, frugal=False, used={})
        return None if first is None else (first,)
    ways = ((False, False), (True, False), (False, True), (True, True))
    for frugal, sharing in ways:
        laid = _replicas(model, found, pins, demand, frugal=frugal, sharing=sharing)
        if laid is not None:
            return laid
    return None


def _replicas(
    model: ModelShape,
    found: Sequence[Bench],
    pins: Sequence[Pins],
    demand: Demand,
    *,
    frugal: bool,
    sharing: bool,
) -> Laid | None:
    """One replica after the other on what those before have left, each where as few others are as
    can be, and on devices of its own; beside none unless they are `sharing`."""
    used: dict[tuple[str, str], int] = {}
    beside: Counter[NodeId] = Counter()
    laid: list[tuple[tuple[Bench, LayerRange], ...]] = []
    for number, own in enumerate(pins):
        awaited = Counter({node for later in pins[number + 1 :] for node in later})
        others = {b.machine.node_id: (beside + awaited)[b.machine.node_id] for b in found}
        others.update(dict.fromkeys(own, 0))
        levels = sorted({0, *others.values()}) if sharing else [0]
        for most, is_apart in product(levels, (True, False)):
            free = [
                bench
                for bench in found
                if others[bench.machine.node_id] <= most and not (is_apart and bench.key in used)
            ]
            parts = _replica(model, free, own, demand, frugal=frugal, used=used)
            if parts is not None:
                break
        else:
            return None
        for bench, layers in parts:
            used[bench.key] = used.get(bench.key, 0) + bench.need(layers).total
            node = bench.machine.node_id
            found = [b.once_there(layers) if b.machine.node_id == node else b for b in found]
        beside.update({bench.machine.node_id for bench, _ in parts})
        laid.append(parts)
    return tuple(laid)


def _dealt(demand: Demand) -> Sequence[Pins] | None:
    """The pins of each replica: each goes to the first one in which it overlaps no other."""
    dealt: list[dict[NodeId, LayerRange]] = [{} for _ in range(demand.replicas)]
    for node, layers in sorted(demand.pins):
        for pins in dealt:
            apart = all(layers.stop <= p.start or p.stop <= layers.start for p in pins.values())
            if apart and node not in pins:
                pins[node] = layers
                break
        else:
            return None
    return dealt


def _replica(
    model: ModelShape,
    found: Sequence[Bench],
    pins: Pins,
    demand: Demand,
    *,
    frugal: bool,
    used: Mapping[tuple[str, str], int],
) -> tuple[tuple[Bench, LayerRange], ...] | None:
    """The shards of one replica. A `frugal` one takes as few machines and as little room as it can,
    so that more is left to the next."""
    by_key = {bench.key: bench for bench in found}
    seats = list(_seats(found, pins, used))
    if {each.key[0] for each in seats if each.pin is not None} != pins.keys():
        return None
    if frugal:
        seats = [replace(each, hop_ms=1e6 + each.hop_ms + each.room_bytes / 1e6) for each in seats]
    seated = seat(seats, model.total_layers, demand.max_shards, model.cuts)
    while seated is not None and (shared := _on_one_disk(seats, seated, by_key)) is not None:
        seats = shared
        seated = seat(seats, model.total_layers, demand.max_shards, model.cuts)
    if seated is None:
        return None
    if not frugal and any(bench.machine.held for bench in found):
        seated = _stay(model, seats, by_key, seated, demand.max_shards)
    return tuple((by_key[each.key], layers) for each, layers in seated.parts)


def _on_one_disk(
    seats: Sequence[Seat], seated: Seating, by_key: Mapping[tuple[str, str], Bench]
) -> list[Seat] | None:
    """Each device of a machine with its part of the disk, where together they fetch more than that
    takes: the ones that fetch most what they do, as far as it goes. None where all fits."""
    fetched: defaultdict[str, dict[tuple[str, str], int]] = defaultdict(dict)
    for each, layers in seated.parts:
        fetched[each.key[0]][each.key] = by_key[each.key].fetched(layers)
    for node, own in fetched.items():
        left = by_key[next(iter(own))].machine.disk_bytes
        if left is None or sum(own.values()) <= left:
            continue
        shares: dict[tuple[str, str], int] = {}
        for key, size in sorted(own.items(), key=lambda item: (-item[1], item[0])):
            shares[key] = min(size, left)
            left -= shares[key]
        return [
            replace(each, disk_bytes=shares.get(each.key, 0)) if each.key[0] == node else each
            for each in seats
        ]
    return None


def _stay(
    model: ModelShape,
    seats: Sequence[Seat],
    by_key: Mapping[tuple[str, str], Bench],
    fastest: Seating,
    most: int,
) -> Seating:
    """Nearly as fast, with less to fetch."""
    budget_ms = STAY_SHARE * fastest.cost_ms
    charged = [staying(each, by_key[each.key].machine, budget_ms) for each in seats]
    found = seat(charged, model.total_layers, most, model.cuts)
    fits = found is not None and _on_one_disk(seats, found, by_key) is None
    return found if found is not None and fits else fastest


def _seats(
    found: Sequence[Bench], pins: Pins, used: Mapping[tuple[str, str], int]
) -> Iterator[Seat]:
    """A seat for each device; of a pinned node the one device that takes its layers quickest."""
    for bench in found:
        if bench.machine.node_id not in pins:
            yield bench.seat(None, used.get(bench.key, 0))
    for node, layers in sorted(pins.items()):
        own = [b.seat(layers, used.get(b.key, 0)) for b in found if b.machine.node_id == node]
        fitting = [each for each in own if each.has_room_for(layers)]
        if fitting:
            yield min(fitting, key=lambda each: (each.cost(layers), each.key))


# Refusals


def not_apart(model: ModelShape, layers: LayerRange) -> tuple[str, str]:
    """Why these layers are not for one machine alone, and what to do."""
    why, fix = model.cuts.refusal(layers, model.total_layers)
    return f"{model.model_id} cannot have layers {layers} on one machine: {why}.", fix


def _contradiction(
    model: ModelShape, machines: Sequence[Machine], demand: Demand
) -> Refusal | None:
    """Why this cannot be wished, whatever there is."""
    fix = "Ask for something else."
    known = {machine.node_id for machine in machines}
    named = {*demand.only, *demand.without, *(node for node, _ in demand.pins)}
    numbers = (
        (demand.replicas, _MAX_REPLICAS),
        (demand.context, 1 << 24),
        (demand.streams, 1 << 16),
    )
    whole = LayerRange(0, model.total_layers)
    out = [f"{layers}" for _, layers in demand.pins if not whole.covers(layers)]
    if any(not 1 <= value <= most for value, most in numbers):
        why = f"replicas (at most {_MAX_REPLICAS}), context and streams are numbers from 1."
    elif demand.quant not in ("auto", *QUANTS):
        why = f"quant {demand.quant!r} is not auto, none, int8 or int4."
    elif demand.quant not in ("auto", *model.quants):
        why, fix = f"{model.model_id} {NO_SUCH_FORMAT} {demand.quant}.", other_formats(model.quants)
    elif named - known:
        why = f"nobody knows {', '.join(sorted(named - known))}."
    elif out:
        why = f"{model.model_id} has layers {whole}, not {', '.join(out)}."
    elif apart := [pin for _, pin in demand.pins if not model.cuts.allow(pin)]:
        why, fix = not_apart(model, apart[0])
    elif _dealt(demand) is None:
        why = "layers that are given to several nodes are more copies than replicas."
    else:
        return None
    return Refusal("bad_request", why, fix)


def _remedies(
    model: ModelShape, machines: Sequence[Machine], demand: Demand
) -> Iterator[tuple[str, Demand]]:
    """Wishes for less that can be met, each with how it is called; the first ones suffice."""
    asked = _quants(model, demand)[-1]
    fewer = [quant for quant in model.quants if QUANTS.index(quant) > QUANTS.index(asked)]
    tries = [(f"--quant {quant}", replace(demand, quant=quant)) for quant in fewer]
    context = demand.context // 2
    while context >= _LEAST_CONTEXT:
        tries.append((f"--context {context}", replace(demand, context=context)))
        context //= 2
    tries += [
        (f"--replicas {number}", replace(demand, replicas=number))
        for number in range(demand.replicas - 1, 0, -1)
    ]
    freed = (*demand.only, *demand.without, *demand.pins)
    if freed:
        anywhere = replace(demand, only=frozenset(), without=frozenset(), pins=())
        tries.append(("letting it use any machine", anywhere))
    seen: set[str] = set()
    for name, less in tries:
        kind = name.split()[0]
        if kind not in seen and any(
            _replicas_in(model, machines, less, quant) is not None for quant in _quants(model, less)
        ):
            seen.add(kind)
            yield name, less
