"""The messages of one session, counted from their first part to their last answer."""

from __future__ import annotations

from mesh.shard.taps.codec import Buffers, header_bytes
from mesh.shard.taps.messages import TapReply, TapRequest, read_request, to_bytes
from mesh.shard.taps.meter import ENTRY_BYTES, MemoryMeter, Tally

_OBJECT_BYTES = 64
"""What a byte of a header may become: an empty list is one byte there, and an object here."""


class CountedBuffers(Buffers):
    """The tensors of an answer that is being written, counted as they are added."""

    def __init__(self, meter: MemoryMeter) -> None:
        super().__init__()
        self.tally = Tally(meter)

    def append(self, item: memoryview, /) -> None:
        """Count the bytes of one more tensor and keep it. Raises LimitReached."""
        self.tally.grow(len(item) + ENTRY_BYTES)
        super().append(item)

    def drop(self) -> None:
        """The answer is written, or never will be: keep and count nothing of it."""
        self.clear()
        self.tally.set(0)


class Mail:
    """What has come in and is not read yet, and the answer that is not fetched yet."""

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter
        self._arrived = 0
        self._incoming = Tally(meter)
        self._answer = Tally(meter)

    def arrives(self, size: int) -> None:
        """A part of a message has come in. Raises LimitReached; it is then not to be kept."""
        self._incoming.grow(size)
        self._arrived += size

    def open(self, message: bytes | bytearray | memoryview) -> tuple[TapRequest, Buffers]:
        """What a message says, and its tensors; whoever sends one has fetched the last answer.

        Raises BadRequest for what is none, LimitReached.
        """
        self._answer.set(0)
        missing = max(0, len(message) - self._arrived)
        self._incoming.grow(missing + _OBJECT_BYTES * header_bytes(message))
        return read_request(message)

    def read(self) -> None:
        """Nothing of the message is needed any more."""
        self._arrived = 0
        self._incoming.set(0)

    def close(self) -> None:
        """Nothing comes or goes any more."""
        self.read()
        self._answer.set(0)

    def new_buffers(self) -> CountedBuffers:
        """For the tensors of an answer."""
        return CountedBuffers(self._meter)

    def pack(self, reply: TapReply, buffers: CountedBuffers) -> bytes:
        """The answer's bytes. Raises BadRequest for what cannot go, LimitReached."""
        self._answer.set(sum(map(len, buffers)))  # both are there at once
        message = to_bytes(reply, buffers)
        buffers.drop()
        self._answer.set(len(message))
        return message
