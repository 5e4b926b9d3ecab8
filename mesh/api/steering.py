"""`/mesh/v1/steering`: publishing, listing and removing named steering edits."""

from __future__ import annotations

import base64
import binascii

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.bodies import Strict, read_body
from mesh.api.services import ApiSettings, SteeringControl
from mesh.errors import BadSteering


class PublishEditBody(Strict):
    """The body of `POST /mesh/v1/steering/publish`; `tensors` is a safetensors file in base64."""

    name: str = Field(min_length=1, max_length=64)
    model: str = Field(min_length=1, max_length=256)
    path: str = Field(min_length=1, max_length=256)
    side: str = Field(default="output", max_length=16)
    tensors: str = Field(min_length=1)


class RemoveEditBody(Strict):
    """The body of `POST /mesh/v1/steering/remove`."""

    name: str = Field(min_length=1, max_length=64)


def view_routes(steering: SteeringControl) -> list[Route]:
    """The endpoint that only reads."""

    async def view(_request: Request) -> Response:
        """The named steering edits, as `edits`. Each as in `SteeringControl.view`."""
        return JSONResponse({"edits": steering.view()})

    return [Route("/mesh/v1/steering", view)]


def routes(steering: SteeringControl, settings: ApiSettings) -> list[Route]:
    """The endpoints that change something."""

    async def publish(request: Request) -> Response:
        """Publish one. Answers as `SteeringControl.publish`."""
        body = await read_body(request, PublishEditBody, settings)
        try:
            tensors = base64.b64decode(body.tensors, validate=True)
        except binascii.Error as error:
            raise BadSteering(
                f"tensors: not base64: {error}.", fix="Encode the file.", param="tensors"
            ) from error
        made = await steering.publish(body.name, body.model, body.path, body.side, tensors)
        return JSONResponse(made)

    async def remove(request: Request) -> Response:
        """Remove one. Answers as `SteeringControl.remove`."""
        body = await read_body(request, RemoveEditBody, settings)
        return JSONResponse(await steering.remove(body.name))

    path = "/mesh/v1/steering"
    return [
        Route(f"{path}/publish", publish, methods=["POST"]),
        Route(f"{path}/remove", remove, methods=["POST"]),
    ]
