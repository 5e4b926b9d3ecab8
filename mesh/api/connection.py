"""One client's connection: as uvicorn serves it, but nobody may take for ever over a request.

uvicorn waits without limit for the rest of a header or a body, and for a client that does not read
its answer; a thousand such clients would use up the daemon's sockets. Knows nothing of what is
asked.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from mesh.api.faults import error_body
from mesh.api.neighbours import Neighbour
from mesh.api.services import ApiSettings
from mesh.clock import AWAKE_TICK_S
from mesh.errors import BadRequest, HeadersTooLarge, MeshError

NEIGHBOUR = "neighbour"
"""The name in a request's state of the connection's `Neighbour`."""

_LATER_S = 2.0
"""How long after the handler's own limit a body is cut; a client that reads is told why first."""

_PIECES_A_TURN = 64
"""Of a body, parsed before the loop serves others: h11 takes 30 us for each, and what comes in one
read may be 40,000 chunks of a byte."""


_SHOWN_CHARS = 100
_LENGTHS = {b"content-length", b"transfer-encoding"}


class _Turns(h11.Connection):
    """Gives so many pieces of a body as it has `left` in this turn of the loop; no request that
    says twice how long it is."""

    left = _PIECES_A_TURN
    refusal: h11.RemoteProtocolError | None = None
    """Why what came is no HTTP."""

    def next_event(self) -> Any:
        if not self.left:
            return h11.NEED_DATA
        try:
            event = super().next_event()
            _require_one_length(event)
        except h11.RemoteProtocolError as error:
            self.refusal = error
            raise
        self.left -= isinstance(event, h11.Data)
        return event


class _Flow(FlowControl):
    """Resumes nothing while what has been read is not parsed."""

    is_held = False

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class BoundedConnection(H11Protocol):
    """Cuts connections that are too many, too slow to ask, or too slow to take the answer."""

    def __init__(self, settings: ApiSettings, **given: Any) -> None:
        super().__init__(**given)
        self._limits_s = {
            h11.IDLE: (settings.head_timeout_s, 0.0),
            h11.SEND_BODY: (settings.body_timeout_s, _LATER_S),
        }
        self._unread_limit_s = settings.unread_timeout_s
        self._max_connections = settings.max_connections
        self.opened_at = 0.0
        """Seconds, on the loop's clock."""
        self._phase: object = None
        self._asking: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        most_bytes: Any = self.config.h11_max_incomplete_event_size
        self._turns = self.conn = _Turns(h11.SERVER, most_bytes)
        self._going_on: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first request's head; who is at the other end is looked up when
        asked."""
        super().connection_made(transport)
        self._flow = self.flow = _Flow(transport)
        self.opened_at = self.loop.time()
        if len(self.connections) > self._max_connections:
            self._make_room()
        self.app_state = {**self.app_state, NEIGHBOUR: Neighbour(transport)}
        self._follow_phase()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all clocks of this connection."""
        for timer in (self._asking, self._unread, self._going_on):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came; the clock of the request's present part goes on or stops."""
        super().data_received(data)
        self._follow_phase()

    def handle_events(self) -> None:
        """As much of what came as is parsed in this turn; the rest in the next."""
        if self._going_on is not None:
            return
        self._turns.left = _PIECES_A_TURN
        super().handle_events()
        if not self._turns.left and not self.transport.is_closing():
            self._flow.is_held = True
            self._flow.pause_reading()
            self.transport.pause_reading()  # uvicorn resumes it past the flow
            self._going_on = self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._going_on, self._flow.is_held = None, False
        self.handle_events()
        self._follow_phase()
        if self.cycle is None or len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self._flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Say why what came is no HTTP, where no answer has begun; then end the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = _refused(self._turns.refusal)
            told = json.dumps(error_body(error)).encode()
            status = HTTPStatus(error.http_status)
            fields = [("Content-Type", "application/json"), ("Content-Length", str(len(told)))]
            head = h11.Response(
                status_code=status,
                headers=[*fields, ("Connection", "close")],
                reason=status.phrase.encode(),
            )
            self.transport.write(self.conn.send(head) or b"")
            self.transport.write(told)
        self.transport.close()

    def on_response_complete(self) -> None:
        """The next request on this connection may begin, with its own clock."""
        super().on_response_complete()
        self._follow_phase()

    def pause_writing(self) -> None:
        """The client reads nothing: it has so many seconds until it is cut off."""
        super().pause_writing()
        self._unread = self.loop.call_later(self._unread_limit_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again: stop that clock."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _make_room(self) -> None:
        """Cut whoever stands open and asks nothing for longest, of the address with most of these.

        Else connections that only stand open would keep everybody out. This one goes where all
        others are being served.
        """
        idle = [
            each
            for each in self.connections
            if isinstance(each, BoundedConnection) and each.is_idle and each is not self
        ]
        by_host = Counter(map(_host, idle))
        cut = min(idle, key=lambda each: (-by_host[_host(each)], each.opened_at), default=self)
        self.connections.discard(cut)
        cut.transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether no request has come whole that is not answered."""
        return self._asking is not None

    def _follow_phase(self) -> None:
        """One limit for the whole head and one for the whole body, however the bytes come."""
        phase = self.conn.their_state
        if phase is self._phase:
            return
        self._phase = phase
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
        # h11 never sees the end of a request whose connection a WebSocket has taken over.
        upgraded = self.transport.get_protocol() is not self
        limits = None if upgraded else self._limits_s.get(phase)
        if limits is not None and not self.transport.is_closing():
            limit_s, later_s = limits
            self._asking = self.loop.call_later(limit_s, self._abort_later, later_s)

    def _abort_later(self, later_s: float) -> None:
        """By a clock that begins now and counts a tick in which this machine stood still as one, so
        that a handler has its say."""
        if later_s <= 0:
            self.transport.abort()
        else:
            left_s = later_s - AWAKE_TICK_S
            self._asking = self.loop.call_later(AWAKE_TICK_S, self._abort_later, left_s)


def _require_one_length(event: Any) -> None:
    """Raises h11.RemoteProtocolError. A proxy that goes by the other length would see other
    requests: RFC 9112, 6.1."""
    if isinstance(event, h11.Request) and {name for name, _ in event.headers} >= _LENGTHS:
        raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")


def _refused(why: h11.RemoteProtocolError | None) -> MeshError:
    if why is not None and why.error_status_hint == HeadersTooLarge.http_status:
        return HeadersTooLarge("The request's head is too long.", fix="Send less.")
    said = "" if why is None else f": {str(why)[:_SHOWN_CHARS]}"
    return BadRequest(f"What came is no HTTP request{said}.", fix="Speak HTTP/1.1 to this port.")


def _host(connection: BoundedConnection) -> str:
    return connection.client[0] if connection.client else ""
