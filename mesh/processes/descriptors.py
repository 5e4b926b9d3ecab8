"""How many files and connections this process may have open at once."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import resource
import time
from typing import Any

from mesh.private_files import mending

logger = logging.getLogger(__name__)

_ENOUGH = 4096
_AGAIN_S = 60.0


def allow_enough() -> None:
    """For this process and those that it starts: as many as the links of a house's nodes, its
    clients and the files of weights take. macOS gives 256 to whoever does not ask, Linux 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(_ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # a system that has yet another limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def say_when_out(loop: asyncio.AbstractEventLoop) -> None:
    """Have it logged with what helps, once a minute, that nobody can connect for want of
    descriptors: asyncio tells it with a traceback for each attempt, which are a hundred a second.
    """
    said_at = -math.inf

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal said_at
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif (now := time.monotonic()) >= said_at + _AGAIN_S:
            said_at = now
            logger.warning("Nobody else can connect. %s", mending(error, ""))

    loop.set_exception_handler(handle)
