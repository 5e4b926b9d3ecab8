"""`/mesh/v1/keys`: making, listing and revoking API keys, whose jobs end with them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.auth import Access
from mesh.api.bodies import Strict, read_body
from mesh.api.services import ApiSettings
from mesh.clock import SystemClock
from mesh.errors import InternalError, NotFound
from mesh.identity.api_keys import MAX_QUOTA, ApiKeys, Quota, Scope, shown
from mesh.interventions.jobs.queue.service import JobQueue
from mesh.types import OWNER, Principal, PrincipalKind, shown_id

logger = logging.getLogger(__name__)


class CreateKeyBody(Strict):
    """The body of `POST /mesh/v1/keys`."""

    name: str = Field(min_length=1, max_length=64)
    scopes: list[str] = Field(min_length=1, max_length=len(Scope))
    trusted: bool = False
    requests_per_minute: int | None = Field(default=None, ge=1, le=MAX_QUOTA)
    tokens_per_day: int | None = Field(default=None, ge=1, le=MAX_QUOTA)


class RevokeKeyBody(Strict):
    """The body of `POST /mesh/v1/keys/revoke`."""

    key_id: str = Field(min_length=1, max_length=64)


def routes(
    access: Access, keys: ApiKeys, settings: ApiSettings, jobs: JobQueue | None = None
) -> list[Route]:
    """The endpoints' routes."""
    one_at_a_time = asyncio.Lock()

    async def view(_request: Request) -> Response:
        """The API keys, as `keys`: ``{"id", "name", "scopes", "trusted", "requests_per_minute",
        "tokens_per_day", "created_at"}``, never their texts.
        """
        return JSONResponse({"keys": [shown(key) for key in keys.keys]})

    async def create(request: Request) -> Response:
        """Make a key: as one of the list, with its text, `key`, which is told only now."""
        body = await read_body(request, CreateKeyBody, settings)
        async with one_at_a_time:
            made = await asyncio.to_thread(make, keys, body)
        return JSONResponse(made)

    async def revoke(request: Request) -> Response:
        """Revoke a key: as one of the list. Its jobs end."""
        body = await read_body(request, RevokeKeyBody, settings)
        async with one_at_a_time:
            gone = await asyncio.to_thread(keys.revoke, body.key_id)
        access.forget_revoked()
        if jobs is not None:
            await end_jobs(jobs, keys)
        return JSONResponse(shown(gone))

    path = "/mesh/v1/keys"
    return [
        Route(path, view),
        Route(path, create, methods=["POST"]),
        Route(f"{path}/revoke", revoke, methods=["POST"]),
    ]


def make(keys: ApiKeys, body: CreateKeyBody) -> dict[str, Any]:
    """Make a key and keep it; its text is in the answer and nowhere else."""
    quota = Quota(body.requests_per_minute, body.tokens_per_day)
    scopes = frozenset(Scope.parse(scope) for scope in body.scopes)
    key, text = keys.create(body.name, scopes, quota, SystemClock(), trusted=body.trusted)
    return {**shown(key), "key": text}


async def end_jobs(queue: JobQueue, keys: ApiKeys) -> None:
    """End the jobs of keys that are revoked, also those that nobody waits for."""

    def is_revoked(owner: Principal) -> bool:
        is_key = owner.kind is PrincipalKind.KEY and owner.name != OWNER
        return is_key and keys.get(owner.name) is None

    async def end(job_id: str) -> None:
        try:
            await queue.kill(job_id, None, "The API key was revoked.")
        except NotFound:  # it has ended meanwhile
            return
        except InternalError as error:  # the key's other jobs are to end all the same
            logger.warning("job=%s: %s", shown_id(job_id), error)

    theirs = [each.job_id for each in queue.unended if is_revoked(each.job.asked.owner)]
    await asyncio.gather(*map(end, theirs))
