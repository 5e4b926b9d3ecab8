"""`hearthnet join`: take up an invitation, whether this node's daemon runs or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.options import ConfigFile, Json, StateDir, ask
from mesh.cli.output import print_json, say

if TYPE_CHECKING:
    from mesh.config import Config


def join(
    code: Annotated[str, typer.Argument(help="The code, or the text behind the QR code.")],
    *,
    peer: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where the invitation is open.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What people call this node.")] = None,
    interface: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|ADDRESS", help="An interface to search on. Repeatable."),
    ] = None,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Join the hearth that a `hearthnet invite` on another machine lets this one into."""
    from mesh.config import load_config

    flags = {"state_dir": state_dir, "name": name, "interface": interface}
    joined = _join(load_config(flags, file=config).config, code, peer)
    if json:
        print_json(joined)
        return
    level = f", as {joined['level']}" if "level" in joined else ""  # earlier daemons do not say it
    say(f"This node is in {joined['name']!r} now{level}; distributed inference is on.")
    if peer is not None:
        say(_next_to_do(peer.rpartition(":")[0], is_running=joined["running"]))
    elif not joined["running"]:
        say("Start it with `hearthnet up`.")


def _next_to_do(host: str, *, is_running: bool) -> str:
    """Where the invitation had to be named, the machine may have to be: windows and nodes are found
    by the same multicast, and are at different ports."""
    from mesh.config import Config

    node = f"{host}:{Config().port}"
    named = f"`hearthnet config set peer {node}` and `hearthnet restart`"
    start = f"If `hearthnet peers` shows nobody: {named}."
    if not is_running:
        start = f"Start it with `hearthnet up --peer {node}`."
    return f'{start} The port is the one that `hearthnet status` there has after "nodes".'


def _join(config: Config, code: str, peer: str | None) -> dict[str, Any]:
    from mesh.client import client_of
    from mesh.paths import StatePaths
    from mesh.runtime import read_daemon

    record = read_daemon(StatePaths(config.state_dir).runtime_file)
    if record is None:
        return {**join_alone(config, code, peer), "running": False}
    client = client_of(record, config.api_key)
    return {**ask(client, lambda client: client.join(code, peer)), "running": True}


def join_alone(config: Config, code: str, peer: str | None) -> dict[str, Any]:
    """Join for a daemon that starts later.

    Raises what `mesh.hearth.joining.join_hearth` raises; AlreadyRunning when one starts just now.
    """
    import asyncio

    from mesh.clock import SystemClock
    from mesh.discovery.interfaces import choose
    from mesh.hearth.joining import JoiningNode, join_hearth
    from mesh.identity.keys import load_or_create
    from mesh.paths import StatePaths
    from mesh.runtime import sole_use

    paths = StatePaths(config.state_dir).create()
    with sole_use(paths):
        joiner = JoiningNode(load_or_create(paths.identity_key), config.name, paths, SystemClock())
        interfaces = choose(list(config.interface))[0]
        record = asyncio.run(join_hearth(joiner, code, peer, interfaces))
    level = record.level_of(joiner.key.node_id)
    return {"id": record.hearth_id, "name": record.name, "level": level.label}
