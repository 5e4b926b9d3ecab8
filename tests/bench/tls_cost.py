"""What mutual TLS costs: opening a link, and 8 KiB there and back, beside the same without TLS.

Both ends run in one process and take turns, as asker and hop do within a step, so a round trip has
both sides' encryption in it. The hop says how long it was busy, and that is taken off. Hot: nothing
else happens. Cold: each side reads 100 MB before its turn, as a hop reads its weights; this reading
is also what the share of a step is taken of. Plain and TLS steps alternate, and lower quartiles are
compared, so that other processes' noise hits both and mostly drops out.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import quantiles

from mesh.errors import MeshError
from mesh.wire.link import Link
from mesh.wire.messages import Message, Result, Step, WireTensor
from mesh.wire.websocket import connect, serve
from tests.bench.hop_latency import COLD_MB, streamer
from tests.identity.support import Party

STEP_BYTES = 8192
HOME, FRIEND = Party("home"), Party("friend")
_TENSOR = WireTensor("fp16", (1, 1, STEP_BYTES // 2), bytes(STEP_BYTES))


class _Echo:
    """The hop: reads its weights, answers with the same tensor."""

    def __init__(self, link: Link, megabytes: int) -> None:
        self._link = link
        self._work = streamer(megabytes)

    def message(self, message: Message) -> None:
        assert isinstance(message, Step)
        began = time.perf_counter_ns()
        self._work()
        busy_us = (time.perf_counter_ns() - began) // 1000
        self._link.send(Result(message.session, message.step, message.tensor, busy_us, 0))

    def closed(self, error: MeshError | None) -> None:
        pass


class _Asker:
    """The asking end: whoever asked awaits `answer`."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def message(self, message: Message) -> None:
        self.answer.set_result(message)

    def closed(self, error: MeshError | None) -> None:
        pass


@dataclass
class _Line:
    """One link, its handler and the milliseconds that it took to open."""

    link: Link
    asker: _Asker
    opened_ms: float
    steps: int = 0

    async def step(self) -> tuple[float, float]:
        """One step: microseconds on the way, microseconds that the hop was busy."""
        self.asker.answer = asyncio.get_running_loop().create_future()
        self.steps += 1
        began = time.perf_counter()
        self.link.send(Step(1, self.steps, self.steps, _TENSOR))
        answer = await self.asker.answer
        took_us = (time.perf_counter() - began) * 1e6
        assert isinstance(answer, Result)
        return took_us - answer.compute_us, answer.compute_us


class _Hop:
    """A listening hop and how to reach it."""

    def __init__(self, port: int, context: ssl.SSLContext | None) -> None:
        self._port = port
        self._context = context

    async def open(self) -> _Line:
        """A new link to it."""
        asker, began = _Asker(), time.perf_counter()
        link = await connect(
            "127.0.0.1", self._port, hello=FRIEND.hello(), handler=asker, ssl=self._context
        )
        return _Line(link, asker, (time.perf_counter() - began) * 1e3)


@asynccontextmanager
async def _hop(megabytes: int, *, tls: bool) -> AsyncIterator[_Hop]:
    context = (await HOME.trusting(FRIEND)).server if tls else None
    server = await serve(
        "127.0.0.1", 0, accept=lambda link: _Echo(link, megabytes), hello=HOME.hello(), ssl=context
    )
    client = (await FRIEND.trusting(HOME)).client(HOME.id) if tls else None
    try:
        yield _Hop(server.port, client)
    finally:
        await server.close()


async def _openings(hop: _Hop, count: int) -> float:
    lines = []
    for _ in range(count):
        lines.append(await hop.open())
        lines[-1].link.close()
    return _quartile([line.opened_ms for line in lines])


async def _steps(megabytes: int, count: int) -> tuple[float, float, float]:
    """Microseconds on the way, plain and with TLS, and those of the work of both sides."""
    on_the_way: dict[bool, list[float]] = {False: [], True: []}
    busy_us, work = [], streamer(megabytes)
    async with _hop(megabytes, tls=False) as plain, _hop(megabytes, tls=True) as secured:
        lines = {False: await plain.open(), True: await secured.open()}
        for number in range(count + 5):
            for tls, line in lines.items():
                work()
                way_us, hop_us = await line.step()
                if number >= 5:
                    on_the_way[tls].append(way_us)
                    busy_us.append(2 * hop_us)
        for line in lines.values():
            line.link.close()
    return _quartile(on_the_way[False]), _quartile(on_the_way[True]), _quartile(busy_us)


def _quartile(values: list[float]) -> float:
    return quantiles(values, n=4)[0]


async def _measure() -> dict[str, float]:
    async with _hop(0, tls=False) as plain, _hop(0, tls=True) as secured:
        plain_ms, tls_ms = await _openings(plain, 40), await _openings(secured, 40)
    hot_plain, hot_tls, _ = await _steps(0, 1000)
    cold_plain, cold_tls, busy_us = await _steps(COLD_MB, 80)
    return {
        "link_open_plain_ms": round(plain_ms, 3),
        "link_open_tls_ms": round(tls_ms, 3),
        "step_hot_plain_us": round(hot_plain, 1),
        "step_hot_tls_us": round(hot_tls, 1),
        "step_hot_added_us": round(hot_tls - hot_plain, 1),
        "step_cold_plain_us": round(cold_plain, 1),
        "step_cold_tls_us": round(cold_tls, 1),
        "step_cold_added_us": round(cold_tls - cold_plain, 1),
        "step_cold_work_us": round(busy_us, 1),
        "tls_share_of_cold_step_percent": round(
            100 * (cold_tls - cold_plain) / (cold_plain + busy_us), 2
        ),
    }


def measure() -> dict[str, float]:
    """Opening a link and 8 KiB steps, with and without TLS, in one run; lower quartiles."""
    return asyncio.run(_measure())


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
