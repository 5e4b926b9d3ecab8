"""`/mesh/v1/coordination`: who holds which model, which of them are ready, and waiting for it."""

from __future__ import annotations

import asyncio
import re

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.services import CoordinationView, ReadyQuestion
from mesh.api.sse import unless_gone
from mesh.errors import BadRequest, NodeStopped, NotReady
from mesh.types import LayerRange, is_whole

MAX_WAIT_S = 30
_MAX_NAME = 256
_SHA256 = re.compile("[0-9a-f]{64}")


def routes(coordination: CoordinationView, closing: asyncio.Event) -> list[Route]:
    """The endpoint's route; it only reads. Who waits is told when `closing` is set."""

    async def view(request: Request) -> Response:
        """Who holds which model. Answers as `CoordinationView.view`. With `?model=NAME`, and
        perhaps `weights_sha256=`, `layers=LO-HI` and `wait=SECONDS` (30 at most), that model once
        it is ready. Answers as `CoordinationView.when_ready`.
        """
        question = _question(request.query_params)
        if question is None:
            return JSONResponse(await coordination.view())
        answer = coordination.when_ready(question)
        try:
            found = await unless_gone(request.receive, answer, closing)
        except NodeStopped:
            raise NotReady("This node stops.", fix="Ask again when it is back.") from None
        return JSONResponse(found)

    return [Route("/mesh/v1/coordination", view)]


def _question(said: QueryParams) -> ReadyQuestion | None:
    """None where no model is asked for. Raises BadRequest."""
    model = said.get("model")
    if model is None:
        for name in ("weights_sha256", "layers", "wait"):
            if name in said:
                raise BadRequest(
                    f"{name}= is about a model, and none is named.", fix="Send model=NAME.",
                    param="model",
                )  # fmt: skip
        return None
    if not 0 < len(model) <= _MAX_NAME:
        raise BadRequest(
            f"model= is no name of 1 to {_MAX_NAME} characters.", fix="Send its id.", param="model"
        )
    digest = said.get("weights_sha256")
    if digest is not None and not _SHA256.fullmatch(digest):
        raise BadRequest(
            "weights_sha256= is no hash.", fix="Send 64 hexadecimal digits.", param="weights_sha256"
        )
    return ReadyQuestion(model, digest, _layers(said.get("layers")), _wait_s(said.get("wait", "0")))


def _layers(text: str | None) -> LayerRange | None:
    try:
        return None if text is None else LayerRange.parse(text)
    except ValueError as error:
        raise BadRequest(f"{error}.", fix="Write layers as 0-7.", param="layers") from error


def _wait_s(text: str) -> float:
    if not is_whole(text, 2) or int(text) > MAX_WAIT_S:
        raise BadRequest(
            "wait= is no number of seconds.", fix=f"Send 0 to {MAX_WAIT_S}.", param="wait"
        )
    return float(text)
