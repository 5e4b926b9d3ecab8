"""`POST /api/chat` and `POST /api/generate`."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.auth import caller_of
from mesh.api.bodies import read_body
from mesh.api.ollama.answers import Wording, head, in_message, in_text
from mesh.api.ollama.models import Catalogue
from mesh.api.ollama.schemas import OllamaChatBody, OllamaGenerateBody
from mesh.api.ollama.streaming import LineStream, lines, whole
from mesh.api.services import ApiSettings, Generations
from mesh.api.sse import unless_gone
from mesh.errors import NoRoute, NotSupported
from mesh.types import GenerationRequest, TokenDelta


def routes(generations: Generations, catalogue: Catalogue, settings: ApiSettings) -> list[Route]:
    """The endpoints' routes."""
    asking = _Asking(generations, catalogue)

    async def chat(request: Request) -> Response:
        """Answer a chat, as Ollama's API has it: lines of JSON, of which the last has `done` true,
        or with `stream` false one object. The last has token counts, and durations in nanoseconds:
        `load_duration` until the model was up and had room, `prompt_eval_duration` of computing the
        prompt, `eval_duration` from the first token to the end, `total_duration` of all. Without
        messages it waits until the model is up. An error in a stream that has begun is its last
        line, `{"error"}`.
        """
        return await asking.answer(
            request, await read_body(request, OllamaChatBody, settings), in_message
        )

    async def generate(request: Request) -> Response:
        """Answer a prompt, as Ollama's API has it: as `POST /api/chat`, with `response` in the
        place of `message`. Without a prompt it waits until the model is up.
        """
        return await asking.answer(
            request, await read_body(request, OllamaGenerateBody, settings), in_text
        )

    return [
        Route("/api/chat", chat, methods=["POST"]),
        Route("/api/generate", generate, methods=["POST"]),
    ]


@dataclass(frozen=True, slots=True)
class _Asking:
    """How both are answered."""

    generations: Generations
    catalogue: Catalogue

    async def answer(
        self, request: Request, body: OllamaChatBody | OllamaGenerateBody, form: Wording
    ) -> Response:
        """The answer to a body, in this form. Raises MeshError."""
        caller = caller_of(request)
        model = self.catalogue.named(body.model)
        if body.is_empty and body.unloads:
            raise NotSupported(
                "A request for no answer with keep_alive 0 unloads a model, and here models are not"
                " unloaded by whoever asks them.",
                fix=f"`hearthnet evict {model}` does that, and `hearthnet deploy {model}"
                " --keep-alive` says for how long it stays while nobody asks.",
            )
        asked = body.to_request(model, f"ollama-{secrets.token_hex(16)}", caller.principal)
        asked = replace(asked, may_wake=caller.may_wake)
        if body.is_empty:
            await unless_gone(request.receive, self._load(asked))
            last = {"done": True, "done_reason": "load"}
            return JSONResponse({**head(body.model), **form(TokenDelta("", ())), **last})
        frames = self.generations.generate(asked)
        if body.is_streamed:
            return LineStream(lines(frames, form, body.model, caller))
        return await whole(request, frames, form, body.model, caller)

    async def _load(self, asked: GenerationRequest) -> None:
        """Wait until the model can be asked. Raises NoRoute where it still cannot."""
        await self.generations.load(asked)
        why = self.catalogue.why_not(asked.model)
        if why is not None:
            raise NoRoute(f"{asked.model} cannot be asked: {why}.", fix="See `hearthnet models`.")
