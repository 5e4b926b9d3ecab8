"""The receiving half of a link's tensors: frames in, messages out, and what is owed back.

Knows nothing of the order of frames, of hellos, or of what a tensor is for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from mesh.accounts.ledger import Hold
from mesh.codec import Buffer
from mesh.errors import SAME_VERSION, BadFrame, Busy, FrameTooLarge
from mesh.wire import steps
from mesh.wire.compression import decompress
from mesh.wire.credits import Credits
from mesh.wire.frames import (
    COMPRESSED,
    COUNT,
    FINAL,
    GRADIENT,
    Frame,
    FrameType,
    number,
)
from mesh.wire.limits import Limits
from mesh.wire.messages import Bearer, Failure, Result, RowAsk, Step, WireTensor
from mesh.wire.outbox import Outbox
from mesh.wire.tensors import Reassembly, TensorHeader

MAX_ROWS_ASKED = 1024


class TensorInbox:
    """Takes frames of tensors; `account`, when there is one, says whether there is room for them.

    Every frame may raise BadFrame or FrameTooLarge, and one that bears bytes Busy.
    """

    def __init__(self, limits: Limits, credits: Credits, outbox: Outbox) -> None:
        self._limits = limits
        self._credits = credits
        self._outbox = outbox
        self._reassembly = Reassembly(limits)
        self._rows_asked: set[tuple[int, int]] = set()
        self.account: Hold | None = None

    @property
    def size_bytes(self) -> int:
        """Tensor bytes held: incomplete, or complete and unanswered."""
        return self._reassembly.size_bytes + self._credits.unanswered_bytes

    def plain(self, message: Buffer, sequence: int) -> Step | Result | None:
        """What nearly every frame is, if nothing at all is odd about this one; else None."""
        account = self.account
        if self._credits.is_full or (account is not None and not account.fits(len(message))):
            return None
        plain = steps.unpack_plain(message, sequence, self._limits.chunk_bytes)
        if plain is None or plain[1] > self._outbox.in_flight:
            return None
        received, credits, size = plain
        self._credits.outstanding += 1
        if credits:
            self._outbox.credit(credits)
        if type(received) is Step:
            self._credits.hold(received.session, received.step, size)
        else:
            self._credits.consumed()
            self._return_credits()
        return received

    def take(self, frame: Frame) -> Bearer | None:
        """One of `TENSOR_FRAMES`; the message that it completes."""
        if self.account is not None and frame.type in _BEAR_BYTES:
            self.account.require(len(frame.payload))
        return self._TAKE[frame.type](self, frame)

    def ask_row(self, ask: RowAsk) -> None:
        """A result is owed though no step came. Raises Busy for more of them than anybody needs."""
        if len(self._rows_asked) >= MAX_ROWS_ASKED:
            raise Busy("Too many rows are asked for at once.", fix="Wait for an answer.")
        self._rows_asked.add((ask.session, ask.step))

    def take_awaited(self, result: Result) -> bool:
        """Whether somebody waits for this result: its step is here, or its row was asked for, which
        this is the answer to."""
        key = result.session, result.step
        if key in self._rows_asked:
            self._rows_asked.discard(key)
            return True
        return self._credits.holds(*key)

    def answered(self, failure: Failure) -> None:
        """A failure is on its way instead of one answer, or of all of a session."""
        if failure.session is None:
            return
        if failure.step is None:
            self.forget(failure.session)
            return
        self._rows_asked.discard((failure.session, failure.step))
        self._credits.answered(failure.session, failure.step)
        self._return_credits()

    def forget(self, session: int) -> None:
        """None of the session's steps will be answered any more."""
        self._credits.forget(session)
        self._rows_asked = {key for key in self._rows_asked if key[0] != session}
        self._return_credits()

    def _return_credits(self) -> None:
        if self._credits.due:
            self._outbox.control(FrameType.ACK, COUNT.pack(self._credits.take()))

    def _whole(self, frame: Frame) -> Bearer:
        """STEP, RESULT or BLOB with its tensor in the same frame."""
        credits, start = steps.unpack_credits(frame.type, memoryview(frame.payload))
        rest = memoryview(frame.payload)[start:]
        header = TensorHeader.unpack(rest, self._limits.chunk_bytes)
        data: Buffer = rest[len(header.encoded) :]
        if frame.flags & COMPRESSED:
            data = decompress(data, header.size_bytes)
        tensor = header.tensor(data, gradient=bool(frame.flags & GRADIENT))
        self._credits.arrived()
        return self._deliver(frame.type, memoryview(frame.payload), tensor, credits)

    def _chunk(self, frame: Frame) -> None:
        payload = memoryview(frame.payload)
        header = TensorHeader.unpack(payload, self._limits.tensor_bytes)
        room = self._reassembly.room_for(header)
        data: bytes | memoryview = payload[len(header.encoded) :]
        if frame.flags & COMPRESSED:
            data = decompress(data, min(room, self._limits.chunk_bytes))
        elif len(data) > self._limits.chunk_bytes:
            raise FrameTooLarge(
                f"A chunk of {len(data)} bytes exceeds {self._limits.chunk_bytes}.",
                fix=SAME_VERSION,
            )
        self._credits.arrived()
        final = bool(frame.flags & FINAL)
        gradient = bool(frame.flags & GRADIENT)
        self._reassembly.add(header, data, final=final, gradient=gradient)
        if not final:  # the last chunk's credit is the message's own, see _deliver
            self._credits.consumed()
            self._return_credits()

    def _end(self, frame: Frame) -> Bearer:
        tensor_id, kind, rest = steps.unpack_end(memoryview(frame.payload))
        credits, _ = steps.unpack_credits(kind, rest)
        return self._deliver(kind, rest, self._reassembly.end(tensor_id), credits)

    def _deliver(
        self, kind: FrameType, fields: memoryview, tensor: WireTensor, credits: int
    ) -> Bearer:
        """Build the message, settle credits in both directions."""
        message = steps.build(kind, fields, tensor)
        if credits:
            self._outbox.credit(credits)
        if isinstance(message, Step):
            self._credits.hold(message.session, message.step, len(tensor.data))
        else:
            self._credits.consumed()
            self._return_credits()
        return message

    def _ack(self, frame: Frame) -> None:
        count = number(frame, COUNT)
        if count == 0:
            raise BadFrame("An ACK of nothing.", fix=SAME_VERSION)
        self._outbox.credit(count)

    def _flow(self, frame: Frame) -> None:
        window = number(frame, COUNT)
        if window > self._limits.window:
            raise BadFrame(
                f"A window of {window} chunks; at most {self._limits.window}.", fix=SAME_VERSION
            )
        self._outbox.window = window
        self._outbox.flush()

    _TAKE: ClassVar[dict[FrameType, Callable[[TensorInbox, Frame], Bearer | None]]] = {
        FrameType.DATA: _chunk,
        FrameType.END: _end,
        FrameType.ACK: _ack,
        FrameType.FLOW: _flow,
        FrameType.STEP: _whole,
        FrameType.RESULT: _whole,
        FrameType.BLOB: _whole,
    }


TENSOR_FRAMES = frozenset(TensorInbox._TAKE)  # noqa: SLF001 - our own class
_BEAR_BYTES = TENSOR_FRAMES - {FrameType.END, FrameType.ACK, FrameType.FLOW}
