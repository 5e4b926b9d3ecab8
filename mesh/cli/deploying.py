"""Following a deployment on its way up: one line for each change, on stderr, until it is there."""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from mesh.cli.output import note, print_table, say
from mesh.errors import BadRequest, MeshError, NoRoute, NotFound, NotReady, from_dict
from mesh.units import data_size, lasting

if TYPE_CHECKING:
    from mesh.client import Client

_T = TypeVar("_T")

Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=0,
        max=86400,
        metavar="S",
        help="With --wait: so many seconds at the most; exit code 5: not in time.",
    ),
]

POLL_S = 0.25
UNLOADED_S = 600.0
"""The longest that layers are waited for to go: those who use them get a while to move."""
EVICTED_S = 30.0
"""The same where nothing is to take their place: who hears of it serves them no more at once."""
REPLANNED_S = 15.0
"""What finds no room on its machine is planned anew after some seconds; that is waited for."""

_Key = tuple[int, str, str]
"""A span's replica, node and layers."""


def require_wait(*, wait: bool, timeout: float | None) -> None:
    """Refuse a time for a wait that nobody asked for."""
    if timeout is not None and not wait:
        raise typer.BadParameter("--timeout goes with --wait.")


async def follow(client: Client, deployment: str, *, answering: bool = False) -> dict[str, Any]:
    """Its row once all of it is up, or, if that is enough, once it can be asked.

    Raises NotFound when somebody evicts it meanwhile, NotReady when it rests meanwhile and all of
    it was to be up, why its model could not be read, and the reason when a span has failed for
    longer than it takes to plan it anew.
    """
    import asyncio

    told: dict[_Key, object] = {}
    model_id = ""
    failures = _Failures()
    while True:
        row = _of(await client.deployments(), deployment, model_id)
        if row["deployment"] != deployment:
            note(
                f"{row['model_id']} was deployed by {row['by']} at the same moment; that deployment"
                f" counts, with its settings ({row['deployment']})"
            )
        deployment, model_id = row["deployment"], row["model_id"]
        spans = {(span["replica"], span["node"], span["layers"]): span for span in row["spans"]}
        for key, span in spans.items():
            far = span["phase"], _percent(span), span["reason"]
            if told.get(key) != far:
                told[key] = far
                note(f"{span['node']}: layers {span['layers']} {in_words(span)}")
        if row["error"] is not None:
            raise from_dict(row["error"])
        is_up = row["state"] == "READY" or (answering and not row["missing"])
        if is_up:
            return row  # who asks one that rests again meanwhile wakes it
        if row["resting"]:
            raise NotReady(
                f"{model_id} rests again: another model had its room, or nobody asked it.",
                fix="Ask it, which wakes it, or have it stay: `hearthnet deploy --dedicated`.",
            )
        failed = failures.lasting(spans, asyncio.get_running_loop().time())
        if failed and row["state"] == "FAILED":
            raise _failure(failed[0])
        await asyncio.sleep(POLL_S)


def _failure(span: dict[str, Any]) -> MeshError:
    """What a span has failed with, in its machine's words; earlier versions say no code."""
    said = span.get("error") or {"code": NoRoute.code, "message": span["reason"], "fix": ""}
    again = "It is tried again by itself; `hearthnet evict` ends that."
    return from_dict(
        {
            **said,
            "message": f"{span['node']} cannot hold layers {span['layers']}: {said['message']}",
            "fix": f"{said['fix']} {again}".strip(),
        }
    )


async def within(seconds: float | None, work: Coroutine[Any, Any, _T], what: str) -> _T:
    """What the work gives; None: however long it takes. Raises NotReady when that is not in time,
    which ends the waiting alone."""
    import asyncio

    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise NotReady(
            f"{what} within {seconds:g} s.",
            fix="It goes on by itself: see `hearthnet status`, or wait longer (--timeout).",
        ) from None


@dataclass(frozen=True, slots=True)
class PlacedSpan:
    """Layers of a model on a machine, to be called so in what is said."""

    node_id: str
    node: str
    model_id: str
    layers: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Of all that is served anywhere, which it is."""
        return self.node_id, self.model_id, self.layers


def spans_of(rows: Iterable[dict[str, Any]]) -> list[PlacedSpan]:
    """What deployments have placed."""
    return [
        PlacedSpan(span["node_id"], span["node"], row["model_id"], span["layers"])
        for row in rows
        for span in row["spans"]
    ]


async def until_unloaded(
    client: Client, spans: Collection[PlacedSpan], *, patience_s: float = UNLOADED_S
) -> None:
    """Once no machine that is here serves any of these, each of which is said as it goes.

    Raises NotReady when none has gone for `patience_s`: layers that a machine was told to hold by
    hand stay there.
    """
    import asyncio

    left, loop = list(spans), asyncio.get_running_loop()
    until = loop.time() + patience_s
    while True:
        served = _served(await client.status())
        for gone in [each for each in left if each.key not in served]:
            left.remove(gone)
            until = loop.time() + patience_s
            note(f"{gone.node}: layers {gone.layers} of {gone.model_id} are unloaded")
        if not left:
            return
        if loop.time() >= until:
            raise NotReady(
                f"{left[0].node} still serves layers {left[0].layers} of {left[0].model_id}.",
                fix="It was told to hold them by hand (`layers` of its settings or of its `up`),"
                " or hears of nothing: see `hearthnet status` there.",
            )
        await asyncio.sleep(POLL_S)


def _served(picture: dict[str, Any]) -> set[tuple[str, str, str]]:
    own = {**picture["node"], "shards": picture["shards"]}
    return {
        (node["id"], shard["model_id"], shard["layers"])
        for node in (own, *picture["peers"])
        for shard in node["shards"]
    }


class _Failures:
    """Since when spans fail: also while they are tried again, unless that gets on."""

    def __init__(self) -> None:
        self._since: dict[_Key, float] = {}

    def lasting(self, spans: dict[_Key, dict[str, Any]], now: float) -> list[dict[str, Any]]:
        """Those that have failed for longer than it takes to plan them anew."""
        for key, span in spans.items():
            if span["phase"] == "FAILED":
                self._since.setdefault(key, now)
            elif span["phase"] in ("DEPLOYING", "READY") or span["done_bytes"]:
                self._since.pop(key, None)
        return [
            span
            for key, span in spans.items()
            if span["phase"] == "FAILED" and now - self._since[key] > REPLANNED_S
        ]


def warn_of_gaps(row: dict[str, Any]) -> None:
    """Say what a wish takes away for a moment; `row` is what `deploy` and `scale` answer."""
    for gap in row["gaps"]:
        note(
            f"{row['model_id']} is away for a moment: {gap['node']} drops layers {gap['drops']}"
            f" before it loads layers {gap['loads']}"
        )


def _of(rows: list[dict[str, Any]], deployment: str, model_id: str) -> dict[str, Any]:
    """The row of a deployment, or of the one that it was merged into, or that another machine
    wished for while this one read the model. Raises NotFound."""
    for row in rows:
        if deployment in (row["deployment"], *row["merged"]):
            return row
    for row in rows:
        if row["model_id"] == model_id:
            return row
    raise NotFound("It was evicted meanwhile.", fix="Deploy it again.")


def in_words(span: dict[str, Any]) -> str:
    """``is being fetched, 34 %, 52.1 MB/s, 2 min left``, ``is loading, 60 %``, ``failed: needs 9
    MiB, 3 are free``."""
    words = _WORDS.get(span["phase"], str(span["phase"]).lower())
    if span["phase"] == "PROVISIONING" and not span["total_bytes"]:
        words = "is looked for"  # it may be on the disk already
    if span["phase"] in ("PROVISIONING", "DEPLOYING") and span["total_bytes"]:
        words += f", {_percent(span)} %"
        is_coming = span["done_bytes"] < span["total_bytes"]
        if is_coming and span["bytes_per_s"]:
            words += f", {data_size(span['bytes_per_s'])}/s"
        if is_coming and span["eta_s"] is not None:
            words += f", {lasting(span['eta_s'])} left"
    return words + (f": {span['reason']}" if span["reason"] else "")


def _percent(span: dict[str, Any]) -> int:
    return int(100 * span["done_bytes"] // span["total_bytes"]) if span["total_bytes"] else 0


_WORDS = {
    "QUEUED": "waits",
    "PROVISIONING": "is being fetched",
    "DEPLOYING": "is loading",
    "READY": "is ready",
    "FAILED": "failed",
    "LEAVING": "is being unloaded",
    "AWAY": "is away",
    "RESTING": "rests",
}


def print_deployments(rows: list[dict[str, Any]]) -> None:
    """A table of deployments, one line for each span."""
    from datetime import UTC, datetime

    from tui.words import ordinals, rests_in

    now = datetime.now(UTC)
    print_table(
        ("DEPLOYED", "STATE", "RESTS IN", "REPLICA", "NODE", "LAYERS", "PHASE"),
        [
            (
                row["model_id"],
                f"{row['state']} ({row['level']})",
                rests_in(row, now) or ("in use" if row.get("in_use") else None),
                f"{ordinals(row['spans']).get(span['replica'], 'none')} of {row['replicas']}",
                span["node"],
                span["layers"],
                in_words(span),
            )
            for row in rows
            for span in row["spans"] or [_NOTHING]
        ],
    )
    for row in rows:
        if row["missing"]:
            note(f"note: {row['model_id']} misses layers {', '.join(row['missing'])}")
        if row["why"]:
            note(f"note: {row['model_id']} was planned anew: {row['why']}")


_NOTHING = {"replica": None, "node": None, "layers": None, "phase": "-", "reason": None}


def shown(row: dict[str, Any]) -> None:
    """What came of a wish."""
    many = "replica" if row["replicas"] == 1 else "replicas"
    say(f"{row['model_id']}: {row['replicas']} {many}, {row['state']} ({row['deployment']})")
    print_deployments([row])


def pins(layers: list[str] | None) -> list[str] | None:
    """``NODE=LO-HI`` each; none of them for ``none`` alone. Raises BadRequest."""
    if layers == ["none"]:
        return []
    for text in layers or ():
        node, equals, span = text.rpartition("=")
        if not (node and equals and span):
            raise BadRequest(f"--layers {text} is not NODE=LO-HI.", fix="As in attic=0-11.")
    return layers or None
