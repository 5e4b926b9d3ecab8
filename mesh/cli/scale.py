"""`hearthnet scale MODEL N`: more or fewer replicas of what is deployed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.deploying import follow, shown, warn_of_gaps
from mesh.cli.options import AskedDaemon, asks

if TYPE_CHECKING:
    from mesh.client import Client


@asks
def scale(
    daemon: AskedDaemon,
    model: Annotated[str, typer.Argument(help="A deployed model, or the deployment's id.")],
    replicas: Annotated[int, typer.Argument(min=0, max=16, help="Whole copies of it.")],
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Return once it is so.")] = False,
) -> None:
    """Have so many replicas of a deployed model, more or fewer than now."""

    async def question(client: Client) -> dict[str, Any]:
        row = await client.scale(model, replicas)
        warn_of_gaps(row)
        return await follow(client, row["deployment"]) if wait and replicas else row

    daemon.show(daemon.ask(question), shown)
