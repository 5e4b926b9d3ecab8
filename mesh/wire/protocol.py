"""One link's protocol without I/O: websocket messages in, `Message`s out, and the reverse.

`TensorSession` owns the order of things (hello first, sequence numbers, what is allowed when) and
puts together the parts that know the details: `frames`, `control`, `steps`, `tensors`,
`reassembly`, `credits` (receiving window) and `outbox` (sending window). It reads no clock and
opens no socket.

How flow control works: a chunk is a frame that bears tensor bytes, at most `Limits.window` of them
are unacknowledged per direction. Credits come back in the next `Step`, `Result` or END frame, or in
an ACK once half a window is owed. A step's last chunk is credited by its answer. Nothing the peer
does makes either side hold more than `Limits` says.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import Enum, auto
from typing import ClassVar

from mesh.errors import BadFrame, FrameTooLarge, LinkLost, MeshError, WireError, from_dict
from mesh.wire import control, steps
from mesh.wire.compression import compress_if_it_pays, decompress
from mesh.wire.credits import Credits
from mesh.wire.frames import COMPRESSED, FINAL, GRADIENT, Buffer, Frame, FrameType, version_mismatch
from mesh.wire.limits import DEFAULT_LIMITS, Limits
from mesh.wire.messages import (
    PROTOCOL_VERSION,
    Bye,
    Close,
    Failure,
    Hello,
    Message,
    Ping,
    Pong,
    Result,
    Step,
    WireTensor,
)
from mesh.wire.outbox import Outbox
from mesh.wire.reassembly import Reassembly
from mesh.wire.tensors import TensorHeader

_COUNT = struct.Struct("!I")
_TOKEN = struct.Struct("!Q")
_MAX_PINGS = 8
_FIX = "Run the same hearthnet version on both machines."


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
        self.hello = hello
        self.limits = limits
        self.peer: Hello | None = None
        self._state = _State.NEW
        self._started = False
        self._expected = 0
        self._pings: set[int] = set()
        self._credits = Credits(limits)
        self._reassembly = Reassembly(limits)
        self._outbox = Outbox(limits, self._credits)

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
        return self._reassembly.size_bytes + self._credits.unanswered_bytes

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
        the wire, Busy when `Limits.queued_bytes` already wait.
        """
        if self._state is not _State.OPEN:
            raise LinkLost("The link is not open.", fix="Connect again.")
        kind = _TENSOR_KIND.get(type(message))
        if kind is not None:
            assert isinstance(message, (Step, Result))  # noqa: S101 - for the type checker
            if kind is FrameType.STEP or self._credits.holds(message.session, message.step):
                self._outbox.tensor(kind, message)
        elif isinstance(message, Ping):
            self._send_ping(message)
        elif isinstance(message, Pong):
            self._outbox.control(FrameType.PONG, _TOKEN.pack(message.token))
        else:
            self._send_control(message)
            if isinstance(message, Bye):
                self._state = _State.CLOSED

    def limit_window(self, chunks: int) -> None:
        """Ask the peer to keep at most `chunks` (0 to the window) in flight from now on."""
        self._outbox.control(FrameType.FLOW, _COUNT.pack(min(chunks, self.limits.window)))

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
        return frame

    def _send_ping(self, ping: Ping) -> None:
        # A peer that answers none of them gets no more; the adapter's timeout deals with it.
        if len(self._pings) < _MAX_PINGS:
            self._pings.add(ping.token)
            self._outbox.control(FrameType.PING, _TOKEN.pack(ping.token))

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
        if isinstance(message, Failure) and message.session is not None:
            if message.step is None:
                self._credits.forget(message.session)
            else:
                self._credits.answered(message.session, message.step)
            self._return_credits()

    def _return_credits(self) -> None:
        if self._credits.due:
            self._outbox.control(FrameType.ACK, _COUNT.pack(self._credits.take()))

    # What comes in.

    def receive(self, message: Buffer) -> list[Message]:
        """Take one websocket message; the messages it completes, mostly none or one.

        `Ping`, credits and chunks are dealt with here and not returned. Raises WireError after
        queueing a nack when the peer broke the protocol, and the peer's own error when it nacked.
        Returns nothing once closed. Tensors of the result may be views into `message`.
        """
        if self._state is _State.OPEN:
            plain = self._receive_plain(message)
            if plain is not None:
                return [plain]
        elif self._state is _State.CLOSED:
            return []
        try:
            frame = Frame.parse(message, self.limits.message_bytes)
            if frame.sequence != self._expected:
                raise BadFrame(
                    f"Frame {frame.sequence} came where {self._expected} was expected.", fix=_FIX
                )
            self._expected = (frame.sequence + 1) & 0xFFFFFFFF
            if self.peer is None and frame.type not in _BEFORE_HELLO:
                raise BadFrame(f"{frame.type.name} came before HELLO.", fix=_FIX)
            received = self._RECEIVE[frame.type](self, frame)
        except WireError as error:
            self.refuse(error)
            raise
        if frame.type is FrameType.NACK:
            self._state = _State.CLOSED
            raise from_dict(control.unpack_map(self._body(frame)))
        return [] if received is None else [received]

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
            raise BadFrame("A second HELLO.", fix=_FIX)
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
            self._credits.forget(message.session)
            self._outbox.drop_results(message.session)
            self._return_credits()
        elif isinstance(message, Bye):
            self._state = _State.CLOSED
        return message

    def _receive_plain(self, message: Buffer) -> Message | None:
        """What nearly every frame is, if nothing at all is odd about this one; else None."""
        if self._credits.is_full:
            return None
        plain = steps.unpack_plain(message, self._expected, self.limits.chunk_bytes)
        if plain is None or plain[1] > self._outbox.in_flight:
            return None
        received, credits, size = plain
        self._expected = (self._expected + 1) & 0xFFFFFFFF
        self._credits.outstanding += 1
        if credits:
            self._outbox.credit(credits)
        if type(received) is Step:
            self._credits.hold(received.session, received.step, size)
        else:
            self._credits.consumed()
            self._return_credits()
        return received

    def _receive_whole(self, frame: Frame) -> Message:
        """STEP or RESULT with its tensor in the same frame."""
        credits, start = steps.unpack_credits(frame.type, memoryview(frame.payload))
        rest = memoryview(frame.payload)[start:]
        header = TensorHeader.unpack(rest, self.limits.chunk_bytes)
        data: Buffer = rest[len(header.encoded) :]
        if frame.flags & COMPRESSED:
            data = decompress(data, header.size_bytes)
        tensor = header.tensor(data, gradient=bool(frame.flags & GRADIENT))
        self._credits.arrived()
        return self._deliver(frame.type, memoryview(frame.payload), tensor, credits)

    def _receive_chunk(self, frame: Frame) -> None:
        payload = memoryview(frame.payload)
        header = TensorHeader.unpack(payload, self.limits.tensor_bytes)
        room = self._reassembly.room_for(header)
        data: bytes | memoryview = payload[len(header.encoded) :]
        if frame.flags & COMPRESSED:
            data = decompress(data, min(room, self.limits.chunk_bytes))
        elif len(data) > self.limits.chunk_bytes:
            raise FrameTooLarge(
                f"A chunk of {len(data)} bytes exceeds {self.limits.chunk_bytes}.", fix=_FIX
            )
        self._credits.arrived()
        final = bool(frame.flags & FINAL)
        gradient = bool(frame.flags & GRADIENT)
        self._reassembly.add(header, data, final=final, gradient=gradient)
        if not final:  # the last chunk's credit is the message's own, see _deliver
            self._credits.consumed()
            self._return_credits()

    def _receive_end(self, frame: Frame) -> Message:
        tensor_id, kind, rest = steps.unpack_end(memoryview(frame.payload))
        credits, _ = steps.unpack_credits(kind, rest)
        return self._deliver(kind, rest, self._reassembly.end(tensor_id), credits)

    def _deliver(
        self, kind: FrameType, fields: memoryview, tensor: WireTensor, credits: int
    ) -> Message:
        """Build the message, settle credits in both directions."""
        message = steps.build(kind, fields, tensor)
        if credits:
            self._outbox.credit(credits)
        if kind is FrameType.STEP:
            self._credits.hold(message.session, message.step, len(tensor.data))
        else:
            self._credits.consumed()
            self._return_credits()
        return message

    def _receive_ack(self, frame: Frame) -> None:
        count = _number(frame, _COUNT)
        if count == 0:
            raise BadFrame("An ACK of nothing.", fix=_FIX)
        self._outbox.credit(count)

    def _receive_flow(self, frame: Frame) -> None:
        window = _number(frame, _COUNT)
        if window > self.limits.window:
            raise BadFrame(f"A window of {window} chunks; at most {self.limits.window}.", fix=_FIX)
        self._outbox.window = window
        self._outbox.flush()

    def _receive_ping(self, frame: Frame) -> None:
        self._outbox.control(FrameType.PONG, _TOKEN.pack(_number(frame, _TOKEN)))

    def _receive_pong(self, frame: Frame) -> Message:
        token = _number(frame, _TOKEN)
        if token not in self._pings:
            raise BadFrame("A PONG for no PING.", fix=_FIX)
        self._pings.discard(token)
        return Pong(token)

    def _receive_nack(self, frame: Frame) -> None:
        """`receive` raises what it says."""

    _RECEIVE: ClassVar[dict[FrameType, Callable[[TensorSession, Frame], Message | None]]] = {
        FrameType.DATA: _receive_chunk,
        FrameType.END: _receive_end,
        FrameType.ACK: _receive_ack,
        FrameType.NACK: _receive_nack,
        FrameType.HELLO: _receive_hello,
        FrameType.FLOW: _receive_flow,
        FrameType.PING: _receive_ping,
        FrameType.PONG: _receive_pong,
        FrameType.STEP: _receive_whole,
        FrameType.RESULT: _receive_whole,
        **dict.fromkeys(
            (
                FrameType.BYE, FrameType.OPEN, FrameType.OPENED, FrameType.PARK, FrameType.RESUME,
                FrameType.CLOSE, FrameType.FAILURE, FrameType.ADVERTISE, FrameType.DRAIN,
                FrameType.GOSSIP,
                FrameType.OPEN_TAPS, FrameType.OPEN_PART,
                FrameType.FILE_ASK, FrameType.FILE_PART, FrameType.SEAL, FrameType.SEALED,
                FrameType.LOADING,
            ),
            _receive_control,
        ),
    }  # fmt: skip


def _number(frame: Frame, layout: struct.Struct) -> int:
    if len(frame.payload) != layout.size:
        raise BadFrame(f"A {frame.type.name} payload of {len(frame.payload)} bytes.", fix=_FIX)
    value: int = layout.unpack(frame.payload)[0]
    return value


_TENSOR_KIND: dict[type, FrameType] = {Step: FrameType.STEP, Result: FrameType.RESULT}
_BEFORE_HELLO = frozenset({FrameType.HELLO, FrameType.NACK, FrameType.BYE})
