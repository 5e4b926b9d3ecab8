"""`hearthnet evict MODEL`: end a deployment."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mesh.cli.options import AskedDaemon, asks
from mesh.cli.output import say


@asks
def evict(
    daemon: AskedDaemon,
    model: Annotated[str, typer.Argument(help="A deployed model, or the deployment's id.")],
) -> None:
    """Take a model off the machines; running answers get a while to end."""
    daemon.show(daemon.ask(lambda client: client.evict(model)), _show)


def _show(evicted: list[dict[str, Any]]) -> None:
    for row in evicted:
        say(f"{row['model_id']} is evicted ({row['deployment']}).")
