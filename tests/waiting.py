"""How tests wait for what nothing announces: they look again and again, for so long at most."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(holds: Callable[[], object], limit_s: float = 30.0) -> None:
    """Where what is waited for happens on this loop, too."""
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)


async def awake(seconds: float) -> None:
    """So long in which this machine runs: while it stands still, all others wait as well."""
    for _ in range(round(seconds / 0.1)):
        await asyncio.sleep(0.1)


def wait_until(holds: Callable[[], object], what: str = "", *, limit_s: float = 90.0) -> None:
    """Where other processes do it."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
