"""`hearthnet doctor`: what is so here, in plain words; one verb per question."""

from __future__ import annotations

from typing import Annotated

import typer

from mesh.cli.options import ApiPort, Host, Json, StateDir, ask, locate_daemon
from mesh.cli.output import print_json, say

app = typer.Typer(help="Say in plain words what is so on this machine.", no_args_is_help=True)


@app.callback()
def doctor() -> None:
    """Say in plain words what is so on this machine."""


@app.command()
def privacy(
    *,
    state_dir: StateDir = None,
    host: Host = None,
    api_port: ApiPort = None,
    json: Json = False,
) -> None:
    """Who can see what of your prompts and answers, on the routes there are now."""
    report = ask(locate_daemon(state_dir, host, api_port), lambda client: client.privacy())
    if json:
        print_json(report)
        return
    for line in report["words"]:
        say(line)


@app.command()
def weights(*, json: Json = False) -> None:
    """Whether anything could change the weights of layers served here: each way is tried once.

    Ends with 1 when one gets through.
    """
    from mesh.health.weight_doctor import examine

    report = examine()
    if json:
        print_json(report.to_dict())
    else:
        for line in report.to_text().splitlines():
            say(line)
    if report.broken:
        raise typer.Exit(1)


@app.command()
def jail(
    *,
    namespaces: Annotated[
        bool, typer.Option(help="Use namespaces where the kernel allows them.")
    ] = True,
    json: Json = False,
) -> None:
    """How well this machine walls in the code of nnsight clients: every wall is attacked once.

    Ends with 1 when a wall does not hold.
    """
    import asyncio

    from mesh.interventions.jail.doctor import Level
    from mesh.interventions.jail.job import examine_machine

    report = asyncio.run(examine_machine(namespaces=namespaces))
    if json:
        print_json(report.to_dict())
    else:
        for line in report.to_text().splitlines():
            say(line)
    if report.level is not Level.OS:
        raise typer.Exit(1)
