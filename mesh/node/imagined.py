"""A machine that a household does not have, for asking what it would bring. Pure."""

from __future__ import annotations

import re
from dataclasses import replace

from mesh.capacity import Device
from mesh.errors import BadRequest
from mesh.routing.machines import Machine
from mesh.types import NodeId

_IMAGINED = re.compile(r"([^=:]{1,64})=(\d{1,5}(?:\.\d+)?)(?::(\d{1,5}(?:\.\d+)?))?")


def imagined(text: str, own: Machine | None, rtt_ms: float, kv_tokens: int) -> Machine | None:
    """What ``NAME=GIB`` or ``NAME=GIB:GB/S`` describes, as fast as this machine, its `own`, unless
    said; None for a name alone. Raises BadRequest."""
    said = _IMAGINED.fullmatch(text)
    if said is None:
        return None
    name, memory, gb_s = said[1], int(float(said[2]) * 2**30), said[3]
    if own is None or not own.devices or not own.devices[0].speeds:
        raise BadRequest(
            "This machine has not measured itself yet, so nothing is known of one like it.",
            fix="Wait half a minute, and try again.",
            param="with",
        )
    speeds = own.devices[0].speeds
    if memory == 0 or (gb_s is not None and float(gb_s) == 0):
        raise BadRequest(
            f"{text!r} is no machine: neither its memory nor its speed is 0.",
            fix="Give NAME=GIB or NAME=GIB:GB/S, as in attic=8:20.",
            param="with",
        )
    if gb_s is not None:
        speeds = tuple(replace(each, decode_gb_s=float(gb_s)) for each in speeds)
    device = Device(own.devices[0].name, memory, memory, speeds)
    return Machine(NodeId(f"imagined {name}"), name, (device,), rtt_ms, kv_tokens=kv_tokens)
