"""The intervention sessions of one link: messages in, answers out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from mesh.errors import BadRequest, MeshError
from mesh.shard.taps.server import TapPlace, TapServer
from mesh.types import NodeId
from mesh.wire.messages import Failure, Opened, OpenTaps, Result, Step

Send = Callable[[Result | Failure | Opened], None]


class TapShards(Protocol):
    """The shards of the process."""

    def admit_taps(self, request: OpenTaps, peer: NodeId) -> tuple[TapServer, TapPlace]:
        """A place on the first shard that can give one. Raises the best match's refusal."""


class LinkTaps:
    """See the module. Sessions end with the link."""

    def __init__(self, shards: TapShards, send: Send, peer: NodeId) -> None:
        self._shards = shards
        self._peer = peer
        self._send = send
        self._places: dict[int, tuple[TapServer, TapPlace]] = {}
        self._opening: set[asyncio.Task[None]] = set()

    def has(self, number: int) -> bool:
        """Whether this number is an intervention session of the link."""
        return number in self._places

    def open(self, request: OpenTaps) -> None:
        """Admit and answer with `Opened` once it can be used. Raises MeshError."""
        if request.session in self._places:
            raise BadRequest(
                f"Session {request.session} is open already.",
                fix="Pick a number that is not in use on this link.",
                param="session",
            )
        server, place = self._shards.admit_taps(request, self._peer)
        self._places[request.session] = (server, place)
        task = asyncio.create_task(self._finish_open(server, place), name="taps-open")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def step(self, step: Step) -> None:
        """A part of a message. Raises MeshError when it is refused."""
        server, place = self._places[step.session]
        server.submit(place, step, self._send)

    def close(self, number: int) -> None:
        """End one session, if there is such a one."""
        known = self._places.pop(number, None)
        if known is not None:
            known[0].close(known[1])

    def closed(self) -> None:
        """The link is gone."""
        for task in self._opening:
            task.cancel()
        for number in list(self._places):
            self.close(number)

    async def _finish_open(self, server: TapServer, place: TapPlace) -> None:
        try:
            await server.opened(place)
        except MeshError as error:
            self._places.pop(place.number, None)
            self._send(Failure(error.to_dict(), place.number))
            return
        self._send(Opened(place.number, 0))
