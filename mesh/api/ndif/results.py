"""`GET /result/{job}`: what a job left, to whoever has the URL, until it expires.

Clients fetch results without their key, so the URL is the key: it names a random id, ends two
hours after the job, and carries a signature that only this node can make.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from mesh.clock import Clock
from mesh.errors import Forbidden, NotFound
from mesh.interventions.jobs.queue.keeping import KEEP_RESULTS_S
from mesh.interventions.jobs.queue.spool import Spool
from mesh.interventions.jobs.queue.types import Job
from mesh.private_files import read_private, write_private
from mesh.types import is_whole

PREFIX = "/result/"
_KEY_BYTES = 32


def load_key(path: Path) -> bytes:
    """The key that signs result URLs, made when there is none. Blocks. Raises KeyUnreadable."""
    try:
        key = read_private(path, _KEY_BYTES)
    except FileNotFoundError:
        key = b""
    if len(key) != _KEY_BYTES:
        key = secrets.token_bytes(_KEY_BYTES)
        write_private(path, key)
    return key


class ResultUrls:
    """Makes and checks the URLs of results."""

    def __init__(self, key: bytes, clock: Clock) -> None:
        self._key = key
        self._clock = clock

    def make(self, base_url: str, job: Job) -> str:
        """The URL of an ended job's result, below `base_url`."""
        expires = int((job.ended_at or 0.0) + KEEP_RESULTS_S)
        signature = self._sign(job.job_id, expires)
        path = f"{PREFIX}{job.job_id}?expires={expires}&signature={signature}"
        return base_url.rstrip("/") + path

    def check(self, job_id: str, expires: str, signature: str) -> None:
        """Raises Forbidden, NotFound when the time is over."""
        if not is_whole(expires, 12) or not hmac.compare_digest(
            self._sign(job_id, int(expires)).encode(), signature.encode()
        ):
            raise Forbidden(
                "This is not the URL of a result.", fix="Use it whole, as the job's answer had it."
            )
        if self._clock.now().timestamp() >= int(expires):
            raise _gone()

    def _sign(self, job_id: str, expires: int) -> str:
        return hmac.new(self._key, f"{job_id} {expires}".encode(), hashlib.sha256).hexdigest()


def routes(urls: ResultUrls, spool: Spool) -> list[Route]:
    """The endpoint's route."""

    async def result(request: Request) -> Response:
        """A job's result: bytes, for two hours. The whole URL is in the job's answer; who has it
        needs no key.
        """
        job_id = request.path_params["job_id"]
        query = request.query_params
        urls.check(job_id, query.get("expires", ""), query.get("signature", ""))
        path = spool.result(job_id)
        try:
            found = await asyncio.to_thread(path.stat)
        except FileNotFoundError:
            raise _gone() from None
        headers = {"Cache-Control": "no-store"}
        return FileResponse(
            path, headers=headers, media_type="application/octet-stream", stat_result=found
        )

    return [Route(PREFIX + "{job_id}", result)]


def _gone() -> NotFound:
    return NotFound("This result was deleted two hours after its job.", fix="Send the job again.")
