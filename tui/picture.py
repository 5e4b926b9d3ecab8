"""What there is to show, and what follows from it: pure functions of the daemon's status.

No textual here: what is said on a screen can be checked without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mesh.types import LayerRange
from tui.words import count, ms

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
GAP = "·"


@dataclass(frozen=True, slots=True)
class Lost:
    """No daemon answers. The next attempt is made in `retry_s` seconds."""

    why: str
    fix: str
    retry_s: float


@dataclass(frozen=True, slots=True)
class Picture:
    """The latest status, the latest events, and why no daemon answers, where none does."""

    status: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Mapping[str, Any], ...] = ()
    lost: Lost | None = None

    def rows(self, part: str) -> list[dict[str, Any]]:
        """A part of the status that is a list; empty while it is not known."""
        found: list[dict[str, Any]] = self.status.get(part) or []
        return found


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether it works: ``ok``, ``wait`` or ``bad``, and the one line that says so."""

    state: str
    words: str


@dataclass(frozen=True, slots=True)
class ShownNode:
    """One node: its letter on the bars, how it is, how far away and what it holds."""

    letter: str
    key: str
    name: str
    state: str
    word: str
    rtt_ms: float | None
    shards: tuple[tuple[str, LayerRange], ...]
    row: Mapping[str, Any] = field(repr=False, default_factory=dict)


@dataclass(frozen=True, slots=True)
class Coverage:
    """A model's layers and who holds them: for each layer the letters of its holders."""

    model: str
    holders: tuple[str, ...]
    missing: tuple[str, ...]
    state: str
    words: str

    def cells(self, width: int) -> list[str]:
        """The bar in so many cells: the letters of those who hold all layers in it, or a gap."""
        total = len(self.holders)
        count = total * min(4, width // total) if width >= total else width
        found = []
        for cell in range(count):
            first = cell * total // count
            inside = self.holders[first : max(first + 1, (cell + 1) * total // count)]
            shared = "".join(letter for letter in inside[0] if all(letter in x for x in inside))
            # Where nobody holds all of a cell, but its layers are held: the first one's holder.
            found.append((shared or inside[0][:1]) if all(inside) else GAP)
        return found


@dataclass(frozen=True, slots=True)
class SlowestHop:
    """The slowest hop of a route: its place, and what would help."""

    place: int
    words: str


_STRANGER = "other hearth"
"""The state of a neighbour's node: nothing is wrong with it."""


def readiness(picture: Picture) -> Readiness:
    """The first line of the screen."""
    status = picture.status
    if not status:
        return Readiness("wait", "looking for the daemon")
    models = picture.rows("models")
    ready = [model["id"] for model in models if model["runnable"]]
    running = len(picture.rows("generations"))
    here = sum(node.state in ("ok", "wait") for node in nodes(picture))
    if ready:
        words = f"working · {', '.join(ready)} · {count(here, 'node')}"
        speed = sum(row.get("tokens_per_second") or 0.0 for row in picture.rows("generations"))
        if running:
            words += f" · {count(running, 'answer')} at {speed:.1f} tok/s"
        return Readiness("ok", words)
    if not models:
        return Readiness("bad", "not working · no model is held by anybody: hearthnet run MODEL")
    why = "; ".join(f"{model['id']}: {model['reason']}" for model in models)
    states = {_silence(model["reason"]) for model in models}
    state = next(each for each in _VERDICTS if each in states)
    return Readiness(state, f"{_VERDICTS[state]} · {why}")


def nodes(picture: Picture) -> list[ShownNode]:
    """This node first, then its peers in an order that stays."""
    if not picture.status:
        return []
    own = picture.status["node"]
    word = "paused" if own.get("paused") else "here"
    shards = _held(picture.rows("shards"))
    found = [ShownNode("A", own["id"], own["name"], "ok" if word == "here" else "wait", word, None,
                  shards, own)]  # fmt: skip
    others = [peer for peer in picture.rows("peers") if peer["state"] != "this node"]
    # By ids, so that nobody's letter and colour change with a name; strangers behind all others.
    peers = sorted(
        others,
        key=lambda peer: (peer["state"] == _STRANGER, peer["id"] or "~", peer["address"] or ""),
    )
    for number, peer in enumerate(peers, 1):
        letter = LETTERS[number] if number < len(LETTERS) else "*"
        state, said = _health(peer)
        key = peer["id"] or peer["address"]
        held = _held(peer["shards"])
        found.append(ShownNode(letter, key, peer["name"], state, said, peer["rtt_ms"], held, peer))
    return found


def coverages(picture: Picture) -> list[Coverage]:
    """The bar of each model."""
    seen = nodes(picture)
    return [_coverage(model, seen) for model in picture.rows("models")]


def bottleneck(generation: Mapping[str, Any], own_node: str = "") -> SlowestHop | None:
    """The hop that takes the most of a step; None while none was timed.

    Between this machine, whose name is `own_node`, and itself there is no cable to blame.
    """
    route: Sequence[Mapping[str, Any]] = generation["route"]
    total = sum(hop["p50_ms"] for hop in route)
    if not route or total <= 0:
        return None
    place = max(range(len(route)), key=lambda at: route[at]["p50_ms"])
    hop = route[place]
    computing = hop.get("compute_p50_ms") or 0.0
    away = max(0.0, hop["p50_ms"] - computing)
    head = f"{hop['node']} {hop['layers']}: {ms(hop['p50_ms'])} of {ms(total)}"
    speed = generation.get("tokens_per_second")
    own = 1000 / speed - total if speed else 0.0
    if own > total:
        head = f"all hops take {ms(total)} a token, this machine {ms(own)}"
        return SlowestHop(place, f"{head}; it runs embedding and head, ask from a faster one")
    if away > computing and hop["node"] == own_node:
        return SlowestHop(place, f"{head}, {ms(away)} waiting; fewer answers at once would help")
    if away > computing:
        return SlowestHop(place, f"{head}, {ms(away)} on the way; a cable would help")
    if len(route) > 1:
        return SlowestHop(place, f"{head}, computing; fewer layers there would help")
    return SlowestHop(place, f"{head}, computing; a faster machine would help")


def _coverage(model: Mapping[str, Any], seen: Sequence[ShownNode]) -> Coverage:
    total = model["total_layers"]
    holders = [""] * total
    for node in seen:
        for name, layers in node.shards:
            if name == model["id"] and node.state != "bad":
                for layer in range(layers.start, min(layers.stop, total)):
                    holders[layer] += node.letter
    missing = tuple(model["missing"])
    spare = sum(len(letters) > 1 for letters in holders)
    if model["runnable"]:
        state, words = "ok", "ready"
    else:
        state = _silence(model["reason"])
        words = model["reason"] or "cannot be asked"
    if missing and not words.startswith("missing"):
        words += f" · missing layers {', '.join(missing)}"
    if spare:
        words += f" · {count(spare, 'layer')} held more than once"
    return Coverage(model["id"], tuple(holders), missing, state, words)


_VERDICTS = {"wait": "starting", "other": "at rest", "bad": "not working"}
"""What is said where no model answers; of several that are silent, the first of these counts."""


def _silence(reason: str | None) -> str:
    """The state of a model that cannot be asked at once, for this reason."""
    if reason == "loading":
        return "wait"
    return "other" if (reason or "").startswith("at rest") else "bad"


def _health(peer: Mapping[str, Any]) -> tuple[str, str]:
    if peer["state"] == _STRANGER:
        return "other", _STRANGER
    if peer["state"] != "up":
        return "bad", f"{peer['state']}: {peer['reason']}" if peer.get("reason") else peer["state"]
    doubt = peer.get("verdict")
    if doubt in (None, "healthy"):
        return "ok", "up"
    return "bad" if doubt == "lost" else "wait", doubt


def _held(shards: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, LayerRange], ...]:
    return tuple((shard["model_id"], LayerRange.parse(shard["layers"])) for shard in shards)
