"""The HTTP application: mounts the families of endpoints and nothing else."""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route, WebSocketRoute

from mesh.api import (
    coordination,
    deployments,
    faults,
    harvest,
    health,
    hearth,
    keys,
    lens,
    mesh,
    page,
    plan,
    reach,
    steering,
    weights,
)
from mesh.api.anthropic import elsewhere as not_of_anthropic
from mesh.api.anthropic import messages as anthropic
from mesh.api.anthropic import models as anthropic_models
from mesh.api.auth import Access, Gate, require
from mesh.api.bodies import LongBodies
from mesh.api.feed import DashboardFeed
from mesh.api.ndif import routes as ndif
from mesh.api.ollama import asking as ollama
from mesh.api.ollama import elsewhere as not_of_ollama
from mesh.api.ollama import embeddings as ollama_embeddings
from mesh.api.ollama import models as ollama_models
from mesh.api.ollama.models import Catalogue
from mesh.api.ollama.naming import ByAnyName
from mesh.api.openai import (
    chat,
    completions,
    elsewhere,
    embeddings,
    models,
    responses,
    streams,
)
from mesh.api.request_ids import RequestIds
from mesh.api.resumable import KeptStreams
from mesh.api.services import (
    ApiSettings,
    DeploymentControl,
    Generations,
    HearthControl,
    MeshView,
    Services,
)
from mesh.api.targets import OneSlash, OriginForm
from mesh.clock import SystemClock
from mesh.identity.api_keys import ApiKeys, Scope


def create_app(
    generations: Generations,
    view: MeshView,
    settings: ApiSettings,
    control: HearthControl | None = None,
    api_keys: ApiKeys | None = None,
    jobs: ndif.JobsApi | None = None,
    services: Services | None = None,
) -> Starlette:
    """The application. ``app.state.closing`` is an event that ends its endless streams.

    What `require` does not name is for everybody that the gate lets in.
    """
    closing = asyncio.Event()
    kept = KeptStreams(most=settings.kept_streams)
    access = Access(settings, api_keys, SystemClock())
    deployed = None if services is None else services.deployments
    catalogue = Catalogue(view, deployed)
    queue = jobs.queue if jobs is not None else None
    feed = DashboardFeed(view, access, queue)
    administration = [
        *(hearth.routes(control, settings) if control is not None else []),
        *(keys.routes(access, api_keys, settings, queue) if api_keys is not None else []),
    ]
    app = Starlette(
        routes=[
            *require(Scope.CHAT, _answers(ByAnyName(generations, catalogue), settings, kept)),
            *require(Scope.CHAT, _lists(view, deployed, catalogue)),
            *require(Scope.CHAT, _as_ollama(generations, catalogue, settings)),
            *require(Scope.ADMIN, administration),
            *(_jobs(jobs, view, services) if jobs is not None else []),
            *(ndif.open_routes(jobs) if jobs is not None else []),
            *(_more(services, settings, closing) if services is not None else []),
            *mesh.routes(view, settings, closing, feed),
            *health.routes(view),
            *page.routes(),
        ],
        middleware=[
            Middleware(OriginForm),
            Middleware(OneSlash),
            Middleware(RequestIds),
            Middleware(Gate, settings=settings, access=access),
        ],
        exception_handlers=faults.HANDLERS,
    )
    app.router.redirect_slashes = False  # no path here ends in one
    app.state.closing, app.state.kept = closing, kept
    app.state.settings, app.state.long_bodies = settings, LongBodies()
    app.state.access = access
    return app


def _answers(generations: Generations, settings: ApiSettings, kept: KeptStreams) -> list[Route]:
    return [
        *chat.routes(generations, settings, kept),
        *completions.routes(generations, settings, kept),
        *embeddings.routes(generations, settings),
        *responses.routes(generations, settings, kept),
        *anthropic.routes(generations, settings),
        *not_of_anthropic.routes(),
        *elsewhere.routes(),
        *lens.routes(generations, settings),
        *streams.routes(kept, settings),
    ]


def _lists(view: MeshView, deployed: DeploymentControl | None, catalogue: Catalogue) -> list[Route]:
    # In this order: the first are for Anthropic's clients alone.
    return [
        *anthropic_models.routes(view, deployed, catalogue.named),
        *models.routes(view, deployed, catalogue.named),
    ]


def _as_ollama(
    generations: Generations, catalogue: Catalogue, settings: ApiSettings
) -> list[Route]:
    return [
        *ollama.routes(generations, catalogue, settings),
        *ollama_embeddings.routes(generations, catalogue, settings),
        *ollama_models.routes(catalogue, settings),
        *not_of_ollama.routes(),
    ]


def _jobs(
    jobs: ndif.JobsApi, view: MeshView, services: Services | None
) -> list[Route | WebSocketRoute]:
    control = services.deployments if services is not None else None
    return require(Scope.INTERVENTIONS, ndif.routes(jobs, view, control))


def _more(services: Services, settings: ApiSettings, closing: asyncio.Event) -> list[Route]:
    return [
        *require(Scope.CHAT, steering.view_routes(services.steering)),
        # They change the hearth's log, and fill disks.
        *require(Scope.ADMIN, steering.routes(services.steering, settings)),
        *require(Scope.ADMIN, harvest.routes(services.harvests, settings)),
        # In this order: a route that does not take a method lets the next one look.
        *coordination.routes(services.coordination, closing),
        *deployments.view_routes(services.deployments),
        # It reads whatever checkpoint it is told of.
        *require(Scope.ADMIN, plan.routes(services.plans, settings)),
        *require(Scope.ADMIN, reach.routes(services.reach)),
        *weights.view_routes(services.pulls),
        *require(Scope.ADMIN, deployments.routes(services.deployments, settings)),
        *require(Scope.ADMIN, weights.routes(services.pulls, settings)),
    ]
