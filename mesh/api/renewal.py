"""Takes up a certificate that the settings name when its files are replaced, as certbot does it.

A pair that cannot be served with leaves the one before in use, and is told once. Knows nothing of
who renews it; reading the files is `mesh.api.tls`'s.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from mesh.api.server import ApiServer
from mesh.api.tls import given_tls
from mesh.clock import tick
from mesh.errors import BadValue
from mesh.health.eventstream import EventFeed

logger = logging.getLogger(__name__)

LOOK_S = 30.0
_REFUSED = "certificate_refused"

_State = tuple[tuple[int, int, int] | None, ...]


async def follow_renewals(
    api: ApiServer,
    certificate: Path,
    key: Path,
    events: EventFeed,
    every_s: float = LOOK_S,
) -> None:
    """For ever, looking each `every_s`; `events` are told what people should know."""
    tried: _State | None = None
    seen = await asyncio.to_thread(_state, certificate, key)
    while True:
        await tick(every_s)
        before, seen = seen, await asyncio.to_thread(_state, certificate, key)
        # Two files are not replaced at once: what still changes is half of something.
        if seen != before or seen == tried:
            continue
        tried = seen
        events.over(_REFUSED)
        try:
            tls = await asyncio.to_thread(given_tls, certificate, key)
        except BadValue as error:
            message = f"The API's certificate stays what it was: {error.message}"
            logger.warning("%s", message)
            events.emit("warning", code=_REFUSED, message=message, fix=error.fix)
            continue
        if api.tls is None or tls.sha256 != api.tls.sha256:
            logger.info("API certificate %s taken up: it is valid until %s", tls.file, tls.expires)
        api.renew(tls)


def _state(*files: Path) -> _State:
    """Other than before once what a file holds is; None of one that nobody may look at."""
    return tuple(map(_looked_at, files))


def _looked_at(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
