"""What Ollama's clients may ask for and is not here: refused with what to use instead."""

from __future__ import annotations

from starlette.routing import Route

from mesh.api.openai.elsewhere import refused_routes

_FILES = (
    "Models are not made or changed over this API.",
    "Put a safetensors checkpoint or a GGUF file onto this machine's disk and start it with"
    " `hearthnet deploy PATH`.",
)

INSTEAD = {
    "/api/pull": (
        "Models are not fetched over this API.",
        "`hearthnet pull MODEL` fetches one, `hearthnet deploy MODEL` has it up as well; "
        "/api/tags lists those that can be asked.",
    ),
    "/api/push": ("Models are not published from here.", "Use the Hugging Face hub's own tools."),
    "/api/create": _FILES,
    "/api/copy": (
        "Models are not copied here.",
        "A second name is given with `hearthnet up --model PATH=NAME`.",
    ),
    "/api/delete": (
        "Models are not deleted over this API.",
        "`hearthnet evict MODEL` unloads one, `hearthnet rm MODEL` deletes its files.",
    ),
    "/api/blobs": _FILES,
}
"""By path: what is not here; and what to use instead."""


def routes() -> list[Route]:
    """Those paths, and what is below them, such as blobs."""
    return refused_routes(INSTEAD)
