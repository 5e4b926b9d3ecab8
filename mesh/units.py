"""Sizes for people, in the units that they are counted in elsewhere, and characters of UTF-8.

What lies on disks and goes over networks counts in powers of ten, as disks and links are sold;
memory in powers of two, as it is, and with the names for that (IEC 80000-13).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

_DATA = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_LIMIT = re.compile(r"(\d{1,9}(?:\.\d{1,3})?) ?(GiB|MiB|%)?", re.ASCII)


def data_size(count: float) -> str:
    """Bytes on disk or on their way: ``40.0 GB``, ``12.4 MB``, ``1.5 kB``, ``12 B``."""
    for unit, power in _DATA:
        if count >= power:
            return f"{count / power:.1f} {unit}"
    return f"{count:.0f} B"


def data_share(done: float, total: float) -> str:
    """Bytes of others: ``12.4 of 40.0 GB``, in the unit of all of them, but no less than MB."""
    unit, power = _DATA[0] if total >= _DATA[0][1] else _DATA[1]
    return f"{done / power:.1f} of {total / power:.1f} {unit}"


def memory_size(count: float) -> str:
    """Bytes of memory: ``1.5 GiB``, ``320 MiB``; never less than ``1 MiB`` where there are any."""
    if count >= 1 << 30:
        return f"{count / (1 << 30):.1f} GiB"
    return f"{max(1, round(count / (1 << 20))) if count > 0 else 0} MiB"


def lasting(seconds: float) -> str:
    """``40 s``, ``12 min``, ``3 h``, ``4 days``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.0f} h" if hours < 48 else f"{hours / 24:.0f} days"


def since(at: str, now: datetime) -> str:
    """How long that has been, an ISO 8601 time, as `lasting`; ``0 s`` where it is yet to come: a
    clock may have been set."""
    past = now - type(now).fromisoformat(at)
    return lasting(max(0.0, past.total_seconds()))


def memory_limit_mb(text: str, total_mb: int) -> int | None:
    """What ``12 GiB``, ``512 MiB`` or ``50 %`` of so much is in MiB, a bare number is of GiB; None
    for the empty text, which sets no limit. Raises ValueError."""
    if not text:
        return None
    found = _LIMIT.fullmatch(text.strip())
    value = float(found[1]) if found is not None else 0.0
    unit = found[2] or "GiB" if found is not None else ""
    if value <= 0 or (unit == "%" and value > 100):
        raise ValueError(
            f"{text!r} is neither GiB (12 GiB) nor MiB (512 MiB) nor a share of all there is (50 %)"
        )
    if unit == "%":
        return int(total_mb * value / 100)
    return max(1, int(value * (1024 if unit == "GiB" else 1)))


def characters(text: bytes) -> int:
    """How many characters begin in these bytes of UTF-8; what is left of one that began before
    them counts nothing."""
    return sum(byte & 0xC0 != 0x80 for byte in text)
