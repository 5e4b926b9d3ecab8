"""`POST /request` and `GET /response/{job}`: handing in a job, and asking what became of it."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.auth import Access, Caller, caller_of
from mesh.api.ndif import answers, model_keys
from mesh.api.ndif.clients import require_served
from mesh.api.ndif.deployments import Deployments
from mesh.api.ndif.results import ResultUrls
from mesh.api.ndif.sessions import ClientSession, ClientSessions
from mesh.api.ndif.uploads import receive
from mesh.errors import MeshError, Unauthorized
from mesh.identity.api_keys import Scope
from mesh.interventions.jobs.queue.service import JobQueue
from mesh.interventions.jobs.queue.types import Status, Submission
from mesh.types import Principal

_DRAIN_S = 1.0
_DRAIN_BYTES = 64 << 20


def owner_of(caller: Caller) -> Principal | None:
    """Whose jobs the caller may ask for by their id: its own account's, or everybody's."""
    return None if caller.allows(Scope.ADMIN) else caller.principal.account


def routes(
    queue: JobQueue, sessions: ClientSessions, deployments: Deployments, urls: ResultUrls
) -> list[Route]:
    """The endpoints' routes."""

    async def request_job(request: Request) -> Response:
        """Hand in a job of an nnsight client, as that sends it: the client is the way to do it
        ([how](../how-to/nnsight.md)).
        """
        try:
            require_served(request.headers.get("nnsight-version"))
            return JSONResponse(await _take(request, queue, sessions, deployments))
        except MeshError:
            await _drain(request)
            raise

    async def response(request: Request) -> Response:
        """What became of a job, with the URL of its result."""
        owner = owner_of(caller_of(request))
        job = await queue.find(request.path_params["job_id"], owner)
        has_result = job.status is Status.COMPLETED and job.result_bytes > 0
        url = urls.make(str(request.base_url), job) if has_result else None
        return JSONResponse(answers.of_job(job, url))

    return [
        Route("/request", request_job, methods=["POST"]),
        Route("/response/{job_id}", response),
    ]


async def _take(
    request: Request, queue: JobQueue, sessions: ClientSessions, deployments: Deployments
) -> dict[str, object]:
    caller = caller_of(request)
    owner = caller.principal.account
    envelope, arrived = await receive(request, queue, owner)
    session: ClientSession | None = None
    try:
        served = await deployments.served()
        meant = model_keys.find(model_keys.ModelKey.parse(envelope.model_key), served)
        if envelope.session_id:
            session = sessions.find(envelope.session_id, owner)
            session.base_url = str(request.base_url)
        asked = Submission(
            owner, meant.model_id, session is not None, envelope.compress, envelope.env,
            caller.trusted,
        )  # fmt: skip
        queue.check_room(asked)
        await deployments.wake(meant.model_id, caller)
    except BaseException:
        del queue.uploads[arrived]
        queue.spool.release(arrived.size_bytes)
        await asyncio.to_thread(arrived.discard)
        raise
    del queue.uploads[arrived]
    job = await queue.submit(asked, arrived, session.feed if session is not None else None)
    # Nothing has run since the job was admitted, so its end cannot have been told yet.
    if session is not None:
        session.jobs.add(job.job_id)
        if not session.is_open:
            await queue.kill(job.job_id, owner, "Its client went away.")
    access: Access = request.app.state.access
    try:
        access.require_known(caller)
    except Unauthorized as revoked:  # while it arrived: what ends the key's jobs has not seen it
        await queue.kill(job.job_id, owner, revoked.message)
        raise
    return answers.answer(job.job_id, Status.RECEIVED, f"The node has a job for {meant.model_id}.")


async def _drain(request: Request) -> None:
    """Read what is left: a client that is still sending would not see the refusal."""
    left = _DRAIN_BYTES
    try:
        async with asyncio.timeout(_DRAIN_S):
            async for chunk in request.stream():
                left -= len(chunk)
                if left < 0:
                    return
    except (TimeoutError, ClientDisconnect, RuntimeError):  # or it was read already
        return
