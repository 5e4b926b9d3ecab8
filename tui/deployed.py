"""What is deployed, how far each part of it is, and what is brought to which machine's disk.

Pure functions of the daemon's status, as `tui.picture`, and no textual either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tui.picture import Picture
from tui.words import count, fetching, ordinals, pace, share, time_of

_STATES = {
    "READY": ("ok", "ready"),
    "PARTLY": ("wait", "answers, not all is up"),
    "QUEUED": ("wait", "waiting"),
    "PROVISIONING": ("wait", "fetching"),
    "DEPLOYING": ("wait", "loading"),
    "LEAVING": ("wait", "unloading"),
    "FAILED": ("bad", "failed"),
    "AWAY": ("bad", "its node is away"),
    "RESTING": ("other", "resting"),
}
_ON_ITS_WAY = frozenset({"PARTLY", "QUEUED", "PROVISIONING", "DEPLOYING", "LEAVING"})
_COUNTED = frozenset({"PROVISIONING", "DEPLOYING"})
"""Phases of which bytes are told: those that come, or that are loaded."""
_LATE = frozenset({"wait", "bad"})
_SETTINGS = ("quant", "context", "dedicated", "nodes", "layers")
LEVELS = {"HOT": "HOT, on a device", "WARM": "WARM, in memory", "COLD": "COLD, on disk"}


@dataclass(frozen=True, slots=True)
class DeployedSpan:
    """A span of a deployment: of which replica, counted from 1, a glyph's state, words, fewer of
    them, and how much of its bytes has come, from 0 to 1; None where that is not counted."""

    replica: int
    node: str
    layers: str
    state: str
    words: str
    briefly: str
    come: float | None


@dataclass(frozen=True, slots=True)
class Deployed:
    """A deployment: a glyph's state and words for all of it, then its spans.

    `is_coming` while something is brought up or down; `level` is empty where it is not told.
    `settings` are what is wished for beside replicas, in the form that `POST /mesh/v1/plan` has.
    """

    key: str
    model: str
    ready: int
    wished: int
    state: str
    words: str
    level: str
    is_coming: bool
    missing: tuple[str, ...]
    why: str
    parts: tuple[DeployedSpan, ...]
    settings: Mapping[str, Any]

    @property
    def replicas(self) -> str:
        """``1 of 2``."""
        return f"{self.ready} of {self.wished}"


@dataclass(frozen=True, slots=True)
class Download:
    """A transfer to a machine: which part of its bytes has come, and the line that says all."""

    key: str
    model: str
    come: float | None
    words: str


def deployed(picture: Picture) -> list[Deployed]:
    """A row for each deployment, in the daemon's order."""
    own = picture.status["node"]["id"] if picture.status else ""
    return [_deployed(row, own) for row in picture.rows("deployments")]


def downloads(picture: Picture) -> list[Download]:
    """A row for each transfer to this machine, then for those to others as far as they tell."""
    here = [
        Download(row["id"], row["model_id"], _come(row), fetching(row))
        for row in _weights(picture, "transfers")
    ]
    there = [
        Download(
            f"{row['node_id']} {row['weights_sha256']}", row["model_id"], _come(row),
            f"{fetching(row)} · to {row['node']}",
        )
        for row in _weights(picture, "elsewhere")
    ]  # fmt: skip
    return here + there


def on_disk(picture: Picture) -> list[str]:
    """A line for each checkpoint on this machine's disk: which of it, and how much that is."""
    return [_held(row) for row in _weights(picture, "models")]


def coming(picture: Picture) -> list[tuple[str, str]]:
    """A glyph's state and a line for whatever is brought up or fetched now, and what failed."""
    lines = []
    for found in deployed(picture):
        if not (found.is_coming or found.state == "bad"):
            continue
        late = [part for part in found.parts if part.state != "ok"]
        said = f"{found.model} · {found.replicas} {_noun(found.wished)} · {found.words}"
        parts = ", ".join(f"{part.node} {part.layers} {part.briefly}" for part in late)
        lines.append((found.state, f"{said} · {parts}" if parts else said))
    lines += [("wait", f"fetching {found.words}") for found in downloads(picture)]
    return lines


def known_models(picture: Picture) -> list[str]:
    """Names that a wish may have: what is deployed, on disk, or held by anybody."""
    rows = picture.rows("deployments")
    names = [row["model_id"] for row in rows] + [row["id"] for row in picture.rows("models")]
    for row in _weights(picture, "models"):
        names += [row["id"], *([row["origin"]] if row.get("origin") else [])]
    return sorted(set(names))


def what_ends(found: Deployed, picture: Picture) -> str:
    """The question before a deployment is evicted."""
    held = [f"{part.layers} on {part.node}" for part in found.parts if part.state == "ok"]
    late = [f"{part.layers} on {part.node}" for part in found.parts if part.state in _LATE]
    text = f"Evict {found.model}? "
    text += f"Unloaded: {', '.join(held)}. " if held else "Nothing of it is loaded. "
    text += f"No longer brought up: {', '.join(late)}. " if late else ""
    running = sum(row["model"] == found.model for row in picture.rows("generations"))
    if running:
        text += f"{count(running, 'answer')} running now must go another way, or ends. "
    return text + "What is on disk stays."


def gaps(wished: Mapping[str, Any]) -> list[str]:
    """What a wish takes away for a moment; `wished` is what deploying and scaling answer."""
    return [
        f"{wished['model_id']} is away for a moment: {gap['node']} drops layers {gap['drops']}"
        f" before it loads layers {gap['loads']}."
        for gap in wished["gaps"]
    ]


def _noun(replicas: int) -> str:
    return "replica" if replicas == 1 else "replicas"


def _deployed(row: Mapping[str, Any], own: str) -> Deployed:
    state, words = _state(row["state"])
    replicas = ordinals(row["spans"])
    level = row.get("level") or ""
    return Deployed(
        key=row["deployment"],
        model=row["model_id"],
        ready=row["replicas_ready"],
        wished=row["replicas"],
        state=state,
        words=words,
        level=_stays(LEVELS.get(level, level), row),
        is_coming=row["state"] in _ON_ITS_WAY,
        missing=tuple(row["missing"]),
        why=row["why"] or "",
        parts=tuple(_part(span, replicas[span["replica"]], own) for span in row["spans"]),
        settings={name: row[name] for name in _SETTINGS if row.get(name)},
    )


def _part(span: Mapping[str, Any], replica: int, own: str) -> DeployedSpan:
    state, words = _state(span["phase"])
    if span["phase"] == "QUEUED" and span["node_id"] != own and not span["reason"]:
        words = "not up yet"  # how far it is, only that node knows
    briefly = words
    is_counted = span["phase"] in _COUNTED and span["total_bytes"]
    if is_counted:
        far = share(span["done_bytes"], span["total_bytes"])
        words = " · ".join([words, far, *pace(span)])
    if span["reason"]:
        words += f": {span['reason']}"
    come = _come(span) if is_counted else None
    if come is not None:
        briefly += f" {int(100 * come)} %"
    return DeployedSpan(replica, span["node"], span["layers"], state, words, briefly, come)


def _state(name: str) -> tuple[str, str]:
    """A glyph's state and a word; a name from a newer daemon is said as it is."""
    return _STATES.get(name, ("wait", name.lower()))


def _come(row: Mapping[str, Any]) -> float | None:
    """How much has come, from 0 to 1; None where it is not known how much there is."""
    total = row["total_bytes"]
    return min(1.0, row["done_bytes"] / total) if total else None


def _held(row: Mapping[str, Any]) -> str:
    if not row["partial"]:
        which = "all of it"
    else:
        spans = ", ".join(row["layers"])
        which = f"layers {spans} of {row['total_layers']}" if spans else "no layers"
        which += " and the ends" if row["ends"] else ""
    if row["partial"] and row["total_bytes"]:
        return f"{row['id']} · {which} · {share(row['here_bytes'], row['total_bytes'])}"
    return f"{row['id']} · {which}"


def _weights(picture: Picture, part: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (picture.status.get("weights") or {}).get(part) or []
    return found


def _stays(level: str, row: Mapping[str, Any]) -> str:
    """``HOT, on a device, rests 09:03``: the level, and when it goes down unless it is used."""
    at = row.get("rests_at")
    return f"{level}, rests {time_of(at)[:5]}" if at else level
