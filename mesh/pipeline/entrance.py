"""At most so many generations of this node at a time; others wait a while, in fair turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from mesh.accounts.fair_line import FairLine
from mesh.clock import set_by
from mesh.errors import Busy
from mesh.types import Principal, Queued


class Entrance:
    """Lets in `most` at a time. Of others, `places` wait, half of them for one principal at most,
    for `wait_s`."""

    def __init__(self, most: int, wait_s: float, places: int) -> None:
        self._most = most
        self._wait_s = wait_s
        self._places = places
        self._inside: set[str] = set()
        self._line = FairLine()
        self._moved = asyncio.Event()

    async def enter(self, request_id: str, principal: Principal) -> AsyncGenerator[Queued, None]:
        """Yields where the request stands, whenever that is better than before; it is in when this
        ends by itself, until `leave`. Raises Busy where no place is left, or after the wait."""
        if len(self._inside) < self._most:
            self._inside.add(request_id)
            return
        owner = principal.account
        if not self._line.has_place(owner, self._places):
            raise self._busy()
        self._line.put(owner, request_id)
        loop = asyncio.get_running_loop()
        until, told = loop.time() + self._wait_s, self._places + 1
        try:
            while request_id not in self._inside:
                position = self._line.positions()[request_id]
                if position < told:
                    told = position
                    yield Queued(position)
                    continue
                if not await set_by(self._moved, until):
                    raise self._busy(f"; this request waited {self._wait_s:g} s")
        finally:
            self._line.remove(request_id)

    def leave(self, request_id: str) -> None:
        """The request is out, or was never in; the next comes in."""
        self._inside.discard(request_id)
        while len(self._inside) < self._most and (next_id := self._line.take()) is not None:
            self._inside.add(next_id)
        self._moved.set()
        self._moved = asyncio.Event()

    def _busy(self, waited: str = "") -> Busy:
        return Busy(
            f"{len(self._inside)} generations run here already, the limit, and"
            f" {len(self._line)} wait{waited}.",
            fix="Wait for one to end, or raise max_concurrent_pipelines, or max_queued.",
        )
