"""A model that somebody wants to ask: where it is not up, it is deployed, and waited for.

Says on stderr how far that is. Knows nothing of what is asked then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from mesh.cli.deploying import POLL_S, follow
from mesh.cli.output import note
from mesh.errors import MeshError, ModelNotFound, NoRoute, NotFound

if TYPE_CHECKING:
    from mesh.client import Client

_LOADING = "loading"


async def ask_or_bring_up(
    client: Client, model: str, ask: Callable[[str], Awaitable[None]], begun: Callable[[], object]
) -> None:
    """Ask the model; where it is not up, bring it up and ask again, unless an answer had `begun`.

    Raises what asking raises, and as `bring_up`.
    """
    try:
        await ask(model)
    except (ModelNotFound, NoRoute) as error:
        if begun():
            raise
        await ask(await bring_up(client, model, error))


async def bring_up(client: Client, model: str, error: MeshError | None = None) -> str:
    """The id to ask `model` by, once it can be asked here; `error` is what asking it ended with.

    What is held here and belongs to no deployment is left to whoever asks: deploying it would not
    help. All else is deployed. Raises `error`, what deploying raises, and why it cannot be asked
    after all.
    """
    row = await _row(client, model)
    if error is None and row is not None and row["runnable"]:
        return model
    if row is not None and row["local"] and not await _is_deployed(client, model):
        if error is not None:
            raise error
        return model
    note(f"{model} is not up here; deploying it")
    try:
        deployed = await client.deploy(model)
    except NotFound:
        raise error or _unknown(model) from None  # a daemon that deploys nothing
    deployed = await follow(client, deployed["deployment"], answering=True)
    model_id: str = deployed["model_id"]
    await _askable(client, model_id)
    return model_id


async def _askable(client: Client, model_id: str) -> None:
    """Until this node can ask it: its own process for that is there, and all layers are served."""
    import asyncio

    is_told = False
    while True:
        row = await _row(client, model_id)
        if row is not None and row["runnable"]:
            return
        reason = row["reason"] if row is not None else _LOADING
        if row is not None and row["local"] and str(reason).startswith("failed"):
            raise NoRoute(
                f"{model_id} is deployed and cannot be asked here: {reason}",
                fix="See `hearthnet status`.",
            )
        if not is_told:
            note(f"{model_id} is up; this machine is loading what it asks with")
            is_told = True
        await asyncio.sleep(POLL_S)


async def _is_deployed(client: Client, model: str) -> bool:
    try:
        return any(model == each["model_id"] for each in await client.deployments())
    except NotFound:
        return False


def _unknown(model: str) -> ModelNotFound:
    return ModelNotFound(f"{model!r} is nowhere to be found.", fix="See `hearthnet models`.")


async def _row(client: Client, model: str) -> dict[str, Any] | None:
    rows = [row for row in await client.models() if row["id"] == model]
    return rows[0] if rows else None
