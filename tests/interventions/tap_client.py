"""A client of the tap protocol without a job around it, for a real shard process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mesh.errors import MeshError, from_dict
from mesh.pipeline.links import HopLink, HopLinks
from mesh.shard.taps.parts import PART_BYTES
from mesh.types import LayerRange, ShardDescriptor
from mesh.wire.messages import Blob, BlobKind, Close, Failure, Message, Opened, OpenTaps
from tests import secure

ANSWER_TIMEOUT_S = 120.0


class RawTaps:
    """One intervention session; a `SessionReceiver`."""

    def __init__(self, line: HopLink) -> None:
        self._line = line
        self._number = line.register(self)
        self._answers: asyncio.Queue[Message | MeshError] = asyncio.Queue()

    def message(self, message: Message) -> None:
        self._answers.put_nowait(message)

    def lost(self, error: MeshError) -> None:
        self._answers.put_nowait(error)

    async def open(self, shard: ShardDescriptor, layers: LayerRange) -> None:
        question = OpenTaps(
            self._number, shard.model_id, shard.weights_sha256, layers.start, layers.stop
        )
        self._line.ask([question])
        assert isinstance(await self.answer(), Opened)

    async def part(self, length: int, offset: int, data: bytes) -> Blob:
        """A part of a question; what is answered. Raises what it is refused with."""
        return await self._exchange(Blob(self._number, BlobKind.QUESTION, length, offset, data))

    async def say(self, message: bytes) -> bytes:
        """A whole message, and its whole answer."""
        for first in range(0, len(message), PART_BYTES):
            part = message[first : first + PART_BYTES]
            said = await self.part(len(message), first, part)
        answer = bytes(said.data)
        while said.end < said.length:
            more = Blob(self._number, BlobKind.ANSWER, said.length, said.end)
            said = await self._exchange(more)
            answer += said.data
        return answer

    async def _exchange(self, blob: Blob) -> Blob:
        self._line.send(blob)
        answer = await self.answer()
        assert isinstance(answer, Blob)
        return answer

    def close(self) -> None:
        """Free the session."""
        self._line.unregister(self._number)
        self._line.send(Close(self._number))

    async def answer(self) -> Message:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answer = await self._answers.get()
        if isinstance(answer, MeshError):
            raise answer
        if isinstance(answer, Failure):
            raise from_dict(answer.error)
        return answer


class RawClient:
    """Sessions with one shard."""

    def __init__(self, shard: ShardDescriptor) -> None:
        self.shard = shard
        self._lines = HopLinks(secure.dial)

    async def open(self, layers: LayerRange) -> RawTaps:
        line = await self._lines.link(self.shard.host, self.shard.endpoint)
        session = RawTaps(line)
        await session.open(self.shard, layers)
        return session

    async def close(self) -> None:
        await self._lines.close()


async def in_thread(session: RawTaps, work: Callable[[Callable[[bytes], bytes]], None]) -> None:
    """Run `work`, which says one message after the other and waits for each answer."""
    loop = asyncio.get_running_loop()

    def exchange(message: bytes) -> bytes:
        return asyncio.run_coroutine_threadsafe(session.say(message), loop).result()

    await asyncio.to_thread(work, exchange)
