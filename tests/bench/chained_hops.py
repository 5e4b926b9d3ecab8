"""A token over two hops: through the asker each time, as we do it, beside handed from hop to hop.

Two processes that serve and one that asks, over the links that nodes use (mutual TLS left out: it
would be dearer for both alike). Each hop reads about as much memory between two messages as half of
the 0.16 B model takes in 8 bit, so both run with cold caches. Both ways alternate message by
message. What is compared is everything but the hops' own reading. On a real network the way back to
the asker, one half of a round trip for each boundary between hops, comes on top of the first.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from contextlib import AsyncExitStack

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from mesh.errors import MeshError
from mesh.wire.link import Link
from mesh.wire.messages import Blob, BlobKind, Hello, Message
from mesh.wire.websocket import connect, serve
from tests.bench.hop_latency import STAMPS, streamer

PAYLOAD_BYTES = 1536
MEGABYTES = 56
SAMPLES = 400
BY_ASKER, CHAINED, HERE_I_AM = 1, 2, 3
"""What the session's number says in this benchmark."""

Buffer = bytes | bytearray | memoryview

_HELLO = Hello("bench", "bench", "tensors", "bench")
_PADDING = bytes(PAYLOAD_BYTES - STAMPS.size)


def _bytes(session: int, data: Buffer) -> Blob:
    # Steps bind whoever gets them to answer where they came from; these go anywhere.
    return Blob(session, BlobKind.ANSWER, PAYLOAD_BYTES, 0, data)


class _House:
    """What a serving process knows: the hop behind it, and who asks."""

    def __init__(self) -> None:
        self.behind: Link | None = None
        self.asker: Link | None = None
        self.read = streamer(MEGABYTES)


class _Hop:
    def __init__(self, link: Link, house: _House) -> None:
        self._link = link
        self._house = house

    def message(self, message: Message) -> None:
        house = self._house
        assert isinstance(message, Blob)
        if message.session == HERE_I_AM:
            house.asker = self._link
            return
        started = time.perf_counter_ns()
        house.read()
        before, _ = STAMPS.unpack_from(message.data)
        # The nanoseconds that were spent reading, on all hops together.
        spent = before + time.perf_counter_ns() - started
        chained = house.behind or house.asker
        link = chained if message.session == CHAINED else self._link
        assert link is not None
        link.send(_bytes(message.session, STAMPS.pack(spent, 0) + _PADDING))

    def closed(self, error: MeshError | None) -> None:
        pass


class _Unheard:
    """Who hands on hears nothing from the hop behind."""

    def message(self, message: Message) -> None:
        raise AssertionError(message)

    def closed(self, error: MeshError | None) -> None:
        pass


class _Asker:
    def __init__(self) -> None:
        self.answer: asyncio.Future[Buffer] = asyncio.get_running_loop().create_future()

    def message(self, message: Message) -> None:
        assert isinstance(message, Blob)
        self.answer.set_result(message.data)

    def closed(self, error: MeshError | None) -> None:
        pass


async def _serve(behind: int | None) -> None:
    house = _House()
    if behind is not None:
        house.behind = await connect("127.0.0.1", behind, hello=_HELLO, handler=_Unheard())
    server = await serve("127.0.0.1", 0, accept=lambda link: _Hop(link, house), hello=_HELLO)
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.close()


async def _process(stack: AsyncExitStack, *arguments: str) -> int:
    """Start one that serves; its port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __spec__.name, "serve", *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip

    async def end() -> None:
        process.kill()
        await process.wait()

    stack.push_async_callback(end)
    assert process.stdout is not None
    return int(await process.stdout.readline())


async def _run() -> dict[str, float]:
    nothing = STAMPS.pack(0, 0) + _PADDING
    asker = _Asker()
    async with AsyncExitStack() as stack:
        last = await _process(stack)
        first = await _process(stack, str(last))
        links = [
            await connect("127.0.0.1", port, hello=_HELLO, handler=asker) for port in (first, last)
        ]
        links[1].send(_bytes(HERE_I_AM, nothing))

        async def asked(link: Link, blob: Blob) -> Buffer:
            asker.answer = asyncio.get_running_loop().create_future()
            link.send(blob)
            return await asyncio.wait_for(asker.answer, 10.0)

        async def by_asker() -> Buffer:
            between = await asked(links[0], _bytes(BY_ASKER, nothing))
            return await asked(links[1], _bytes(BY_ASKER, between))

        async def chained() -> Buffer:
            return await asked(links[0], _bytes(CHAINED, nothing))

        took: dict[str, list[float]] = {"by the asker": [], "chained": []}
        for number in range(SAMPLES):
            ways = [("by the asker", by_asker), ("chained", chained)]
            for name, way in ways if number % 2 else reversed(ways):
                started = time.perf_counter_ns()
                answer = await way()
                spent = time.perf_counter_ns() - started
                took[name].append((spent - STAMPS.unpack_from(answer)[0]) / 1e3)
    medians = {f"{name} us": round(statistics.median(each)) for name, each in took.items()}
    saved = [one - other for one, other in zip(*took.values(), strict=True)]
    return {**medians, "saved us a token, median": round(statistics.median(saved))}


def measure() -> dict[str, float]:
    """Microseconds of a token beside the hops' own reading, and what chaining saves of them."""
    return asyncio.run(_run())


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(_serve(int(sys.argv[2]) if sys.argv[2:] else None))
    else:
        print(json.dumps(measure(), indent=1))
