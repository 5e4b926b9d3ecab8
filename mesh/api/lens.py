"""`POST /mesh/v1/lens`: what each layer of a model would say next."""

from __future__ import annotations

import secrets
from typing import Annotated, Self

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.auth import caller_of
from mesh.api.bodies import Strict, read_body
from mesh.api.openai.sampling import Extension
from mesh.api.openai.schemas import ChatMessage, to_template
from mesh.api.services import ApiSettings, Generations
from mesh.api.sse import unless_gone
from mesh.types import GenerationRequest, ModelId, Principal, Steer


class LensBody(Strict):
    """The body of `POST /mesh/v1/lens`: a chat, or a text for what continues texts.

    `begun` is what the answer to the chat has said already; `top` tokens are told of each layer.
    """

    model: Annotated[str, Field(min_length=1, max_length=256)]
    messages: (
        Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)] | None
    ) = None
    prompt: Annotated[str, Field(min_length=1)] | None = None
    begun: str = ""
    top: Annotated[int, Field(ge=1, le=20)] = 5
    hearthnet: Extension | None = None

    @model_validator(mode="after")
    def _has_one_text(self) -> Self:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("send either messages or a prompt")
        if self.begun and self.prompt is not None:
            raise ValueError("begun belongs to messages; put it at the end of the prompt")
        return self

    def to_request(self, principal: Principal) -> GenerationRequest:
        """The text to look at, as a generation of nothing."""
        said = self.messages and to_template(self.messages)
        steer = self.hearthnet.steer if self.hearthnet is not None else []
        return GenerationRequest(
            f"lens-{secrets.token_hex(16)}",
            ModelId(self.model),
            messages=said or None,
            prompt=self.prompt,
            begun=self.begun,
            steer=tuple(Steer(choice.name, choice.strength) for choice in steer),
            principal=principal,
        )


def routes(generations: Generations, settings: ApiSettings) -> list[Route]:
    """The endpoint's route."""

    async def create(request: Request) -> Response:
        """What each layer of a model would say next, beside the `model`. Answers as
        `Generations.lens`.
        """
        body = await read_body(request, LensBody, settings)
        caller = caller_of(request)
        reading = generations.lens(body.to_request(caller.principal), body.top)
        found = await unless_gone(request.receive, reading)
        caller.charge(found["prompt_tokens"])
        return JSONResponse({"model": body.model, **found})

    return [Route("/mesh/v1/lens", create, methods=["POST"])]
