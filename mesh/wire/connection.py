"""One websocket connection as a `Link`: an asyncio.Protocol around websockets' Sans-I/O layer.

websockets does the HTTP upgrade, masking and framing, `TensorSession` the rest; this file moves
bytes between them and the transport and keeps time. Messages reach the handler from
`data_received` itself: with cold caches every task switch or queue in between costs more than the
framing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from websockets.client import ClientProtocol
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol

from mesh.errors import SAME_VERSION, BadFrame, ConnectFailed, LinkLost, MeshError, PipelineStalled
from mesh.wire.encryption import PlainProtocol
from mesh.wire.framing import FrameReader, fault_of, frame_size, write
from mesh.wire.link import LinkHandler
from mesh.wire.messages import Bye, Hello, Message, Ping, Pong
from mesh.wire.own_address import why_unheard
from mesh.wire.protocol import TensorSession

if TYPE_CHECKING:
    from websockets.http11 import Request, Response

PATH = "/mesh/v1/link"
_CLOSE_GRACE_S = 1.0
_BITE_BYTES, _MAX_CRUMBS = 4096, 1024
"""Frames below 125 bytes, which no peer of ours has websockets parse: 40,000 take it a second."""
_RECONNECT = "Connect again, or use another hop."


class WebSocketLink(PlainProtocol):
    """A `Link` over one WebSocket. `greet` gets the peer's hello and returns the handler.

    It may raise MeshError to refuse the peer. `settled` is called when the link has opened and
    again when the connection is gone, in any case the latter.
    """

    def __init__(
        self,
        websocket: ClientProtocol | ServerProtocol,
        session: TensorSession,
        greet: Callable[[WebSocketLink], LinkHandler],
        settled: Callable[[WebSocketLink], None],
    ) -> None:
        self._websocket = websocket
        self._session = session
        self._greet = greet
        self._settled = settled
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._handler: LinkHandler | None = None
        self._is_server = isinstance(websocket, ServerProtocol)
        self._unparsed = 1  # bytes websockets has of an incomplete frame; not 0 until the upgrade
        self._reader = FrameReader(session.limits.message_bytes, masked=self._is_server)
        self._fragments: bytearray | None = None
        self._crumbs = 0
        self._corked = False
        self._write_paused = False
        self._read_paused = False
        self._closed = False
        self._gone = False
        self._room: asyncio.Future[None] | None = None
        self._heard_at = self._loop.time()
        self._backlog = 0
        self._rtt_ms: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.peer_host = ""
        self.peer_certificate: bytes | None = None
        """The peer's TLS certificate in DER, None without TLS or without a certificate."""
        self.opened: asyncio.Future[None] = self._loop.create_future()
        """Done once both hellos were exchanged; carries the reason when that failed."""
        # A server's link that never opens is no news; without this asyncio would report it.
        self.opened.add_done_callback(lambda opened: opened.cancelled() or opened.exception())

    # The Link interface.

    @property
    def peer(self) -> Hello:
        """The other side's hello; known once the link is open."""
        return cast("Hello", self._session.peer)

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._closed or not self._session.is_open

    @property
    def rtt_ms(self) -> float | None:
        """The last measured round trip in ms; None before the first."""
        return self._rtt_ms

    @property
    def silent_s(self) -> float:
        """Seconds since anything last arrived, keepalive included."""
        return self._loop.time() - self._heard_at

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for the peer, here and in the transport."""
        written = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self._session.queued_bytes + written

    @property
    def is_gone(self) -> bool:
        """Whether the transport is closed, after whatever had to be said."""
        return self._gone

    def send(self, message: Message) -> None:
        """Queue one message. Raises LinkLost, or Busy above `Limits.queued_bytes`."""
        if self._closed:
            raise LinkLost("The link is closed.", fix=_RECONNECT)
        self._session.send(message)
        self._flush()

    async def drain(self, timeout_s: float) -> None:
        """Wait until less than the high-water mark is queued. Raises PipelineStalled, LinkLost."""
        limits = self._session.limits
        try:
            async with asyncio.timeout(timeout_s):
                while not self._closed and self.queued_bytes > limits.high_water_bytes:
                    if self._room is None:
                        self._room = self._loop.create_future()
                    await asyncio.shield(self._room)
        except TimeoutError as exc:
            raise PipelineStalled(
                f"The peer took nothing for {timeout_s} s.", fix=_RECONNECT
            ) from exc
        if self.is_closed:
            raise LinkLost("The link closed while draining.", fix=_RECONNECT)

    def close(self, reason: str = "") -> None:
        """Say bye and close; safe to call twice."""
        if not self._closed:
            self._session.close(reason)
            self._finish(None)

    def abort(self, error: MeshError) -> None:
        """Drop the connection without a word; the handler gets `error`."""
        self._finish(error)
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client asks for the upgrade at once; a server waits."""
        self._transport = transport = cast("asyncio.Transport", transport)
        if peername := transport.get_extra_info("peername"):
            self.peer_host = str(peername[0])
        if tls := transport.get_extra_info("ssl_object"):
            self.peer_certificate = tls.getpeercert(binary_form=True)
        # A few chunks, and no more than `drain` waits for: nobody would say when less has left.
        limits = self._session.limits
        transport.set_write_buffer_limits(min(4 * limits.chunk_bytes, limits.high_water_bytes))
        self._timer = self._loop.call_later(limits.handshake_s, self._expire)
        if isinstance(self._websocket, ClientProtocol):
            self._websocket.send_request(self._websocket.connect())
            self._write()

    def data_received(self, data: bytes | memoryview) -> None:
        """Everything that arrives passes here, through to the handler."""
        self._heard_at = self._loop.time()
        payloads, rest = self._reader.take(data) if not self._unparsed else ((), bytes(data))
        for payload in payloads:
            self._receive(payload)
        for at in range(0, len(rest), _BITE_BYTES):
            self._parse(rest[at : at + _BITE_BYTES])
            if self._crumbs > _MAX_CRUMBS:
                self.abort(BadFrame("It sends pings or crumbs without end.", fix=SAME_VERSION))
                return
        self._flush()

    def eof_received(self) -> None:
        """The peer will say no more; returning None makes asyncio close the transport."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The end, whoever caused it."""
        self._gone = True
        why = "." if exc is None else f": {exc}."
        lost = LinkLost(f"The connection broke{why}", fix=_RECONNECT)
        lost.__cause__ = exc
        self._finish(lost)
        if self._timer is not None:
            self._timer.cancel()
        self._settled(self)

    def pause_writing(self) -> None:
        """The transport is full: frames stay in the session until there is room."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """The transport has room again."""
        self._write_paused = False
        self._flush()

    # The way in.

    def _parse(self, data: bytes) -> None:
        """The upgrade, and whatever is not a binary frame in one piece."""
        websocket = self._websocket
        websocket.receive_data(data)
        self._unparsed += len(data)
        for event in websocket.events_received():
            if not isinstance(event, Frame):
                self._unparsed = len(data) - data.find(b"\r\n\r\n") - 4
                self._upgrade(event)
                continue
            self._unparsed -= frame_size(len(event.data), masked=self._is_server)
            self._crumbs += len(event.data) < 125
            if event.opcode is Opcode.BINARY and event.fin:
                self._receive(event.data)
            else:
                self._receive_other(event)
        if websocket.parser_exc is not None:
            self._finish(fault_of(websocket.parser_exc))

    def _upgrade(self, event: Request | Response) -> None:
        websocket = self._websocket
        if isinstance(websocket, ServerProtocol):
            request = cast("Request", event)
            if request.path == PATH:
                websocket.send_response(websocket.accept(request))
            else:
                websocket.send_response(websocket.reject(404, f"Only {PATH} is served here.\n"))
        elif websocket.handshake_exc is None:
            self._session.start()
        else:
            why = f"The server refused the upgrade: {websocket.handshake_exc}."
            self._finish(ConnectFailed(why, fix="Check that a hearthnet shard listens there."))

    def _receive(self, data: bytes | bytearray | memoryview) -> None:
        if self._closed:
            return
        try:
            messages = self._session.receive(data)
        except MeshError as error:
            self._finish(error)
            return
        for message in messages:
            if self._handler is not None and type(message) not in _OURS:
                self._handler.message(message)
            else:
                self._receive_ours(message)

    def _receive_other(self, frame: Frame) -> None:
        """Fragmented messages, which an intermediary may cause, and what nobody should send."""
        if frame.opcode is Opcode.BINARY:
            self._fragments = bytearray(frame.data)
        elif frame.opcode is Opcode.CONT and self._fragments is not None:
            self._fragments += frame.data
            if frame.fin:
                whole, self._fragments = self._fragments, None
                self._receive(whole)
        elif frame.opcode is Opcode.CLOSE:
            closed = self._websocket.close_rcvd
            self._finish(LinkLost(f"The peer closed the websocket: {closed}.", fix=_RECONNECT))
            self._hang_up()
        elif frame.opcode is Opcode.TEXT or frame.opcode is Opcode.CONT:
            self._refuse(BadFrame("A text message on a binary link.", fix=SAME_VERSION))

    def _receive_ours(self, message: Message) -> None:
        if isinstance(message, Hello):
            self._open()
        elif isinstance(message, Pong):
            self._rtt_ms = (self._loop.time() - message.token / 1e6) * 1e3
        elif isinstance(message, Bye):
            self._finish(None)
            self._hang_up()

    def _open(self) -> None:
        self._corked = True  # if `greet` refuses the peer, our hello must not have left
        try:
            if self._is_server:
                self._session.start()
            self._handler = self._greet(self)
        except MeshError as error:
            self._refuse(error)
            return
        finally:
            self._corked = False
        self._restart_timer(self._tick, self._session.limits.ping_interval_s)
        if not self.opened.done():
            self.opened.set_result(None)
        self._settled(self)

    # The way out.

    def _flush(self) -> None:
        """Hand over what cork and transport admit, then settle both sides' backpressure."""
        if not self._corked and not self._closed and self._transport is not None:
            session, masked = self._session, not self._is_server
            while not self._write_paused and (frame := session.next_frame()) is not None:
                write(self._transport, frame, masked=masked)
        if self._websocket.writes:
            self._write()
        if self._room or self._write_paused or self._read_paused:
            self._relieve()

    def _write(self) -> None:
        transport = self._transport
        for data in self._websocket.data_to_send():
            if transport is not None and not transport.is_closing():
                if data:
                    transport.write(data)
                else:
                    transport.close()

    def _relieve(self) -> None:
        """Wake `drain`; stop or start reading a peer that does or does not read us."""
        limits, transport = self._session.limits, self._transport
        full = not self._closed and self.queued_bytes > limits.high_water_bytes
        if self._room is not None and not full:
            self._room.set_result(None)
            self._room = None
        if transport is None or transport.is_closing():
            return
        unread = self._session.ready_bytes + transport.get_write_buffer_size()
        crowded = self._write_paused and unread > limits.unread_bytes
        if crowded is not self._read_paused:
            self._read_paused = crowded
            (transport.pause_reading if crowded else transport.resume_reading)()

    # Time and the end.

    def _restart_timer(self, callback: Callable[[], None], after_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(after_s, callback)

    def _tick(self) -> None:
        """Ping the peer, give up one that stays silent, or that cannot be heard any more.

        Whoever stood still itself has heard nobody meanwhile, and blames nobody.
        """
        now, limits = self._loop.time(), self._session.limits
        late_s = 0.0 if self._timer is None else now - self._timer.when()
        self._heard_at = min(now, self._heard_at + late_s)
        backlog = self.queued_bytes
        if self._read_paused and backlog < self._backlog:
            self._heard_at = now  # we do not listen, but it takes what we send
        self._backlog, self._crumbs = backlog, 0
        lost = why_unheard(self._transport)
        if self.silent_s > limits.silence_s:
            lost = LinkLost(f"The peer was silent for {limits.silence_s} s.", fix=_RECONNECT)
        if lost is not None:
            self.abort(lost)
            return
        self._restart_timer(self._tick, limits.ping_interval_s)
        if not self.is_closed:
            self.send(Ping(int(now * 1e6)))

    def _expire(self) -> None:
        self.abort(ConnectFailed("The peer did not say hello in time.", fix=_RECONNECT))

    def _refuse(self, error: MeshError) -> None:
        self._session.refuse(error)
        self._finish(error)

    def _finish(self, error: MeshError | None) -> None:
        """Everything that happens once at the end, except waiting for the peer to hang up."""
        if self._closed:
            return
        self._closed = True
        if not self.opened.done():
            self.opened.set_exception(error or LinkLost("The peer said bye.", fix=_RECONNECT))
        if self._handler is not None:
            self._loop.call_soon(self._handler.closed, error)
        self._relieve()
        if self._gone:
            return
        websocket = self._websocket
        if websocket.state is State.OPEN:
            while (frame := self._session.next_frame()) is not None:
                websocket.send_binary(frame)
            websocket.send_close(CloseCode.NORMAL_CLOSURE)
            self._write()
        # Whoever closes first with unread input resets the connection and may destroy its own last
        # words, so wait for the peer's close frame.
        self._restart_timer(self._hang_up, _CLOSE_GRACE_S)

    def _hang_up(self) -> None:
        """Close the transport: at once when it is flushed, by force after the grace time."""
        self._restart_timer(self._cut, _CLOSE_GRACE_S)
        self._write()
        if self._transport is not None:
            self._transport.close()

    def _cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()


_OURS = frozenset({Hello, Bye, Pong})
