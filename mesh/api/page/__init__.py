"""`/`: the mesh in a browser. A few files that ask for nothing from anywhere else.

They hold no secret and are open to all; what the page shows comes from the endpoints that a
caller's key, or none, lets it ask.
"""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_SCRIPTS = ("page.js", "chat.js", "deployed.js", "downloads.js", "daemon.js", "elements.js")
PATHS = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    **{f"/{name}": (name, "text/javascript; charset=utf-8") for name in _SCRIPTS},
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


_FOLDER = resources.files(__name__)
# Here, so that no request and no event loop waits for a disk.
_CONTENTS = {path: _FOLDER.joinpath(name).read_bytes() for path, (name, _) in PATHS.items()}


def routes() -> list[Route]:
    """The files' routes."""
    return [_route(path, media_type) for path, (_, media_type) in PATHS.items()]


def _route(path: str, media_type: str) -> Route:
    async def file(_request: Request) -> Response:
        """A file of the page in the browser."""
        return Response(_CONTENTS[path], headers=_HEADERS, media_type=media_type)

    return Route(path, file)
