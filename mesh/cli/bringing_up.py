"""A model that somebody wants to ask: where it is not up, it is deployed, and waited for.

Says on stderr how far that is. Knows nothing of what is asked then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from mesh.cli.deploying import follow
from mesh.cli.output import note
from mesh.errors import MeshError, ModelNotFound, NoRoute, NotFound

if TYPE_CHECKING:
    from mesh.client import Client


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
    """The id to ask `model` by, once its layers are there; `error` is what asking it ended with.

    What is held here and belongs to no deployment is left to whoever asks: deploying it would not
    help. All else is deployed. What the daemon then still loads to ask with, it has whoever asks
    wait for. Raises `error`, and what deploying raises.
    """
    row = await _row(client, model)
    if error is None and row is not None and row["runnable"]:
        return model
    if row is not None and row["local"] and not await is_deployed(client, model):
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
    return model_id


async def is_deployed(client: Client, model: str) -> bool:
    """Whether whoever asks it waits while it comes up."""
    return any(model == each["model_id"] for each in await _deployments(client))


async def deployed_and_up(client: Client) -> list[str]:
    """The deployed models of which every layer is served by somebody."""
    rows = await _deployments(client)
    return [row["model_id"] for row in rows if not row["resting"] and not row["missing"]]


def loading(models: Sequence[dict[str, Any]]) -> list[str]:
    """The models that this node is loading: whoever asks them waits."""
    return [model["id"] for model in models if model["reason"] == "loading"]


async def _deployments(client: Client) -> list[dict[str, Any]]:
    try:
        return await client.deployments()
    except NotFound:  # a daemon that deploys nothing
        return []


def _unknown(model: str) -> ModelNotFound:
    return ModelNotFound(f"{model!r} is nowhere to be found.", fix="See `hearthnet models`.")


async def _row(client: Client, model: str) -> dict[str, Any] | None:
    rows = [row for row in await client.models() if row["id"] == model]
    return rows[0] if rows else None
