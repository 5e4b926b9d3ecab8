"""`/mesh/v1/weights...`: what of models is on disks here and nearby, fetching and removing."""

from __future__ import annotations

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.bodies import Strict, read_body
from mesh.api.services import ApiSettings
from mesh.errors import BadRequest
from mesh.transfers.begun import PullWish
from mesh.transfers.pulls import Pulls
from mesh.types import LayerRange, is_whole

_PATH = "/mesh/v1/weights"


class PullWeightsBody(Strict):
    """The body of `POST /mesh/v1/weights/pull`. `layers` are ranges ``LO-HI``, inclusive; left out,
    everything is fetched. `source` is ``hub`` or the name or id of a node."""

    model: str = Field(min_length=1, max_length=512)
    layers: list[str] | None = Field(default=None, max_length=64)
    ends: bool = True
    source: str = Field(default="", max_length=256)
    revision: str = Field(default="main", min_length=1, max_length=256)
    drop: bool = False


class RemoveWeightsBody(Strict):
    """The body of `POST /mesh/v1/weights/remove`."""

    model: str = Field(min_length=1, max_length=512)


def view_routes(pulls: Pulls) -> list[Route]:
    """Reading."""

    async def view(_request: Request) -> Response:
        """What of models is on disks here and at neighbours, what is being fetched, and what is
        `staged`, ``[{"model_id", "bytes"}]``: it came from the hub, and the rest is still to come.
        Answers as `Pulls.view`.
        """
        await pulls.has_looked()
        return JSONResponse({**pulls.view(), "staged": await pulls.staged()})

    async def outcome(request: Request) -> Response:
        """What became of a pull, after `?wait=SECONDS` at most. Answers as `Pulls.outcome`."""
        wait = request.query_params.get("wait", "0")
        if not is_whole(wait, 3):
            raise BadRequest("wait= is no number of seconds.", fix="Send 0 to 30.", param="wait")
        return JSONResponse(await pulls.outcome(request.path_params["name"], float(wait)))

    return [Route(_PATH, view), Route(f"{_PATH}/pulls/{{name}}", outcome)]


def routes(pulls: Pulls, settings: ApiSettings) -> list[Route]:
    """What fills disks, or empties them."""

    async def pull(request: Request) -> Response:
        """Begin to fetch a model to this machine's disk. Answers as `Pulls.start`."""
        body = await read_body(request, PullWeightsBody, settings)
        layers = None if body.layers is None else tuple(map(_layers, body.layers))
        wish = PullWish(body.model, layers, body.ends, body.source, body.revision, body.drop)
        await pulls.has_looked()
        return JSONResponse(pulls.start(wish))

    async def cancel(request: Request) -> Response:
        """Stop a pull; what has come stays. Answers as `Pulls.cancel`."""
        return JSONResponse(await pulls.cancel(request.path_params["name"]))

    async def remove(request: Request) -> Response:
        """Remove a model from this machine's disk. Answers as `Pulls.remove`."""
        body = await read_body(request, RemoveWeightsBody, settings)
        await pulls.has_looked()
        return JSONResponse(await pulls.remove(body.model))

    return [
        Route(f"{_PATH}/pull", pull, methods=["POST"]),
        Route(f"{_PATH}/pulls/{{name}}/cancel", cancel, methods=["POST"]),
        Route(f"{_PATH}/remove", remove, methods=["POST"]),
    ]


def _layers(text: str) -> LayerRange:
    try:
        return LayerRange.parse(text)
    except ValueError as error:
        raise BadRequest(f"{error}.", fix="Write layers as 0-7.", param="layers") from error
