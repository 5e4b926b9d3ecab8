"""Texts for the screen: harmless ones from other machines, times, numbers, events in a line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from mesh.units import data_share, data_size, lasting, memory_size, since

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
    """``llama:0-11 · 31 % packed (12.4 of 40.1 GB) · needs 40.1 GiB · for 12 s`` of a load."""
    parts = [str(load["name"])]
    if load["total_bytes"]:
        what = _DONE.get(load["phase"], load["phase"])
        parts.append(share(load["done_bytes"], load["total_bytes"], what))
    need = memory_size(load["need_mb"] << 20)
    return " · ".join([*parts, f"needs {need}", f"for {load['age_s']:.0f} s"])


def share(done: int, total: int, what: str = "") -> str:
    """``31 % read (12.4 of 40.0 GB)`` of bytes; never 100 % before it is all."""
    done = min(done, total)
    part = f"{100 * done // total} % {what}".rstrip()
    return f"{part} ({data_share(done, total)})"


_WELL = ("up", "starting", "stopped", "resting")


def out_of_order(process: Mapping[str, Any]) -> str | None:
    """``the jobs' process is ended: killed by signal 9`` of a process that is; None where it is
    well."""
    if process["state"] in _WELL:
        return None
    if process.get("held"):
        return f"{process['name']} is not started: {process['held']}"
    ending = process["ending"]
    return f"{process['name']} is {process['state']}{f': {ending}' if ending else ''}"


_UNDER_WAY = {"waiting": "waiting", "looking": "looking for who has it"}


def fetching(transfer: Mapping[str, Any]) -> str:
    """``qwen · 34 % (4.1 of 12.0 GB) · 52.1 MB/s · 2 min left · from attic`` of a transfer."""
    parts = [str(transfer["model_id"])]
    if transfer["total_bytes"]:
        parts.append(share(transfer["done_bytes"], transfer["total_bytes"]))
    return " · ".join([*parts, *_how(transfer)])


def _how(transfer: Mapping[str, Any]) -> list[str]:
    """What is said of a transfer beside its bytes: rate, time left, sources, what it waits for."""
    parts = []
    if word := _UNDER_WAY.get(transfer.get("state", "")):
        parts.append(word)
    parts += pace(transfer)
    names = [source["name"] for source in transfer.get("sources", ())]
    if names:
        parts.append(f"from {', '.join(names)}")
    return [*parts, transfer["note"]] if transfer.get("note") else parts


def pace(row: Mapping[str, Any]) -> list[str]:
    """``52.1 MB/s`` and ``2 min left``, as far as they are told."""
    parts = []
    if row.get("bytes_per_s"):
        parts.append(f"{data_size(row['bytes_per_s'])}/s")
    if row.get("eta_s") is not None:
        parts.append(f"{lasting(row['eta_s'])} left")
    return parts


def count(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def rests_in(row: Mapping[str, Any], now: datetime) -> str | None:
    """``4 min``: how long a deployment stays up unless somebody uses it; None of one that is in
    use, or that never rests."""
    at = row.get("rests_at")
    if at is None:
        return None
    return lasting(max(0.0, (datetime.fromisoformat(at) - now).total_seconds()))


def away(rows: Iterable[Mapping[str, Any]], now: datetime) -> list[str]:
    """``laptop (3 h)``, ``phone``: of members that are not seen, and for how long where known."""
    found = []
    for row in rows:
        name, last_seen = printable(row["name"]), row["last_seen"]
        if last_seen is not None:
            name += f" ({since(last_seen, now)})"
        found.append(name)
    return found


def ordinals(spans: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """How people count the replicas of a deployment's spans: 1, 2 and so on, by their numbers,
    which begin at 0 and are never used again."""
    return {number: at for at, number in enumerate(sorted({s["replica"] for s in spans}), 1)}


def short(identity: str | None) -> str:
    """A node's id as people see it."""
    return (identity or "")[:6]


def event_line(event: Mapping[str, Any]) -> str:
    """``14:03:59 peer_up name=attic ...``; what an event has no value for is not said."""
    keys = [*_FIRST, *(key for key in event if key not in (*_HEAD, *_FIRST))]
    told = (f"{key}={_short(event[key])}" for key in keys if event.get(key) is not None)
    return f"{time_of(event['at'])} {event['type']} {' '.join(told)}".rstrip()


def happened(event: Mapping[str, Any]) -> str:
    """What happens to the route of an answer, or before it begins."""
    match event["type"]:
        case "shard_failover":
            lost, taken = _layers(event["lost"]), [_layers(name) for name in event["replaced_by"]]
            over = "" if taken == [lost] else f", over layers {' and '.join(taken)}"
            return f"layers {lost} are asked elsewhere now{over}"
        case "shard_status":
            return _left(event["node"], _layers(event["shard_id"]), event)
        case "bringing_up":
            percent = "" if event["percent"] is None else f", {event['percent']} %"
            return f"{event['model']} is not up yet: {event['phase']}{percent}"
        case "queued":
            return f"all shards are full; number {event['position']} in line"
        case kind:
            return f"the distributed run ended: {event.get('reason', kind)}"


_FULL = "it has as many tokens as it may have (max_tokens, or the model's context)"


def cut_off(finish_reason: str | None, extension: Mapping[str, Any]) -> str | None:
    """That an answer ends before it is over, and why, from its ``hearthnet`` object; None of one
    that is over."""
    if finish_reason != "length":
        return None
    return f"cut off: {extension.get('note') or _FULL}"


def left_out(extension: Mapping[str, Any]) -> str | None:
    """How much of a chat an answer did not know, from its ``hearthnet`` object; None where it knew
    all."""
    count = extension.get("left_out_messages", 0)
    return f"without the first {count} messages: the context has no room for all" if count else None


def _left(node: str, layers: str, event: Mapping[str, Any]) -> str:
    """Why an answer goes on without what a node has."""
    if event["status"] == "full":
        return f"{node} has no more room for layers {layers}; looking for others"
    if event["status"] == "draining":
        return f"{node} is stopping; layers {layers} are moved"
    why = event["reason"].rstrip(".")
    return f"{node} dropped out ({why}); looking for others with layers {layers}"


def _layers(shard: str) -> str:
    """``6-11`` of the shard ``toy:6-11``."""
    return shard.rpartition(":")[2]


def _short(value: Any) -> str:
    if isinstance(value, str):
        return f"{value[:12]}…" if len(value) > 40 and " " not in value else value
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)
