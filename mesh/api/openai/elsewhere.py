"""What clients know from other servers and is not here: refused with what to use instead."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mesh.api.faults import RefusedRoute
from mesh.errors import NotSupported

INSTEAD = {
    "/v1/embeddings": (
        "Embeddings are not computed here; take them from another server, such as llama.cpp's"
        " `llama-server --embedding`.",
        "Set the client's embedding model to that server. What a model's own layers put out comes"
        " from `hearthnet harvest`, or from nnsight.",
    ),
    "/v1/responses": (
        "OpenAI's Responses API is not served here; use /v1/chat/completions.",
        "That is `client.chat.completions.create` of OpenAI's SDK, `use_responses_api=False` in"
        " LangChain, `provider.chat(MODEL)` in Vercel's AI SDK.",
    ),
    "/v1/messages": (
        "Anthropic's Messages API is not served here; use /v1/chat/completions.",
        "Use an OpenAI client, or put a proxy that translates, such as LiteLLM, in front of it.",
    ),
}
"""By path: what is not here and what to use, which is all that some clients show; and how."""


def routes() -> list[Route]:
    """Those paths, and what other servers have below them."""
    return [
        route
        for path, (what, fix) in INSTEAD.items()
        for route in (_route(path, what, fix), _route(path + "/{more:path}", what, fix))
    ]


def _route(path: str, what: str, fix: str) -> Route:
    async def refuse(_request: Request) -> Response:
        """Refused with `not_supported`, which says what to use instead."""
        raise NotSupported(what, fix=fix)

    return RefusedRoute(path, refuse, methods=["GET", "POST", "DELETE"])
