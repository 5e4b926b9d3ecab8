"""How layers of a model fit a machine: in which format, at which cost, in how much of its memory.

What is needed is counted as a shard counts it before it loads (`mesh.shard.footprint`), and padded
as NDIF pads what it deploys. Knows no layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mesh.capacity import Device
from mesh.routing.machines import ITEMSIZE, Demand, Machine, ModelShape, Quant, Timed
from mesh.routing.seating import Seat
from mesh.types import HALVED_FORMAT, LayerRange

PADDING = (3, 20)
"""Share of weights and caches that is asked for on top, 0.15, as a fraction: it is exact."""

SPARE_BYTES = (64 + 3) << 20
"""What allocators and a runtime's tables take beside all that is counted, and what a shard, which
says weights, caches and the rest in MiB, rounds up."""

HOP_MS = 0.6
"""What a hop costs besides computing and the way: packing, system calls (measured on loopback)."""

STAY_SHARE = 0.03
"""A route may be so much slower for leaving layers where they are."""

PREFILL_ROWS = 512

UNKNOWN_DISK_BYTES = 1 << 62
"""A disk that nobody knows is believed to have room."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that layers take of a device: weights, full caches, and what is kept free beside."""

    weights: int
    caches: int
    head_room: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.caches + self.head_room


@dataclass(frozen=True, slots=True)
class Bench:
    """The model on one device of a machine, in the format in which it would be computed there.

    `have_bytes` is what layers may take with all that goes with them: what is free, what is loaded
    of this very model, less what asking for it takes. `layer_bytes` is the largest layer in the
    numbers that are computed in, as which it is held for a while beside the others. `edge_bytes`
    come with each layer of `edges`, once for a shard with both. `cache_bytes` are a layer's, for
    `positions`. `prefill_ms` are those of 512 rows of each layer. `fetch_bytes` are what each takes
    on the disk, as stored, where it is not there yet.
    """

    machine: Machine
    device: Device
    format: str
    weight_bytes: tuple[int, ...]
    layer_bytes: int
    cache_bytes: int
    scratch_bytes: int
    decode_ms: tuple[float, ...]
    prefill_ms: tuple[float, ...]
    have_bytes: int
    fetch_bytes: tuple[int, ...]
    edges: tuple[int, ...] = ()
    edge_bytes: int = 0
    positions: int = 0

    @property
    def key(self) -> tuple[str, str]:
        """Tells it from other benches."""
        return (self.machine.node_id, self.device.name)

    def cost(self, layers: LayerRange) -> float:
        """Milliseconds of a decode step through these layers here, the way included."""
        return self.hop_ms + sum(self.decode_ms[layers.start : layers.stop])

    @property
    def hop_ms(self) -> float:
        """What a decode step pays for going there at all."""
        way_ms = self.machine.way_ms
        way_ms = self.machine.rtt_ms + HOP_MS if way_ms is None else way_ms
        return way_ms + self.device.visit_ms

    def need(self, layers: LayerRange) -> Need:
        """What these layers take."""
        is_edge = any(layer in layers for layer in self.edges)
        weights = sum(self.weight_bytes[layers.start : layers.stop])
        weights += self.edge_bytes * is_edge
        caches = self.cache_bytes * len(layers)
        part, whole = PADDING
        padding = -(-(weights + caches) * part // whole)
        beside = max(padding, self.layer_bytes)
        return Need(weights, caches, beside + self.scratch_bytes + SPARE_BYTES)

    def seat(self, pin: LayerRange | None, used_bytes: int = 0) -> Seat:
        """The bench as a place for layers beside `used_bytes` of others of the same layout."""
        room = self.have_bytes - used_bytes - self.scratch_bytes - SPARE_BYTES
        part, whole = PADDING
        within = min(room * whole // (whole + part), room - self.layer_bytes)
        sizes = [size + self.cache_bytes for size in self.weight_bytes]
        for layer in self.edges:
            sizes[layer] += self.edge_bytes
        disk_bytes = self.machine.disk_bytes
        return Seat(
            self.key, self.hop_ms, self.decode_ms, tuple(sizes), max(0, within), self.fetch_bytes,
            UNKNOWN_DISK_BYTES if disk_bytes is None else disk_bytes, pin,
        )  # fmt: skip

    def fetched(self, layers: LayerRange) -> int:
        """Bytes, as stored, that have to be brought here first."""
        return sum(self.fetch_bytes[layers.start : layers.stop])

    def once_there(self, layers: LayerRange) -> Bench:
        """The bench when its machine has fetched these layers."""
        disk_bytes = self.machine.disk_bytes
        if disk_bytes is not None:
            disk_bytes = max(0, disk_bytes - self.fetched(layers))
        lacking = (0 if i in layers else size for i, size in enumerate(self.fetch_bytes))
        machine = replace(self.machine, disk_bytes=disk_bytes)
        return replace(self, machine=machine, fetch_bytes=tuple(lacking))

    def replaces(self, layers: LayerRange) -> int:
        """Bytes of this model loaded on the device that make room for these layers."""
        return sum(
            held.loaded_bytes
            for held in self.machine.held
            if held.device == self.device.name and held.layers != layers
        )


def staying(seat: Seat, machine: Machine, budget_ms: float) -> Seat:
    """The seat with a charge on what the machine does not have: `budget_ms` for all layers."""
    here = [held.layers for held in machine.held]
    total = len(seat.layer_ms)
    charged = tuple(
        ms if any(layer in held for held in here) else ms + budget_ms / total
        for layer, ms in enumerate(seat.layer_ms)
    )
    return replace(seat, layer_ms=charged)


def benches(model: ModelShape, machine: Machine, demand: Demand, quant: Quant) -> list[Bench]:
    """The devices of the machine that can compute the model in this format."""
    found = [_bench(model, machine, device, demand, quant) for device in machine.devices]
    return [each for each in found if each is not None]


def ends_bytes(model: ModelShape, device: Device) -> int:
    """What the ends take of the asker's device; the head may be held twice for a while."""
    name = float_format(model, device)
    size = computed_itemsize(name, device)
    # Looked up in its file, where it is wanted as it is stored there.
    is_mapped = device.kind == "cpu" and (name != "fp32" or model.dtype == "fp32")
    inputs = 0 if is_mapped else model.inputs_weights
    return (model.ends_weights + model.head_weights + inputs) * size + SPARE_BYTES


def asking_bytes(model: ModelShape, device: Device, *, thin: bool) -> int:
    """What a process that asks for the model takes of a machine."""
    return SPARE_BYTES if thin else ends_bytes(model, device)


def ends_lack(model: ModelShape, asker: Machine, demand: Demand) -> int:
    """Bytes that the asker lacks to ask at all, whether it takes layers or not."""
    memory = ends_device(asker)
    if memory is None or asker.has_ends:
        return 0
    return asking_bytes(model, memory, thin=demand.thin) - memory.free_bytes


def shard_bytes(
    model: ModelShape, layers: LayerRange, name: str, device: Device | None, positions: int
) -> int:
    """What a shard of these layers takes of a device in this format, with caches of so many
    positions, as it says itself before it loads: nothing is kept free beside it."""
    own = model.layer_weights[layers.start : layers.stop]
    wide = computed_itemsize(name, device)
    caches = (model.kv_numbers * wide * positions + model.state_bytes) * len(layers)
    one_layer = math.ceil(sum(own) * wide / len(own))
    weights = math.ceil(sum(own) * model.weight_size(name))
    return weights + caches + one_layer + model.scratch_bytes + SPARE_BYTES


def head_ms(model: ModelShape, machine: Machine, quant: Quant) -> float:
    """Milliseconds of the head for one token; 0 where the asker's speed is not known."""
    device = ends_device(machine)
    if device is None:
        return 0.0
    quantised = quant != "none" and device.kind == "cpu"
    # A head can be halved whatever the layers are.
    name = "int8" if quantised else _float_format(model, device, halves=True)
    speed = device.speed(name)
    if speed is None:
        return 0.0
    return model.head_weights * ITEMSIZE[name] / speed.decode_gb_s / 1e6


def ends_device(machine: Machine) -> Device | None:
    """The device that the ends lie on."""
    return machine.devices[0] if machine.devices else None


def float_format(model: ModelShape, device: Device) -> str:
    """In which numbers a device computes the model's layers where they are not quantised."""
    return _float_format(model, device, halves=model.is_standard)


def _float_format(model: ModelShape, device: Device, *, halves: bool) -> str:
    stored = model.dtype
    if stored not in ("fp32", "fp16", "bf16"):  # blocks are decoded
        stored = "bf16"
    near = ["fp16"] if stored == "bf16" and device.kind != "cpu" else []
    near += [HALVED_FORMAT] if halves and stored != "fp32" else []
    # A device whose owner wants all in one of them has a speed in no other.
    known = (each for each in (stored, *near, "fp32", "bf16", "fp16") if device.speed(each))
    return next(known, "fp32")


def computed_itemsize(name: str, device: Device | None) -> int:
    """Bytes of a number in caches, ends and what else is no layer's weight, where layers are in
    this format there."""
    is_card = device is not None and device.kind != "cpu"
    return 2 if name in ("fp16", "bf16") or (is_card and name == "int4") else 4


def _bench(
    model: ModelShape, machine: Machine, device: Device, demand: Demand, quant: Quant
) -> Bench | None:
    name = float_format(model, device) if quant == "none" else quant
    timed = next((t for t in machine.timed if (t.device, t.format) == (device.name, name)), None)
    speed = device.speed(name)
    if timed is None and speed is None:
        return None
    weights = model.layer_weights
    mean = sum(model.layer_read or weights) / len(weights)
    taken = [math.ceil(each * model.weight_size(name)) for each in weights]
    decode, prefill = [], []
    for number in model.layer_read or weights:
        size = number * ITEMSIZE[name]
        step_ms = speed.layer_ms + size / speed.decode_gb_s / 1e6 if speed is not None else 0.0
        rows_ms = 2 * PREFILL_ROWS * number / speed.prefill_gflops / 1e6 if speed else 0.0
        if timed is not None:
            step_ms = timed.decode_ms * number / mean
            rows_ms = rows_ms or _long(timed)
        decode.append(step_ms)
        prefill.append(rows_ms)
    wide, positions = computed_itemsize(name, device), max(machine.kv_tokens, demand.positions)
    here = [held.layers for held in machine.held]
    lacking = tuple(
        0 if any(layer in held for held in here) else size
        for layer, size in enumerate(model.layer_bytes)
    )
    return Bench(
        machine,
        device,
        name,
        tuple(taken),
        max(weights) * wide,
        model.kv_numbers * wide * positions + model.state_bytes,
        model.scratch_bytes,
        tuple(decode),
        tuple(prefill),
        _have(model, machine, device, demand),
        lacking,
        model.edges,
        ends_bytes(model, device) - SPARE_BYTES if demand.thin else 0,
        positions,
    )


def _long(timed: Timed) -> float:
    """Prefill where only decode is known: no faster than a quarter of row after row."""
    return timed.decode_ms * PREFILL_ROWS / 4


def _have(model: ModelShape, machine: Machine, device: Device, demand: Demand) -> int:
    loaded = sum(held.loaded_bytes for held in machine.held if held.device == device.name)
    have = device.free_bytes + loaded
    if not machine.has_ends and device is ends_device(machine):
        have -= asking_bytes(model, device, thin=demand.thin)
    return have
