"""Puts the protocol's endpoints together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.routing import Route, WebSocketRoute

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
