"""`hearthnet queue` and `kill`: the jobs of nnsight clients that run, wait or have ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.options import AskedDaemon, asks
from mesh.cli.output import note, one_line, print_table, say
from mesh.cli.watching import watch

if TYPE_CHECKING:
    from mesh.client import Client

_SHOWN_ENDED = 10


@asks
def queue(
    daemon: AskedDaemon,
    log: Annotated[
        str | None, typer.Option("--log", metavar="ID", help="What this job has printed lately.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--watch", help="Go on, and show what changes until Ctrl-C.")
    ] = False,
) -> None:
    """Show the jobs of nnsight clients: those that run, those that wait and the last that ended."""
    if log is not None and follow:
        raise typer.BadParameter("--watch and --log exclude each other.")
    if follow:
        daemon.ask(lambda client: _watch(client, as_json=daemon.json))
    elif log is not None:
        daemon.show(daemon.ask(lambda client: client.job_log(log)), _show_log)
    else:
        daemon.show(daemon.ask(lambda client: client.jobs()), _show)


@asks
def kill(
    daemon: AskedDaemon,
    job: Annotated[str, typer.Argument(metavar="ID", help="As `hearthnet queue` shows it.")],
) -> None:
    """End a job that runs or waits; its client is told."""
    ended = daemon.ask(lambda client: client.kill_job(job))
    daemon.show(ended, lambda _: say(f"{ended['id']} has ended: {ended['status']}"))


async def _watch(client: Client, *, as_json: bool) -> None:
    await client.jobs()  # whoever may not see them is told so: the feed only leaves them out
    await watch(
        client, lambda news: news.get("jobs"), lambda found, _: _show(found), as_json=as_json
    )


def _show(found: dict[str, Any]) -> None:
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


def _show_log(printed: dict[str, Any]) -> None:
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
