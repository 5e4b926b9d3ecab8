"""`POST /mesh/v1/harvest`: one batch of prompts whose activations stay where they are computed."""

from __future__ import annotations

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.bodies import Strict, read_body
from mesh.api.services import ApiSettings, HarvestControl


class HarvestBody(Strict):
    """The body of `POST /mesh/v1/harvest`."""

    model: str = Field(min_length=1, max_length=256)
    run: str = Field(pattern=r"^[0-9a-f]{16}$")
    batch: int = Field(ge=0, lt=10**6)
    module: str = Field(min_length=1, max_length=256)
    texts: list[str] = Field(min_length=1, max_length=1024)
    max_tokens: int = Field(ge=1, lt=2**31)


def routes(harvests: HarvestControl, settings: ApiSettings) -> list[Route]:
    """The endpoint's route."""

    async def create(request: Request) -> Response:
        """Run a batch of prompts whose activations stay on the nodes that compute them. Answers as
        `HarvestControl.run`.
        """
        body = await read_body(request, HarvestBody, settings)
        return JSONResponse(await harvests.run(body.model, body.model_dump(exclude={"model"})))

    return [Route("/mesh/v1/harvest", create, methods=["POST"])]
