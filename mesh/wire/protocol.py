"""One link's protocol without I/O: websocket messages in, `Message`s out, and the reverse.

`TensorSession` owns the order of things (hello first, sequence numbers, what is allowed when) and
puts together the parts that know the details: `frames`, `control`, `inbox` (tensors received, with
`steps`, `tensors` and `credits`, the receiving window) and `outbox` (the sending window). It reads
no clock and opens no socket.

How flow control works: a chunk is a frame that bears tensor bytes, at most `Limits.window` of them
are unacknowledged per direction. Credits come back in the next `Step`, `Result` or END frame, or in
an ACK once half a window is owed. A step's last chunk is credited by its answer. Nothing the peer
does makes either side hold more than `Limits` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from typing import ClassVar

from mesh.accounts.ledger import Hold
from mesh.codec import Buffer
from mesh.errors import (
    SAME_VERSION,
    BadFrame,
    Busy,
    FrameTooLarge,
    LinkLost,
    MeshError,
    WireError,
    from_peer,
)
from mesh.wire import control
from mesh.wire.abilities import BLOBS
from mesh.wire.compression import compress_if_it_pays, decompress
from mesh.wire.credits import Credits
from mesh.wire.frames import (
    COMPRESSED,
    TOKEN,
    Frame,
    FrameType,
    number,
    version_mismatch,
)
from mesh.wire.inbox import TENSOR_FRAMES, TensorInbox
from mesh.wire.limits import DEFAULT_LIMITS, Limits
from mesh.wire.messages import (
    PROTOCOL_VERSION,
    Bearer,
    Blob,
    Bye,
    Close,
    Failure,
    Hello,
    Message,
    Ping,
    Pong,
    Result,
    RowAsk,
    Step,
)
from mesh.wire.outbox import Outbox

_MAX_PINGS = 8


class _State(Enum):
    NEW = auto()
    OPEN = auto()
    CLOSED = auto()


class TensorSession:
    """The state machine of one end of a link.

    Feed whole websocket messages to `receive`, hand messages to `send`, and write what
    `next_frame` returns until it returns None, each as one binary websocket message.
    """

    def __init__(self, hello: Hello, limits: Limits = DEFAULT_LIMITS) -> None:
        self._allowed = control.frames_for(hello.purpose)
        self._bears_tensors = FrameType.STEP in self._allowed
        if self._bears_tensors:
            hello = replace(hello, fields={**hello.fields, BLOBS: True})
        self.hello = hello
        self.limits = limits
        self.peer: Hello | None = None
        self._state = _State.NEW
        self._started = False
        self._expected = 0
        self._pings: set[int] = set()
        credits = Credits(limits)
        self._outbox = Outbox(limits, credits)
        self._inbox = TensorInbox(limits, credits, self._outbox)
        self._account: Hold | None = None

    @property
    def is_open(self) -> bool:
        """Whether both hellos were exchanged and nobody closed."""
        return self._state is _State.OPEN

    @property
    def is_closed(self) -> bool:
        """Whether either side said bye, nacked or was nacked."""
        return self._state is _State.CLOSED

    @property
    def queued_bytes(self) -> int:
        """All bytes that wait here, encoded or not."""
        return self._outbox.ready_bytes + self._outbox.waiting_bytes

    @property
    def ready_bytes(self) -> int:
        """Encoded bytes that wait for `next_frame`."""
        return self._outbox.ready_bytes

    @property
    def in_flight(self) -> int:
        """Chunks sent and not credited, at most `Limits.window`."""
        return self._outbox.in_flight

    @property
    def held_bytes(self) -> int:
        """Tensor bytes received and not given back: incomplete, or complete and unanswered."""
        return self._inbox.size_bytes

    def count_on(self, account: Hold) -> None:
        """Keep in `account` how many bytes are held here, for the peer or of it, from now on."""
        self._account = self._inbox.account = account
        self._count()

    def _count(self) -> None:
        account = self._account
        if account is not None:
            size_bytes = self.held_bytes + self.queued_bytes
            if size_bytes != account.size:
                account.charge(size_bytes - account.size)

    # What goes out.

    def start(self) -> None:
        """Queue our hello, once."""
        self._started = True
        self._send_control(self.hello)
        self._open_when_ready()

    def send(self, message: Message) -> None:
        """Queue one message; never blocks.

        A `Result` for a step that is not waiting (its session was closed) is dropped. Raises
        LinkLost before the hellos and after the end, BadRequest for a message that does not fit
        the wire, Busy when `Limits.queued_bytes` already wait or the
        peer's account has no room.
        """
        if self._state is not _State.OPEN:
            raise LinkLost("The link is not open.", fix="Connect again.")
        kind = _TENSOR_KIND.get(type(message))
        if kind is not None:
            assert isinstance(message, Bearer)  # noqa: S101 - for the type checker
            if self._account is not None:
                self._account.require(len(message.tensor.data))
            if type(message) is not Result or self._inbox.take_awaited(message):
                self._outbox.tensor(kind, message)
        elif isinstance(message, Ping):
            self._send_ping(message)
        elif isinstance(message, Pong):
            self._outbox.control(FrameType.PONG, TOKEN.pack(message.token))
        else:
            self._send_control(message)
            if isinstance(message, Bye):
                self._state = _State.CLOSED
        self._count()

    def close(self, reason: str) -> None:
        """Say bye, past everything that waits; safe to call twice."""
        if self._state is not _State.CLOSED:
            if self._started:
                self._send_control(Bye(reason[:1024]))
            self._state = _State.CLOSED

    def refuse(self, error: MeshError) -> None:
        """Nack with `error` and close; what was queued and not taken yet is dropped."""
        if self._state is not _State.CLOSED:
            self._state = _State.CLOSED
            self._outbox.clear()
            self._outbox.control(FrameType.NACK, control.pack_map(error.to_dict()))

    def next_frame(self) -> bytes | None:
        """Take the next websocket message to write, None when there is none."""
        outbox = self._outbox
        if not outbox.frames:
            return None
        frame = outbox.frames.popleft()
        outbox.ready_bytes -= len(frame)
        if not outbox.frames:
            self._count()
        return frame

    def _send_ping(self, ping: Ping) -> None:
        # A peer that answers none of them gets no more; the adapter's timeout deals with it.
        if len(self._pings) < _MAX_PINGS:
            self._pings.add(ping.token)
            self._outbox.control(FrameType.PING, TOKEN.pack(ping.token))

    def _send_control(self, message: Message) -> None:
        kind, body = control.encode(message)
        packed = compress_if_it_pays(body)
        flags = 0 if packed is None else COMPRESSED
        body = body if packed is None else packed
        session = getattr(message, "session", None)
        if session is None:
            self._outbox.control(kind, body, flags)
        else:
            self._outbox.ordered(session, kind, body, flags)
        if isinstance(message, Failure):
            self._inbox.answered(message)

    # What comes in.

    def receive(self, message: Buffer) -> list[Message]:
        """Take one websocket message; the messages it completes, mostly none or one.

        `Ping`, credits and chunks are dealt with here and not returned. Raises WireError after
        queueing a nack when the peer broke the protocol, and the peer's own error when it nacked.
        Returns nothing once closed. Tensors of the result may be views into `message`.
        """
        try:
            return self._receive(message)
        finally:
            self._count()

    def _receive(self, message: Buffer) -> list[Message]:
        if self._state is _State.OPEN and self._bears_tensors:
            plain = self._inbox.plain(message, self._expected)
            if plain is not None:
                self._expected = (self._expected + 1) & 0xFFFFFFFF
                return [plain]
        elif self._state is _State.CLOSED:
            return []
        try:
            frame = Frame.parse(message, self.limits.message_bytes)
            if frame.sequence != self._expected:
                raise BadFrame(
                    f"Frame {frame.sequence} came where {self._expected} was expected.",
                    fix=SAME_VERSION,
                )
            self._expected = (frame.sequence + 1) & 0xFFFFFFFF
            self._check_belongs(frame)
            received = self._take(frame)
        except (WireError, Busy) as error:
            self.refuse(error)
            raise
        if frame.type is FrameType.NACK:
            self._state = _State.CLOSED
            raise from_peer(control.unpack_map(self._body(frame)))
        return [] if received is None else [received]

    def _take(self, frame: Frame) -> Message | None:
        if frame.type in TENSOR_FRAMES:
            return self._inbox.take(frame)
        return self._RECEIVE.get(frame.type, TensorSession._receive_control)(self, frame)

    def _check_belongs(self, frame: Frame) -> None:
        """Before anything of the payload is looked at, or room made for it."""
        if self.peer is None and frame.type not in _BEFORE_HELLO:
            raise BadFrame(f"{frame.type.name} came before HELLO.", fix=SAME_VERSION)
        if frame.type not in self._allowed:
            raise BadFrame(
                f"{frame.type.name} does not belong on a link for {self.hello.purpose}.",
                fix="Send activations to the endpoint that the shard advertises.",
            )

    def _body(self, frame: Frame) -> Buffer:
        """A control payload, unpacked within its limit."""
        hello = frame.type is FrameType.HELLO
        limit = self.limits.hello_bytes if hello else self.limits.control_bytes
        if len(frame.payload) > limit:
            raise FrameTooLarge(
                f"A {frame.type.name} body of {len(frame.payload)} bytes exceeds {limit}.",
                fix="Say less in one message.",
            )
        return decompress(frame.payload, limit) if frame.flags & COMPRESSED else frame.payload

    def _open_when_ready(self) -> None:
        if self._started and self.peer is not None and self._state is _State.NEW:
            self._state = _State.OPEN

    def _receive_hello(self, frame: Frame) -> Message:
        if self.peer is not None:
            raise BadFrame("A second HELLO.", fix=SAME_VERSION)
        values = control.unpack_map(self._body(frame))
        version = values.get("version")
        if type(version) is int and version != PROTOCOL_VERSION:
            # Before the layout is checked: another version may well have another one.
            us, them = self.hello.node_name, f"{values.get('node_name')!s:.128}"
            raise version_mismatch(us, PROTOCOL_VERSION, them, version)
        hello = control.decode(frame.type, values)
        assert isinstance(hello, Hello)  # noqa: S101 - for the type checker
        self.peer = hello
        self._open_when_ready()
        return hello

    def _receive_control(self, frame: Frame) -> Message:
        message = control.decode(frame.type, control.unpack_map(self._body(frame)))
        if isinstance(message, Close):
            self._inbox.forget(message.session)
            self._outbox.drop_results(message.session)
        elif isinstance(message, RowAsk):
            self._inbox.ask_row(message)
        elif isinstance(message, Bye):
            self._state = _State.CLOSED
        return message

    def _receive_ping(self, frame: Frame) -> None:
        self._outbox.control(FrameType.PONG, TOKEN.pack(number(frame, TOKEN)))

    def _receive_pong(self, frame: Frame) -> Message:
        token = number(frame, TOKEN)
        if token not in self._pings:
            raise BadFrame("A PONG for no PING.", fix=SAME_VERSION)
        self._pings.discard(token)
        return Pong(token)

    def _receive_nack(self, frame: Frame) -> None:
        """`receive` raises what it says."""

    _RECEIVE: ClassVar[dict[FrameType, Callable[[TensorSession, Frame], Message | None]]] = {
        FrameType.NACK: _receive_nack,
        FrameType.HELLO: _receive_hello,
        FrameType.PING: _receive_ping,
        FrameType.PONG: _receive_pong,
    }
    """The inbox takes those of tensors; all others are control bodies."""


_TENSOR_KIND: dict[type, FrameType] = {
    Step: FrameType.STEP,
    Result: FrameType.RESULT,
    Blob: FrameType.BLOB,
}
_BEFORE_HELLO = frozenset({FrameType.HELLO, FrameType.NACK, FrameType.BYE})
