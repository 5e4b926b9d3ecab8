"""`hearthnet scale MODEL N`: more or fewer replicas of what is deployed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.deploying import (
    PlacedSpan,
    Timeout,
    follow,
    require_wait,
    shown,
    spans_of,
    until_unloaded,
    warn_of_gaps,
    within,
)
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
    timeout: Timeout = None,
) -> None:
    """Have so many replicas of a deployed model, more or fewer than now."""
    require_wait(wait=wait, timeout=timeout)

    async def question(client: Client) -> dict[str, Any]:
        before = spans_of(await client.deployments())
        row = await client.scale(model, replicas)
        warn_of_gaps(row)
        if not wait:
            return row
        so_many = f"{model} had not {replicas} {'replica' if replicas == 1 else 'replicas'}"
        return await within(timeout, _so_many(client, row, replicas, before), so_many)

    daemon.show(daemon.ask(question), shown)


async def _so_many(
    client: Client, row: dict[str, Any], replicas: int, before: list[PlacedSpan]
) -> dict[str, Any]:
    """Its row once so many replicas are up, and what was loaded for others of it is not any more;
    `row` is what `scale` answered, `before` what was placed until then."""
    if replicas:
        row = await follow(client, row["deployment"])
    standing = spans_of([row]) if replicas else []
    mine = [each for each in before if each.model_id == row["model_id"]]
    await until_unloaded(client, [each for each in mine if each not in standing])
    rows = await client.deployments()
    return next((each for each in rows if each["deployment"] == row["deployment"]), row)
