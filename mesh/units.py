"""Sizes and durations for people, in the units that they are counted in elsewhere.

What lies on disks and goes over networks counts in powers of ten, as disks and links are sold;
memory in powers of two, as it is, and with the names for that (IEC 80000-13).
"""

from __future__ import annotations

_DATA = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


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
    """``40 s``, ``12 min``, ``3 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
