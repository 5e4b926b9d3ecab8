"""`/mesh/v1/jobs`: the queue for its owners and for whoever runs the node."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.auth import caller_of
from mesh.api.ndif.requests import owner_of
from mesh.interventions.jobs.queue.service import JobQueue


def routes(queue: JobQueue) -> list[Route]:
    """The endpoints' routes."""

    async def jobs(request: Request) -> Response:
        """The queue: ``{"models", "jobs", "ended"}``. Of jobs the caller's own; with the scope
        admin all."""
        return JSONResponse(await queue.overview(caller_of(request).lists_jobs_of))

    async def kill(request: Request) -> Response:
        """End a job: ``{"id", "status"}``."""
        caller = caller_of(request)
        said = f"The job was ended by {caller.principal.account.name}."
        job = await queue.kill(request.path_params["job_id"], owner_of(caller), said)
        return JSONResponse({"id": job.job_id, "status": job.status.value})

    async def log(request: Request) -> Response:
        """What a job printed lately: ``{"id", "lines", "dropped": lines before these}``."""
        owner = owner_of(caller_of(request))
        return JSONResponse(await queue.log(request.path_params["job_id"], owner))

    path = "/mesh/v1/jobs"
    return [
        Route(path, jobs),
        Route(path + "/{job_id}/log", log),
        Route(path + "/{job_id}/kill", kill, methods=["POST"]),
    ]
