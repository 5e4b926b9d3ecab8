"""The sending half of a link: sequence numbers, the peer's window, and whose turn it is.

What one session sends leaves in order; sessions take turns chunk by chunk, so a decode step does
not wait behind another session's prefill. What the window does not admit stays here, unencoded.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from mesh.codec import Buffer
from mesh.errors import SAME_VERSION, BadFrame, Busy
from mesh.wire.credits import Credits
from mesh.wire.frames import FINAL, GRADIENT, FrameType, pack_frame
from mesh.wire.limits import Limits
from mesh.wire.messages import Bearer, Result
from mesh.wire.steps import CREDITS, pack, pack_end, pack_plain
from mesh.wire.tensors import MAX_OPEN_TENSORS, checked_bytes, pack_header


@dataclass(slots=True)
class _Control:
    kind: FrameType
    body: bytes
    flags: int


@dataclass(slots=True)
class _Tensor:
    kind: FrameType
    message: Bearer
    fields: bytes
    data: memoryview
    sent: int = -1  # -1: not started; it has no tensor id yet
    tensor_id: int = 0


_Item = _Control | _Tensor


class Outbox:
    """Encoded frames in `frames`, everything that waits for the window behind them."""

    def __init__(self, limits: Limits, credits: Credits) -> None:
        self._limits = limits
        self._credits = credits
        self._sequence = 0
        self._next_id = 0
        self._sending: dict[int, int] = {}  # sizes of the tensors that are partly sent, by id
        self._lanes: OrderedDict[int, deque[_Item]] = OrderedDict()
        self.window = limits.window
        self.frames: deque[bytes] = deque()
        self.ready_bytes = 0
        """Encoded bytes nobody took yet."""
        self.waiting_bytes = 0
        """Bytes of messages the window does not admit yet."""
        self.in_flight = 0
        """Tensor-bearing chunks the peer has not credited."""

    def control(self, kind: FrameType, body: bytes, flags: int = 0) -> None:
        """Send now, past everything that waits."""
        self._emit(kind, flags, body)

    def ordered(self, session: int, kind: FrameType, body: bytes, flags: int) -> None:
        """Send after whatever waits for the same session."""
        lane = self._lanes.get(session)
        if lane is None:
            self._emit(kind, flags, body)
        else:
            self._admit(len(body))
            lane.append(_Control(kind, body, flags))

    def tensor(self, kind: FrameType, message: Bearer) -> None:
        """Send what bears a tensor, in one frame when its tensor fits a chunk.

        Raises BadRequest for a tensor that cannot be sent, Busy when too much waits already.
        """
        data = checked_bytes(message.tensor, self._limits.tensor_bytes)
        if (
            len(data) <= self._limits.chunk_bytes
            and self.in_flight < self.window
            and message.session not in self._lanes
        ):
            self._emit_plain(kind, message, data)
            return
        item = _Tensor(kind, message, pack(message), memoryview(data))
        self._admit(len(data))
        self._lanes.setdefault(message.session, deque()).append(item)
        self.flush()

    def credit(self, chunks: int) -> None:
        """The peer consumed `chunks`; raises BadFrame when it never got that many."""
        if chunks > self.in_flight:
            raise BadFrame(
                f"{chunks} chunks acknowledged, {self.in_flight} in flight.",
                fix=SAME_VERSION,
            )
        self.in_flight -= chunks
        if self._lanes:
            self.flush()

    def drop_results(self, session: int) -> None:
        """Forget the session's answers that wait, except one that is partly sent already."""
        lane = self._lanes.get(session)
        if lane is None:
            return
        kept: deque[_Item] = deque()
        for item in lane:
            if isinstance(item, _Tensor) and item.kind is not FrameType.STEP and item.sent < 0:
                self.waiting_bytes -= len(item.data)
            else:
                kept.append(item)
        self._lanes[session] = kept
        self.flush()

    def clear(self) -> None:
        """Drop everything that was not taken yet, as if it had never been sent."""
        self._sequence = (self._sequence - len(self.frames)) & 0xFFFFFFFF
        self.frames.clear()
        self._lanes.clear()
        self.ready_bytes = self.waiting_bytes = 0

    def flush(self) -> None:
        """Encode what window and the peer's reassembly admit, one chunk per session and turn."""
        progress = True
        while progress:
            progress = False
            for session in list(self._lanes):
                lane = self._lanes[session]
                if lane and not self._advance(lane):
                    continue
                progress = True
                if lane:
                    self._lanes.move_to_end(session)
                else:
                    del self._lanes[session]

    def _admit(self, size_bytes: int) -> None:
        if self.ready_bytes + self.waiting_bytes + size_bytes > self._limits.queued_bytes:
            raise Busy(
                f"More than {self._limits.queued_bytes} bytes wait to be sent on one link.",
                fix="Await drain() before sending more.",
            )
        self.waiting_bytes += size_bytes

    def _advance(self, lane: deque[_Item]) -> bool:
        """Send the next piece of a lane; False when it has to wait."""
        item = lane[0]
        if isinstance(item, _Control):
            self.waiting_bytes -= len(item.body)
            self._emit(item.kind, item.flags, item.body)
        elif self.in_flight >= self.window:
            return False
        elif len(item.data) <= self._limits.chunk_bytes:
            self.waiting_bytes -= len(item.data)
            self._emit_plain(item.kind, item.message, item.data)
        elif not self._emit_chunk(item):
            return item.sent >= 0
        lane.popleft()
        return True

    def _emit_plain(self, kind: FrameType, message: Bearer, data: Buffer) -> None:
        credits = self._credits
        if type(message) is Result:
            credits.answered(message.session, message.step)
        frame = pack_plain(message, self._sequence, credits.owed, data)
        credits.take()
        self.in_flight += 1
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        self.frames.append(frame)
        self.ready_bytes += len(frame)

    def _emit_chunk(self, item: _Tensor) -> bool:
        """Send one chunk if it may start; True when it was the tensor's last."""
        tensor = item.message.tensor
        if item.sent < 0 and not self._start(item):
            return False
        start, stop = item.sent, min(item.sent + self._limits.chunk_bytes, len(item.data))
        last = stop == len(item.data)
        flags = (GRADIENT if tensor.gradient else 0) | (FINAL if last else 0)
        self.in_flight += 1
        self.waiting_bytes -= stop - start
        item.sent = stop
        self._emit(
            FrameType.DATA, flags, pack_header(tensor, item.tensor_id), item.data[start:stop]
        )
        if last:
            del self._sending[item.tensor_id]
            end = pack_end(item.tensor_id, item.kind)
            if type(item.message) is Result:
                self._credits.answered(item.message.session, item.message.step)
            credits = CREDITS.pack(self._credits.take(), 0)
            self._emit(FrameType.END, 0, end, credits, item.fields)
        return last

    def _start(self, item: _Tensor) -> bool:
        """Give the tensor an id, unless the peer could not hold one more incomplete tensor."""
        open_bytes = sum(self._sending.values())
        if (
            len(self._sending) >= MAX_OPEN_TENSORS
            or open_bytes + len(item.data) > self._limits.reassembly_bytes
        ):
            return False
        while self._next_id in self._sending:
            self._next_id = (self._next_id + 1) & 0xFFFF
        item.tensor_id, item.sent = self._next_id, 0
        self._next_id = (self._next_id + 1) & 0xFFFF
        self._sending[item.tensor_id] = len(item.data)
        return True

    def _emit(self, kind: FrameType, flags: int, *parts: bytes | memoryview) -> None:
        frame = pack_frame(kind, self._sequence, flags, *parts)
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        self.frames.append(frame)
        self.ready_bytes += len(frame)
