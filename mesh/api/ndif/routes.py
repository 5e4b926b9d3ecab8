"""Puts the protocol's endpoints together, and forgives what clients put in front of their paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from mesh.api.ndif import clients, deployments, operating, requests, results
from mesh.api.ndif.results import ResultUrls
from mesh.api.ndif.sessions import ClientSessions
from mesh.api.services import DeploymentControl, MeshView
from mesh.interventions.jobs.queue.service import JobQueue


@dataclass(frozen=True, slots=True)
class JobsApi:
    """The parts of the daemon that the endpoints use."""

    queue: JobQueue
    urls: ResultUrls


def routes(
    jobs: JobsApi, view: MeshView, control: DeploymentControl | None = None
) -> Sequence[Route | WebSocketRoute]:
    """Everything that needs the scope ``interventions``."""
    queue, urls = jobs.queue, jobs.urls
    sessions = ClientSessions(queue, urls)
    here = deployments.Deployments(view, queue.runner, control)
    return [
        WebSocketRoute("/subscribe", sessions.serve),
        *requests.routes(queue, sessions, here, urls),
        *deployments.routes(here),
        *operating.routes(queue),
    ]


def open_routes(jobs: JobsApi) -> Sequence[Route | WebSocketRoute]:
    """What is open to all: result URLs carry their own proof, and older clients learn only there
    that they are too old, before they send a key."""
    return [*results.routes(jobs.urls, jobs.queue.spool), *clients.routes()]


class OneSlash:
    """ASGI middleware: ``//request`` is ``/request``, as hosts that end in a slash make it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Shorten, then pass on."""
        path: Any = scope.get("path", "")
        if path.startswith("//"):
            scope = {**scope, "path": "/" + path.lstrip("/")}
        await self._app(scope, receive, send)
