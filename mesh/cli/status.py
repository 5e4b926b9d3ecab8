"""`hearthnet status`, `peers` and `models`: the whole picture, and parts of it."""

from __future__ import annotations

import sys
from contextlib import aclosing
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.deploying import print_deployments
from mesh.cli.options import AskedDaemon, asks
from mesh.cli.output import note, print_json_line, print_table, route_line, say
from mesh.cli.pull import come_line, transfer_line
from mesh.units import memory_size

if TYPE_CHECKING:
    from mesh.client import Client

_CLEAR = "\x1b[H\x1b[2J"
_POLL_S = 30
"""So long the daemon waits in one request."""
_REDRAW_S = 0.5
"""What changes faster is drawn together."""


WaitReady = Annotated[
    str | None,
    typer.Option(
        "--wait-ready",
        metavar="MODEL",
        help="Wait until all of it is ready, and show where; exit code 5: not in time.",
    ),
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
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on, and show what changes until Ctrl-C.")
    ] = False,
    wait_ready: WaitReady = None,
    layers: Layers = None,
    timeout: Timeout = 600.0,
) -> None:
    """Show this node, its peers, models, deployments, shards and running generations."""
    if wait_ready is not None:
        if watch:
            raise typer.BadParameter("--watch and --wait-ready exclude each other.")
        daemon.show(
            daemon.ask(lambda client: _when_ready(client, wait_ready, layers, timeout)), _show_ready
        )
    elif layers is not None:
        raise typer.BadParameter("--layers are those of --wait-ready MODEL.")
    elif watch:
        daemon.ask(lambda client: _watch(client, as_json=daemon.json))
    else:
        daemon.show(daemon.ask(lambda client: client.status()), show)


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


def _show_ready(row: dict[str, Any]) -> None:
    for worker in row["workers"]:
        say(f"ready: {row['model_name']} {worker['layers']} on {worker['holder'][:6]}")


async def _watch(client: Client, *, as_json: bool) -> None:
    """The picture, drawn anew when it changes; as JSON, a line for each. Ends with the daemon."""
    import asyncio

    from mesh.config import terminal_features

    picture: dict[str, Any] = {}
    news = asyncio.Event()

    async def hear() -> None:
        """Never waits for what is drawn: then that would be of the past."""
        async with aclosing(client.follow()) as updates:
            async for update in updates:
                if update["status"]:
                    picture.update(update["status"])
                    news.set()
                    if as_json:
                        print_json_line(picture)

    async def draw() -> None:
        clears = sys.stdout.isatty() and terminal_features()[0]
        while await news.wait():
            news.clear()
            if not as_json:
                sys.stdout.write(_CLEAR if clears else "")
                show(picture)
                say("" if clears else "---")
            await asyncio.sleep(_REDRAW_S)

    tasks = [asyncio.create_task(hear(), name="hear"), asyncio.create_task(draw(), name="draw")]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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


def show(picture: dict[str, Any]) -> None:
    """Print what `GET /mesh/v1/status` returned."""
    node = picture["node"]
    mesh = "on" if node["enabled"] else "off (local models only)"
    say(f"{node['name']} ({node['id'][:6]}) · {node['software']} · mesh {mesh}")
    say(f"API {node['api']} · nodes {node['endpoint']} · state {node['state_dir']}")
    if (tls := node["api_tls"]) is not None:
        say(f"API certificate {tls['certificate']} · SHA-256 {tls['sha256']}")
    _show_house(picture)
    if picture["shards"]:
        say()
    for shard in picture["shards"]:
        say(f"held here: {shard['model_id']} {shard['layers']}{_taken(shard.get('memory'))}")
    if (memory := picture.get("memory")) is not None:
        free, total = (memory_size(memory[of] << 20) for of in ("free_mb", "total_mb"))
        say(f"free: {free} of {total} ({memory['bound']})")
    _show_work(picture)
    print_accounts(picture["accounts"])
    for reason in picture["reasons"]:
        note(f"note: {reason}")
    for warning in picture["warnings"]:
        note(f"warning: {warning}")


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
    if deployed := picture.get("deployments"):
        say()
        print_deployments(deployed)
    weights = picture.get("weights", {})
    for transfer in weights.get("transfers", ()):
        say(f"fetching: {transfer['model_id']}, {transfer_line(transfer)}")
    for row in weights.get("elsewhere", ()):
        say(f"fetching on {row['node']}: {row['model_id']}, {come_line(row)}")


def _taken(memory: dict[str, int] | None) -> str:
    if memory is None:
        return ""
    weights, caches, headroom = (
        memory_size(memory[of] << 20) for of in ("weights_mb", "caches_mb", "headroom_mb")
    )
    return f" · {weights} of weights, {caches} of caches, {headroom} to compute"


def print_accounts(reports: list[dict[str, Any]]) -> None:
    """Who holds or uses how much of what, and of how much; those who were refused something."""
    rows = [
        (
            principal["node"] or f"{principal['kind']} {principal['name'][:12]}",
            report["where"],
            ", ".join(_amount(name, found) for name, found in principal["resources"].items()),
            principal["refused"] or None,
        )
        for report in reports
        for principal in report["principals"]
    ]
    if rows:
        say()
        print_table(("WHO", "WHERE", "HOLDS", "REFUSED"), rows)


def _amount(name: str, found: dict[str, Any]) -> str:
    """``3/8 streams``, ``1.5/16 MiB buffered``, ``7 events per minute``."""
    words = name.replace("_", " ")
    unit = 2**20 if "bytes" in name else 1
    amount = f"{found['held' if 'held' in found else 'used'] / unit:.3g}"
    limits = [limit for limit in (found["limit"], found.get("total")) if limit is not None]
    most = f"/{min(limits) / unit:.3g}" if limits else ""
    return f"{amount}{most} {words.replace('bytes', 'MiB')}"


def print_models(models: list[dict[str, Any]]) -> None:
    """A table of models; why one cannot be asked is said in words."""
    print_table(
        ("MODEL", "LAYERS", "STATE", "CONTEXT", "NODES"),
        [
            (
                model["id"],
                model["total_layers"],
                model["reason"] or "ready",
                model["context"],
                ", ".join(model["nodes"]),
            )
            for model in models
        ],
    )


def print_peers(peers: list[dict[str, Any]]) -> None:
    """A table of peers and the layers each holds."""
    if not peers:
        say("no other nodes seen")
        return
    print_table(
        ("PEER", "ID", "STATE", "RTT MS", "ADDRESS", "LAYERS"),
        [
            (
                peer["name"],
                peer["id"][:6],
                peer["state"],
                None if peer["rtt_ms"] is None else f"{peer['rtt_ms']:.1f}",
                peer["address"],
                ", ".join(f"{shard['model_id']} {shard['layers']}" for shard in peer["shards"]),
            )
            for peer in peers
        ],
    )
