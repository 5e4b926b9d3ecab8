"""`hearthnet evict MODEL`: end a deployment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.deploying import EVICTED_S, Timeout, require_wait, spans_of, until_unloaded, within
from mesh.cli.options import AskedDaemon, asks
from mesh.cli.output import say

if TYPE_CHECKING:
    from mesh.client import Client


@asks
def evict(
    daemon: AskedDaemon,
    model: Annotated[str, typer.Argument(help="A deployed model, or the deployment's id.")],
    *,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return once no machine has it loaded any more.")
    ] = False,
    timeout: Timeout = None,
) -> None:
    """Take a model off the machines; running answers get a while to end."""
    require_wait(wait=wait, timeout=timeout)

    async def question(client: Client) -> list[dict[str, Any]]:
        before = await client.deployments()
        evicted = await client.evict(model)
        if wait:
            ended = {row["deployment"] for row in evicted}
            spans = spans_of(row for row in before if row["deployment"] in ended)
            unloading = until_unloaded(client, spans, patience_s=EVICTED_S)
            await within(timeout, unloading, f"{model} was not unloaded everywhere")
        return evicted

    daemon.show(daemon.ask(question), _show)


def _show(evicted: list[dict[str, Any]]) -> None:
    for row in evicted:
        say(f"{row['model_id']} is evicted ({row['deployment']}).")
