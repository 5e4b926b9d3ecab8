"""Texts for the screen: harmless ones from other machines, times, numbers, events in a line."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

GLYPHS = {"ok": "●", "wait": "◌", "bad": "✖", "other": "○"}
COLOURS = {"ok": "green", "wait": "yellow", "bad": "red", "other": "dim"}
_HEAD = ("id", "type", "at")
_FIRST = ("name", "state", "reason")
"""What people look for stands where it is not cut off."""


def clean(value: Any) -> Any:
    """`value` with texts that cannot move a cursor or reorder a line; newlines become spaces."""
    if isinstance(value, str):
        if value.isprintable():
            return value
        return printable(value.replace("\n", " ").replace("\t", " "))
    if isinstance(value, dict):
        return {key: clean(each) for key, each in value.items()}
    if isinstance(value, list):
        return [clean(each) for each in value]
    return value


def printable(text: str) -> str:
    """`text` with its newlines, and without other characters that act on a terminal."""
    return "".join(c for c in text if c == "\n" or c.isprintable())


def time_of(at: str) -> str:
    """``14:03:59`` in this machine's time zone, from an ISO time."""
    try:
        return datetime.fromisoformat(at).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return at[:8]


def ms(value: float | None) -> str:
    """``0.7 ms``, ``12 ms``, ``1.2 s``; a dash for what is not known."""
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value / 1000:.1f} s"
    return f"{value:.1f} ms" if value < 10 else f"{value:.0f} ms"


def rate(value: float | None) -> str:
    """Tokens per second."""
    return "- tok/s" if value is None else f"{value:.1f} tok/s"


_DONE = {"reading": "read", "packing": "packed", "rounding": "rounded"}


def loading(load: Mapping[str, Any]) -> str:
    """``llama:0-11 · 31 % packed (12.4 of 40.1 GB) · needs 41022 MB · for 12 s`` of a load."""
    parts = [str(load["name"])]
    total = load["total_bytes"]
    if total:
        done = load["done_bytes"]
        unit, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
        what = _DONE.get(load["phase"], load["phase"])
        share = f"{100 * done // total} % {what}"
        parts.append(f"{share} ({done / unit:.1f} of {total / unit:.1f} {name})")
    return " · ".join([*parts, f"needs {load['need_mb']} MB", f"for {load['age_s']:.0f} s"])


def count(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def short(identity: str | None) -> str:
    """A node's id as people see it."""
    return (identity or "")[:6]


def event_line(event: Mapping[str, Any]) -> str:
    """``14:03:59 peer_up name=attic ...``."""
    keys = [key for key in _FIRST if key in event]
    keys += [key for key in event if key not in (*_HEAD, *_FIRST)]
    told = (f"{key}={_short(event[key])}" for key in keys)
    return f"{time_of(event['at'])} {event['type']} {' '.join(told)}".rstrip()


def _short(value: Any) -> str:
    if isinstance(value, str):
        return f"{value[:12]}…" if len(value) > 40 and " " not in value else value
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)
