"""What Anthropic's clients may ask for and is not here: refused with what to use instead."""

from __future__ import annotations

from starlette.routing import Route

from mesh.api.openai.elsewhere import refused_routes

INSTEAD = {
    "/v1/messages/batches": (
        "Batches are not taken here.",
        "Send each message by itself: as many as there is room for are answered at once.",
    ),
    "/v1/complete": (
        "Anthropic's old completions are not served here.",
        "Use /v1/messages, or for a bare text /v1/completions.",
    ),
}
"""By path: what is not here; and what to use instead."""


def routes() -> list[Route]:
    """Those paths, and what is below them."""
    return refused_routes(INSTEAD)
