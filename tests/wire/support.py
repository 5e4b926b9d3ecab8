"""What the wire tests share: hellos, sessions after their handshake, handlers that record."""

from __future__ import annotations

import asyncio

from mesh.errors import MeshError
from mesh.wire.frames import COUNT, FrameType
from mesh.wire.limits import Limits
from mesh.wire.messages import Hello, Message, Result, Step, WireTensor
from mesh.wire.protocol import TensorSession
from mesh.wire.tensors import ITEMSIZE

SMALL = Limits(
    chunk_bytes=64,
    tensor_bytes=4096,
    reassembly_bytes=6000,
    unanswered_bytes=3000,
    control_bytes=2048,
    hello_bytes=1024,
    high_water_bytes=1024,
    queued_bytes=100_000,
)
"""Limits small enough that a test can reach every one of them."""


def hello(name: str = "node", **changes: object) -> Hello:
    """A plain hello, as a link says it."""
    fields: dict[str, object] = {
        "node_id": f"id-{name}", "node_name": name, "purpose": "tensors", "software": "test",
        "fields": {"blobs": True},
    }  # fmt: skip
    return Hello(**{**fields, **changes})  # type: ignore[arg-type]


def tensor(dtype: str = "fp16", shape: tuple[int, ...] = (1, 1, 8), fill: int = 7) -> WireTensor:
    """A tensor whose bytes are all `fill`."""
    size = ITEMSIZE[dtype]
    for dimension in shape:
        size *= dimension
    return WireTensor(dtype, shape, bytes([fill]) * size)


def frames(session: TensorSession) -> list[bytes]:
    """Everything the session has to write now."""
    result = []
    while (frame := session.next_frame()) is not None:
        result.append(frame)
    return result


def pass_on(sender: TensorSession, receiver: TensorSession) -> list[Message]:
    """Deliver all of one side's frames to the other."""
    return [message for frame in frames(sender) for message in receiver.receive(frame)]


def exchange(a: TensorSession, b: TensorSession) -> tuple[list[Message], list[Message]]:
    """Deliver in turns until nobody has anything to say; what a and what b got."""
    got_a: list[Message] = []
    got_b: list[Message] = []
    while a.ready_bytes or b.ready_bytes:
        got_b += pass_on(a, b)
        got_a += pass_on(b, a)
    return got_a, got_b


class NarrowingSession(TensorSession):
    """Also sends FLOW, which every session obeys and hearthnet's own never sends."""

    def limit_window(self, chunks: int) -> None:
        """Ask the peer to keep at most `chunks` (0 to the window) in flight from now on."""
        self._outbox.control(FrameType.FLOW, COUNT.pack(min(chunks, self.limits.window)))


def session_pair(
    limits: Limits = SMALL, purpose: str = "tensors"
) -> tuple[NarrowingSession, NarrowingSession]:
    """Two sessions after their hellos."""
    a, b = (NarrowingSession(hello(name, purpose=purpose), limits) for name in "ab")
    a.start()
    b.start()
    exchange(a, b)
    assert a.is_open
    assert b.is_open
    return a, b


def same(left: WireTensor, right: WireTensor) -> bool:
    """Equal whatever kind of buffer holds the bytes."""
    return (left.dtype, left.shape, bytes(left.data), left.gradient) == (
        right.dtype,
        right.shape,
        bytes(right.data),
        right.gradient,
    )


def answer(step: Step) -> Result:
    """The step's tensor back."""
    return Result(step.session, step.step, step.tensor, compute_us=5, queue_us=6)


class Recorder:
    """A LinkHandler that keeps what it gets."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.ended: asyncio.Future[MeshError | None] = asyncio.get_running_loop().create_future()

    def message(self, message: Message) -> None:
        self.messages.put_nowait(message)

    def closed(self, error: MeshError | None) -> None:
        self.ended.set_result(error)

    async def next(self, timeout_s: float = 10.0) -> Message:
        """The next message."""
        async with asyncio.timeout(timeout_s):
            return await self.messages.get()

    async def end(self, timeout_s: float = 10.0) -> MeshError | None:
        """Why the link ended."""
        async with asyncio.timeout(timeout_s):
            return await self.ended
