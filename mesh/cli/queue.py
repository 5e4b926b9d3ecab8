"""`hearthnet queue`: the jobs of nnsight clients that run, wait or have ended."""

from __future__ import annotations

import time
from typing import Any

from mesh.cli.options import ApiPort, Host, Json, StateDir, ask, locate_daemon
from mesh.cli.output import print_json, print_table, say

_SHOWN_ENDED = 10


def queue(
    state_dir: StateDir = None,
    host: Host = None,
    api_port: ApiPort = None,
    as_json: Json = False,
) -> None:
    """Show the jobs of nnsight clients: those that run, those that wait and the last that ended."""
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


def _age(row: dict[str, Any]) -> str:
    seconds = max(0, round(time.time() - row["received_at"]))
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min"


def _note(row: dict[str, Any]) -> str:
    first_line: str = row["description"].partition("\n")[0]
    return first_line[:60]
