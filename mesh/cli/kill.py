"""`hearthnet kill`: end a job of an nnsight client."""

from __future__ import annotations

from typing import Annotated

import typer

from mesh.cli.options import ApiPort, Host, Json, StateDir, ask, locate_daemon
from mesh.cli.output import print_json, say


def kill(
    job: Annotated[str, typer.Argument(metavar="ID", help="As `hearthnet queue` shows it.")],
    *,
    state_dir: StateDir = None,
    host: Host = None,
    api_port: ApiPort = None,
    as_json: Json = False,
) -> None:
    """End a job that runs or waits; its client is told."""
    ended = ask(locate_daemon(state_dir, host, api_port), lambda client: client.kill_job(job))
    if as_json:
        print_json(ended)
    else:
        say(f"{ended['id']} has ended: {ended['status']}")
