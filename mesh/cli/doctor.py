"""`hearthnet doctor`: what works here and what does not; one verb per further question."""

from __future__ import annotations

from typing import Annotated

import typer

from mesh.cli.groups import VerbGroup
from mesh.cli.options import AskedDaemon, Json, asks
from mesh.cli.output import print_json, say

app = typer.Typer(
    cls=VerbGroup, help="Say what works on this machine, what does not, and what to do about it."
)


@app.callback(invoke_without_command=True)
@asks
def doctor(context: typer.Context, daemon: AskedDaemon) -> None:
    """Say what works on this machine, what does not, and what to do about it.

    Looks at settings, versions, clock, disks and ports, at the network (what is sent by multicast,
    and what comes in), and, if a daemon runs, at it and its peers: who reaches whom, in both
    directions. Takes some seconds. Ends with 1 when something is wrong.

    With one of the commands, only at that.
    """
    if context.invoked_subcommand is not None:
        if daemon != AskedDaemon():
            raise typer.BadParameter("Say flags behind the command, as in `doctor privacy --json`.")
        return
    from mesh.cli.checkup import examine

    examination = examine(daemon)
    daemon.show(examination.to_dict(), lambda _: say("\n".join(examination.to_lines())))
    if examination.wrong:
        raise typer.Exit(1)


@app.command()
@asks
def privacy(daemon: AskedDaemon) -> None:
    """Who can see what of your prompts and answers, on the routes there are now."""
    report = daemon.ask(lambda client: client.privacy())
    daemon.show(report, lambda _: say("\n".join(report["words"])))


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

    from mesh.interventions.jail.doctor import JailStrength
    from mesh.interventions.jail.job import examine_machine

    report = asyncio.run(examine_machine(namespaces=namespaces))
    if json:
        print_json(report.to_dict())
    else:
        for line in report.to_text().splitlines():
            say(line)
    if report.level is not JailStrength.OS:
        raise typer.Exit(1)
