"""The HTTP application: mounts the families of endpoints and nothing else."""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from mesh.api import faults, health, hearth, mesh
from mesh.api.auth import Gate
from mesh.api.openai import chat, completions, models, streams
from mesh.api.resumable import KeptStreams
from mesh.api.services import ApiSettings, Generations, HearthControl, MeshView
from mesh.errors import MeshError


def create_app(
    generations: Generations,
    view: MeshView,
    settings: ApiSettings,
    control: HearthControl | None = None,
) -> Starlette:
    """The application. ``app.state.closing`` is an event that ends its endless streams."""
    closing = asyncio.Event()
    kept = KeptStreams(ping_s=settings.ping_s)
    app = Starlette(
        routes=[
            *chat.routes(generations, settings, kept),
            *completions.routes(generations, settings, kept),
            *models.routes(view),
            *streams.routes(kept),
            *mesh.routes(view, settings, closing),
            *health.routes(view),
            *(hearth.routes(control, settings) if control is not None else []),
        ],
        middleware=[Middleware(Gate, settings=settings)],
        exception_handlers={
            MeshError: faults.on_mesh_error,
            HTTPException: faults.on_http_exception,
            Exception: faults.on_exception,
        },
    )
    app.state.closing = closing
    app.state.kept = kept
    app.state.settings = settings
    return app
