"""What a node's devices hold and how fast they are, as it is measured, kept and told.

Plain data with its bounds: it comes from files and from other nodes. Measures nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated

from msgspec import Meta

from mesh.codec import Int63, Text, finite

MAX_DEVICES = 16
MAX_SPEEDS = 8
MEASURING_MB = 320
"""So much main memory has to be free for a machine to be measured."""

Rate = Annotated[float, Meta(gt=0, le=1e9), finite]
Milliseconds = Annotated[float, Meta(ge=0, le=1e9), finite]


_NAMED = re.compile(r"cpu|mps|cuda:\d{1,3}|cpu:\d{1,4}(-\d{1,4})?")


def named_devices(text: str) -> tuple[str, ...]:
    """The devices of ``cuda:0,cuda:1,cpu``, in that order; ``auto`` and ``all`` stand alone. Raises
    ValueError for what is none, and where two are one."""
    named = (name.strip() for name in text.split(","))
    names = tuple("cuda:0" if name == "cuda" else name for name in named)
    if names in {("auto",), ("all",)}:
        return names
    for name in names:
        cores = cores_of(name)
        if _NAMED.fullmatch(name) is None or (cores is not None and not cores):
            alone = ", which is given alone" if name in ("auto", "all") else ""
            raise ValueError(f"{name!r} is no device{alone}")
    for one, other in combinations(names, 2):
        if _overlap(one, other):
            raise ValueError(f"{one} and {other} are not two devices")
    return names


def cores_of(device: str) -> range | None:
    """The processor's cores that ``cpu:2`` or ``cpu:0-3`` names, both ends included; None for a
    device that is no such part of it."""
    kind, _, cores = device.partition(":")
    if kind != "cpu" or not cores:
        return None
    first, _, last = cores.partition("-")
    return range(int(first), int(last or first) + 1)


def device_name(asked: str, found: str) -> str:
    """What a device is called that was `asked` for and that torch calls `found`: a part of the
    processor by its cores."""
    return found if cores_of(asked) is None else asked


def _overlap(one: str, other: str) -> bool:
    (kind, _, _), (its_kind, _, _) = one.partition(":"), other.partition(":")
    if kind != its_kind:
        return False
    if kind == "cuda":
        return one == other
    cores, others = cores_of(one), cores_of(other)
    return cores is None or others is None or not set(cores).isdisjoint(others)


@dataclass(frozen=True, slots=True)
class Speed:
    """What a device does with weights in one `format` (fp32, fp16, bf16, halved, int8, int4).

    A decode step reads `decode_gb_s` (10**9 bytes a second) of weights and takes `layer_ms` for
    each layer beside that; a prefill computes `prefill_gflops`, 10**9 operations a second.
    """

    format: Text
    decode_gb_s: Rate
    prefill_gflops: Rate
    layer_ms: Milliseconds = 0.0


@dataclass(frozen=True, slots=True)
class Device:
    """Memory that layers can lie in, and what computes there: ``cpu``, ``cuda:0``, ``mps``.

    What lies in a format without a speed is not computed there, be it that its owner wants another
    one (`dtype`). A decode step costs `visit_ms` more where the device waited before it, as it does
    for the other hops of a route.
    """

    name: Text
    free_bytes: Int63
    total_bytes: Int63
    speeds: Annotated[tuple[Speed, ...], Meta(max_length=MAX_SPEEDS)] = ()
    visit_ms: Milliseconds = 0.0

    @property
    def kind(self) -> str:
        """``cpu``, ``cuda`` or ``mps``."""
        return self.name.partition(":")[0]

    def speed(self, name: str) -> Speed | None:
        """In this format; None where it was not measured."""
        return next((each for each in self.speeds if each.format == name), None)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured of a machine. `asker_ms` is what a token costs where it is asked for,
    besides the head and the hops; `others_share` is how much of all processors others took
    meanwhile, 0 to 1."""

    device: Device
    asker_ms: Milliseconds = 0.0
    others_share: Annotated[float, Meta(ge=0, le=1), finite] = 0.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """The devices that a node computes on, the one that its askers use first; what weights may take
    on the disk that they are fetched to; and for how many positions a shard there sets aside caches
    at least. None where that is not said."""

    devices: Annotated[tuple[Device, ...], Meta(max_length=MAX_DEVICES)] = ()
    disk_free_bytes: Int63 | None = None
    kv_tokens: Int63 | None = None
