"""`hearthnet queue`: the jobs of nnsight clients that run, wait or have ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.options import ApiPort, Host, Json, StateDir, ask, locate_daemon
from mesh.cli.output import note, one_line, print_json, print_table, say

if TYPE_CHECKING:
    from mesh.client import Client

_SHOWN_ENDED = 10


def queue(
    state_dir: StateDir = None,
    host: Host = None,
    api_port: ApiPort = None,
    as_json: Json = False,
    log: Annotated[
        str | None, typer.Option("--log", metavar="ID", help="What this job has printed lately.")
    ] = None,
) -> None:
    """Show the jobs of nnsight clients: those that run, those that wait and the last that ended."""
    if log is not None:
        _print_log(log, locate_daemon(state_dir, host, api_port), as_json=as_json)
        return
    found = ask(locate_daemon(state_dir, host, api_port), lambda client: client.jobs())
    if as_json:
        print_json(found)
        return
    rows = [*found["jobs"], *found["ended"][:_SHOWN_ENDED]]
    if not rows:
        say("no jobs")
        return
    print_table(
        ["job", "model", "key", "status", "age", "note"],
        [
            [row["id"], row["model"], row["owner"], row["status"], _age(row), _note(row)]
            for row in rows
        ],
    )


def _print_log(job: str, client: Client, *, as_json: bool) -> None:
    printed = ask(client, lambda daemon: daemon.job_log(job))
    if as_json:
        print_json(printed)
        return
    if printed["dropped"]:
        note(f"({printed['dropped']} lines before these are not kept)")
    for line in printed["lines"]:
        say(one_line(line))


def _age(row: dict[str, Any]) -> str:
    seconds = max(0, round(time.time() - row["received_at"]))
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min"


def _note(row: dict[str, Any]) -> str:
    first_line: str = row["description"].partition("\n")[0]
    return first_line[:60]
