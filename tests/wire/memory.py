"""Two links in one process, wired to each other through the event loop: for tests.

The same `TensorSession`s as over a socket, frames handed over as they are, one per loop turn and
direction: the order of deliveries depends on nothing but the order of sends.
"""

from __future__ import annotations

import asyncio
from typing import cast

from mesh.errors import LinkLost, MeshError, PipelineStalled
from mesh.wire.limits import DEFAULT_LIMITS, Limits
from mesh.wire.link import LinkHandler
from mesh.wire.messages import Bye, Hello, Message, Ping, Pong
from mesh.wire.protocol import TensorSession

_LOST = "Connect again, or use another hop."


def link_pair(
    hello_a: Hello,
    hello_b: Hello,
    *,
    limits: Limits = DEFAULT_LIMITS,
) -> tuple[MemoryLink, MemoryLink]:
    """Two open links; give each its handler with `attach` before the loop runs again.

    Raises VersionMismatch when the hellos do not agree.
    """
    a, b = MemoryLink(hello_a, limits), MemoryLink(hello_b, limits)
    a.wire_to(b)
    b.wire_to(a)
    return a, b


class MemoryLink:
    """See `mesh.wire.link.Link`."""

    def __init__(self, hello: Hello, limits: Limits) -> None:
        self.session = TensorSession(hello, limits)
        self.session.start()
        self._loop = asyncio.get_running_loop()
        self._other: MemoryLink | None = None
        self._handler: LinkHandler | None = None
        self._closed = False
        self._pumping = False
        self._pinged_at = 0.0
        self._heard_at = self._loop.time()
        self._rtt_ms: float | None = None
        self._room: asyncio.Future[None] | None = None

    def wire_to(self, other: MemoryLink) -> None:
        """Exchange hellos with `other`, this side first to listen."""
        self._other = other
        hello = other.session.next_frame()
        assert hello is not None
        self.session.receive(hello)

    def attach(self, handler: LinkHandler) -> None:
        """Deliver what arrives to `handler`."""
        self._handler = handler

    @property
    def peer(self) -> Hello:
        """See `Link.peer`."""
        return cast("Hello", self.session.peer)

    @property
    def is_closed(self) -> bool:
        """See `Link.is_closed`."""
        return self._closed

    @property
    def rtt_ms(self) -> float | None:
        """See `Link.rtt_ms`."""
        return self._rtt_ms

    @property
    def silent_s(self) -> float:
        """See `Link.silent_s`."""
        return self._loop.time() - self._heard_at

    def ping(self) -> None:
        """Measure the round trip."""
        self._pinged_at = self._loop.time()
        self.send(Ping(0))

    def send(self, message: Message) -> None:
        """See `Link.send`."""
        if self._closed:
            raise LinkLost("The link is closed.", fix=_LOST)
        self.session.send(message)
        self._pump()

    async def drain(self, timeout_s: float) -> None:
        """See `Link.drain`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._closed and self._is_full:
                    if self._room is None:
                        self._room = self._loop.create_future()
                    await asyncio.shield(self._room)
        except TimeoutError as exc:
            raise PipelineStalled(
                f"The peer took nothing for {timeout_s} s.", fix="Use another hop."
            ) from exc
        if self._closed:
            raise LinkLost("The link closed while draining.", fix=_LOST)

    def close(self, reason: str = "") -> None:
        """See `Link.close`."""
        if not self._closed:
            self.session.close(reason)
            self._pump()
            self.lose(None)

    def cut(self) -> None:
        """Break the connection under both ends, losing what is under way."""
        lost = LinkLost("The connection broke.", fix=_LOST)
        self.lose(lost)
        if self._other is not None:
            self._other.lose(lost)

    @property
    def _is_full(self) -> bool:
        return self.session.queued_bytes > self.session.limits.high_water_bytes

    def _pump(self) -> None:
        """Have the next frame delivered in the loop's next turn."""
        if not self._pumping and self.session.ready_bytes:
            self._pumping = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._pumping = False
        other = self._other
        frame = self.session.next_frame()
        if other is None or frame is None:
            return
        other.take(frame)
        self._pump()
        if not self._is_full:
            self._wake()

    def take(self, frame: bytes) -> None:
        """What the other end's wire delivers."""
        if self._closed:
            return
        self._heard_at = self._loop.time()
        try:
            messages = self.session.receive(frame)
        except MeshError as error:
            self._pump()
            self.lose(error)
            return
        for message in messages:
            if isinstance(message, Bye):
                self.lose(None)
            elif isinstance(message, Pong):
                self._rtt_ms = (self._loop.time() - self._pinged_at) * 1e3
            elif self._handler is not None:
                self._handler.message(message)
        self._pump()

    def lose(self, error: MeshError | None) -> None:
        """This end is closed from now on."""
        if self._closed:
            return
        self._closed = True
        self._wake()
        if self._handler is not None:
            self._loop.call_soon(self._handler.closed, error)

    def _wake(self) -> None:
        if self._room is not None:
            self._room.set_result(None)
            self._room = None
