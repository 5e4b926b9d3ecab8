"""`hearthnet status`, `peers` and `models`: the whole picture, and parts of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from math import ceil, inf
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.deploying import print_deployments
from mesh.cli.options import AskedDaemon, asks
from mesh.cli.output import few, note, print_table, route_line, say
from mesh.cli.pull import come_line, transfer_line
from mesh.cli.watching import Draw, watch
from mesh.units import memory_size

if TYPE_CHECKING:
    from mesh.client import Client

_BYTES = re.compile(r"(\w+) bytes")
_POLL_S = 30
"""So long the daemon waits in one request."""
_LITTLE = 0.01
"""Of a limit: who holds or uses less of it is listed with all only."""
_NOTES = 2
"""Of one model's notes, so many are listed, unless all are asked for."""
_WELL = {"up": 1, "this node": 2, "other hearth": 3}
"""With a peer that stands otherwise something is wrong."""
_SKIPPED = 4
"""Of the reasons to leave interfaces out, so many: where containers run, there are dozens."""


WaitReady = Annotated[
    str | None,
    typer.Option(
        "--wait-ready",
        metavar="MODEL",
        help="Wait until all of it is ready, and show where; exit code 5: not in time.",
    ),
]
All = Annotated[
    bool, typer.Option("--all", help="Every note, and who holds or uses next to nothing as well.")
]
Layers = Annotated[
    str | None, typer.Option(metavar="LO-HI", help="Wait for these layers, not for all.")
]
Timeout = Annotated[
    float, typer.Option(min=0, max=86400, metavar="S", help="Wait so many seconds at the most.")
]


@asks
def status(
    daemon: AskedDaemon,
    *,
    follow: Annotated[
        bool, typer.Option("--watch", help="Go on, and show what changes until Ctrl-C.")
    ] = False,
    everything: All = False,
    wait_ready: WaitReady = None,
    layers: Layers = None,
    timeout: Timeout = 600.0,
) -> None:
    """Show this node, its peers, models, deployments, shards and running generations."""
    if wait_ready is not None:
        if follow:
            raise typer.BadParameter("--watch and --wait-ready exclude each other.")
        row = daemon.ask(lambda client: _when_ready(client, wait_ready, layers, timeout))
        daemon.show(row, lambda row: print_ready(row, daemon.ask(lambda client: client.status())))
    elif layers is not None:
        raise typer.BadParameter("--layers are those of --wait-ready MODEL.")
    elif follow:
        draw = _drawn(everything=everything)
        daemon.ask(lambda client: watch(client, lambda news: news, draw, as_json=daemon.json))
    else:
        picture = daemon.ask(lambda client: client.status())
        daemon.show(picture, lambda picture: show(picture, everything=everything))


async def _when_ready(
    client: Client, model: str, layers: str | None, timeout_s: float
) -> dict[str, Any]:
    """Who serves the model, once it is ready. Raises NotReady when it is not in time."""
    import time

    from mesh.errors import NotReady

    until = time.monotonic() + timeout_s
    while True:
        left_s = max(0.0, until - time.monotonic())
        try:
            return await client.when_ready(model, layers=layers, wait=min(_POLL_S, ceil(left_s)))
        except NotReady:
            if time.monotonic() >= until:
                raise


def print_ready(row: dict[str, Any], picture: dict[str, Any]) -> None:
    """Print which nodes, by the names that the status has, serve what of a model that is ready."""
    names = {each["id"]: each["name"] for each in (picture["node"], *picture["peers"])}
    for worker in row["workers"]:
        holder = worker["holder"]
        name = names.get(holder) or holder[:6]
        say(f"ready: {row['model_name']} {worker['layers']} on {name}")


def _drawn(*, everything: bool) -> Draw:
    """Prints the picture; where nothing is cleared, no note that was just there."""
    told: list[str] = []

    def draw(picture: dict[str, Any], is_cleared: bool) -> None:
        show(picture, everything=everything, told=() if is_cleared else told)
        told[:] = _notes(picture, everything=everything)

    return draw


@asks
def peers(daemon: AskedDaemon) -> None:
    """List the other nodes and the layers each holds."""
    found = daemon.ask(lambda client: client.peers())
    daemon.show({"peers": found}, lambda _: print_peers(found))


@asks
def models(daemon: AskedDaemon) -> None:
    """List the models of the mesh and what keeps each from answering."""
    found = daemon.ask(lambda client: client.models())
    daemon.show({"models": found}, lambda _: print_models(found))


def show(picture: dict[str, Any], *, everything: bool = False, told: Collection[str] = ()) -> None:
    """Print what `GET /mesh/v1/status` returned, but for notes that were `told`.

    Without `everything` what matters to few is left out.
    """
    from tui.words import out_of_order

    node = picture["node"]
    mesh = "on" if node["enabled"] else "off (local models only)"
    say(f"{node['name']} ({node['id'][:6]}) · {node['software']} · mesh {mesh}")
    if node["paused"]:
        say("paused: others get nothing from it, until `hearthnet resume`")
    say(f"API {node['api']} · nodes {node['endpoint']} · state {node['state_dir']}")
    if (tls := node["api_tls"]) is not None:
        say(f"API certificate {tls['certificate']} · SHA-256 {tls['sha256']}")
    _show_interfaces(node.get("interfaces", ()), everything=everything)
    for process in picture["processes"]:
        if trouble := out_of_order(process):
            say(f"out of order: {trouble}")
    _show_house(picture)
    if picture["shards"]:
        say()
    for shard in picture["shards"]:
        where = f" on {shard['device']}" if picture.get("devices") else ""
        taken = _taken(shard.get("memory"))
        say(f"held here: {shard['model_id']} {shard['layers']}{where}{taken}")
    _show_memory(picture)
    _show_work(picture)
    print_accounts(picture["accounts"], everything=everything)
    for line in _notes(picture, everything=everything):
        if line not in told:
            note(line)


def _show_memory(picture: dict[str, Any]) -> None:
    """What is free, and what of it the owner gives to models."""
    devices = picture.get("devices") or [picture.get("memory")]
    for memory in filter(None, devices):
        free, total = (memory_size(memory[of] << 20) for of in ("free_mb", "total_mb"))
        where = f" on {memory['device']}" if "device" in memory else ""
        say(f"free{where}: {free} of {total} ({memory['bound']})")
    if (cap := picture["node"].get("memory_cap")) is not None:
        taken, limit = (memory_size(cap[of] << 20) for of in ("taken_mb", "limit_mb"))
        say(f"given to models: {taken} of at most {limit} ({cap['setting']})")


def _notes(picture: dict[str, Any], *, everything: bool) -> list[str]:
    """The lines of notes and warnings; of those about one model's computing the first few."""
    about = {shard["shard_id"]: shard["model_id"] for shard in picture["shards"]}
    about |= {f"ends of {model['id']}": model["id"] for model in picture["models"]}
    lines, seen = [], Counter[str]()
    for reason in picture["reasons"]:
        model = about.get(reason.partition(": ")[0])
        if model is not None:
            seen[model] += 1
        if everything or model is None or seen[model] <= _NOTES:
            lines.append(f"note: {reason}")
    left = sum(max(0, many - _NOTES) for many in seen.values())
    if left and not everything:
        lines.append(f"note: {left} more on how the models are computed: `hearthnet status --all`")
    return [*lines, *map(_warning, picture["warnings"])]


def _warning(row: dict[str, Any]) -> str:
    """What was said once, and how long ago: it may not be so any more."""
    from datetime import UTC, datetime

    from mesh.units import since

    said = f"warning: {row['message']} {row['fix']}".rstrip()
    at = row.get("at")
    if at is None:
        return said
    return f"{said} ({since(at, datetime.now(UTC))} ago)"


def _show_work(picture: dict[str, Any]) -> None:
    """What loads, is fetched and is answered now."""
    from tui.words import loading

    for load in picture.get("loads", ()):
        say(f"loading: {loading(load)}")
    for running in picture["generations"]:
        if place := running.get("queued"):
            say(f"waiting: {running['model']}, number {place} in line for room")
            continue
        say(f"running: {running['model']} over {route_line(running['route'])}")


def _show_house(picture: dict[str, Any]) -> None:
    """Models, nodes, and what the hearth wishes to have loaded."""
    say()
    print_models(picture["models"])
    say()
    print_peers(picture["peers"])
    _show_away(picture["node"].get("away", ()))
    if deployed := picture.get("deployments"):
        say()
        print_deployments(deployed)
    weights = picture.get("weights", {})
    for transfer in weights.get("transfers", ()):
        say(f"fetching: {transfer['model_id']}, {transfer_line(transfer)}")
    for row in weights.get("elsewhere", ()):
        say(f"fetching on {row['node']}: {row['model_id']}, {come_line(row)}")


def _show_away(rows: Sequence[dict[str, Any]]) -> None:
    """Members that no row of the peers is about, and since when."""
    from datetime import UTC, datetime

    from tui.words import away

    if rows:
        say(f"away: {few(away(rows, datetime.now(UTC)))}")


def _show_interfaces(rows: Sequence[dict[str, Any]], *, everything: bool) -> None:
    """Where other nodes are met, and where not, with the reason."""
    for row in rows:
        if row["used"]:
            say(f"network: {row['name']} {row['address']}, {row['why']}")
    left: dict[str, list[str]] = {}
    for row in rows:
        if not row["used"]:
            left.setdefault(row["why"], []).append(row["name"])
    shown = list(left.items()) if everything else list(left.items())[:_SKIPPED]
    for why, names in shown:
        say(f"network: not {', '.join(names)}: {why}")
    if many := sum(map(len, left.values())) - sum(len(names) for _, names in shown):
        say(f"network: not {many} others: `hearthnet status --all`")


def _taken(memory: dict[str, int] | None) -> str:
    if memory is None:
        return ""
    weights, caches, headroom = (
        memory_size(memory[of] << 20) for of in ("weights_mb", "caches_mb", "headroom_mb")
    )
    return f" · {weights} of weights, {caches} of caches, {headroom} to compute"


def print_accounts(reports: list[dict[str, Any]], *, everything: bool = False) -> None:
    """Who holds or uses how much of what, and of how much; those who were refused something.

    Without `everything` not who holds or uses next to nothing.
    """
    rows = []
    for report in reports:
        for principal in report["principals"]:
            amounts = [
                _amount(name, found)
                for name, found in principal["resources"].items()
                if everything or _share(found) >= _LITTLE
            ]
            if amounts or principal["refused"] or everything:
                who = principal["node"] or f"{principal['kind']} {principal['name'][:12]}"
                refused = principal["refused"] or None
                rows.append((who, report["where"], ", ".join(amounts), refused))
    if rows:
        say()
        print_table(("WHO", "WHERE", "HOLDS", "REFUSED"), rows)


def _share(found: dict[str, Any]) -> float:
    """How much of what may be held or used is; 1 where that has no limit."""
    most = _most(found)
    return 1.0 if most is None else _held(found) / most if most else inf


def _amount(name: str, found: dict[str, Any]) -> str:
    """``3 of 8 streams``, ``1.5 of 16 MiB buffered``, ``7 events per minute``."""
    words = _BYTES.sub(r"MiB of \1s", name.replace("_", " ")).replace("bytes", "MiB")
    unit = 2**20 if "bytes" in name else 1
    most = _most(found)
    limit = "" if most is None else f" of {_number(most / unit)}"
    return f"{_number(_held(found) / unit)}{limit} {words}"


def _held(found: dict[str, Any]) -> float:
    amount: float = found["held" if "held" in found else "used"]
    return amount


def _most(found: dict[str, Any]) -> float | None:
    return min(
        (limit for limit in (found["limit"], found.get("total")) if limit is not None), default=None
    )


def _number(amount: float) -> str:
    """``100,000``, ``1.5``; never in powers of ten."""
    if amount >= 100:
        return f"{amount:,.0f}"
    shown = f"{amount:.2f}".rstrip("0").rstrip(".")
    return "under 0.01" if shown == "0" and amount > 0 else shown


def print_models(models: list[dict[str, Any]]) -> None:
    """A table of models; why one cannot be asked is said in words, and when one comes to rest."""
    from datetime import UTC, datetime

    from tui.words import rests_in

    now = datetime.now(UTC)
    print_table(
        ("MODEL", "LAYERS", "STATE", "CONTEXT", "NODES"),
        [
            (
                model["id"],
                model["total_layers"],
                model["reason"]
                or (f"ready, rests in {left}" if (left := rests_in(model, now)) else "ready"),
                model["context"],
                few(model["nodes"]),
            )
            for model in models
        ],
    )


def print_peers(peers: list[dict[str, Any]]) -> None:
    """A table of peers and the layers each holds, those first with which something is wrong."""
    if not peers:
        say("no other nodes seen")
        return
    print_table(
        ("PEER", "ID", "STATE", "VERSION", "RTT MS", "ADDRESS", "LAYERS"),
        [
            (
                peer["name"],
                (peer["id"] or "")[:6],  # one given by its address is unknown until it answers
                _standing(peer),
                _version(peer),
                None if peer["rtt_ms"] is None else f"{peer['rtt_ms']:.1f}",
                peer["address"],
                ", ".join(f"{shard['model_id']} {shard['layers']}" for shard in peer["shards"]),
            )
            for peer in sorted(peers, key=_place)
        ],
    )


def _place(peer: dict[str, Any]) -> tuple[int, str]:
    """Where its row goes: among forty nobody would find the one that is lost, and not at all where
    the window has too few lines."""
    return _WELL.get(_standing(peer), 0), str(peer["name"])


def _standing(peer: dict[str, Any]) -> str:
    """``up``, or what is thought of one that is linked and silent."""
    state, doubt = str(peer["state"]), peer.get("verdict")
    return state if state != "up" or doubt in (None, "healthy") else str(doubt)


def _version(peer: dict[str, Any]) -> str | None:
    """``0.1.0``, ``0.0.9 (older)`` than this node's."""
    from mesh.health.skew import version_of

    version = version_of(peer.get("software"))
    return f"{version} ({peer['skew']})" if version and peer.get("skew") else version
