"""A client of the tap protocol without a job around it, for a real shard process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from mesh.errors import MeshError, from_dict
from mesh.pipeline.lines import Line, Lines
from mesh.shard.taps.parts import FETCH, PART_BYTES
from mesh.types import LayerRange, ShardDescriptor
from mesh.wire.messages import Close, Failure, Message, Opened, OpenTaps, Result, Step, WireTensor
from tests import secure

ANSWER_TIMEOUT_S = 120.0


class RawTaps:
    """One intervention session; a `SessionReceiver`."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._number = line.register(self)
        self._steps = itertools.count(1)
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

    async def part(self, left: int, data: bytes) -> bytes:
        """One part, `left` more follow it; what is answered. Raises what it is refused with."""
        tensor = WireTensor("int8", (len(data),), data)
        self._line.send(Step(self._number, next(self._steps), left, tensor))
        answer = await self.answer()
        assert isinstance(answer, Result)
        return bytes(answer.tensor.data)

    async def say(self, message: bytes) -> bytes:
        """A whole message, and its whole answer."""
        parts = [message[i : i + PART_BYTES] for i in range(0, len(message), PART_BYTES)]
        for left, part in zip(reversed(range(len(parts))), parts, strict=True):
            said = await self.part(left, part)
        answer = [said[1:]]
        while said[:1] == b"\1":
            said = await self.part(FETCH, b"\0")
            answer.append(said[1:])
        return b"".join(answer)

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
        self._lines = Lines(secure.dial)

    async def open(self, layers: LayerRange) -> RawTaps:
        line = await self._lines.line(self.shard.host, self.shard.endpoint)
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
