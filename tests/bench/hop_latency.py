"""What one hop costs: a Step out and a Result back between two processes, ours beside websockets.

Hot: nothing happens between messages. Cold: both sides read about 100 MB of memory between
messages, as a shard reads its weights, so that interpreter, library and kernel path have left the
caches. That is how a hop really runs, and everything is several times dearer then. The high-level
API carries the same bytes without any of our framing, so the comparison favours it. The way out is
split into encoding with the write, network with parsing, and what it takes to wake whoever awaits.
The floor is a blocking socket that carries the same bytes between the same two processes: what the
kernel takes for a message and for waking a process up, without a loop or a protocol.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import quantiles

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import numpy as np
import websockets.asyncio.client as high_client
import websockets.asyncio.server as high_server

from mesh.errors import MeshError
from mesh.wire.link import Link
from mesh.wire.messages import Hello, Message, Result, Step, WireTensor
from mesh.wire.websocket import connect, serve

PAYLOAD_BYTES = 1792
COLD_MB = 100
STAMPS = struct.Struct("!qq")
_PADDING = bytes(PAYLOAD_BYTES - STAMPS.size)
_HELLO = Hello("bench", "bench", "tensors", "bench")

Exchange = Callable[[], Awaitable[tuple[int, ...]]]


def streamer(megabytes: int) -> Callable[[], None]:
    """A function that reads `megabytes` of memory through a matrix-vector product."""
    blocks = [np.ones((1024, 1024), dtype=np.float32) for _ in range(megabytes // 4)]
    vector = np.ones(1024, dtype=np.float32)

    def stream() -> None:
        for block in blocks:
            block @ vector

    return stream


class _Hop:
    """The serving end: stream, then answer with when the message came and when the answer went."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._streams = {mb: streamer(mb) for mb in (0, COLD_MB)}

    def message(self, message: Message) -> None:
        arrived = time.perf_counter_ns()
        assert isinstance(message, Step)
        self._streams[message.position]()
        data = STAMPS.pack(arrived, time.perf_counter_ns()) + _PADDING
        tensor = WireTensor("fp16", message.tensor.shape, data)
        self._link.send(Result(message.session, message.step, tensor, 0, 0))

    def closed(self, error: MeshError | None) -> None:
        pass


class _Asker:
    """The asking end: whoever asked awaits `answer`."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.delivered = 0

    def message(self, message: Message) -> None:
        self.delivered = time.perf_counter_ns()
        self.answer.set_result(message)

    def closed(self, error: MeshError | None) -> None:
        pass


def _received(plain: socket.socket) -> bytes:
    """One message from a blocking socket."""
    message = bytearray()
    while len(message) < PAYLOAD_BYTES:
        part = plain.recv(PAYLOAD_BYTES - len(message))
        if not part:
            raise EOFError
        message += part
    return bytes(message)


def _serve_plainly(listener: socket.socket) -> None:
    streams = {mb: streamer(mb) for mb in (0, COLD_MB)}
    while True:
        plain, _ = listener.accept()
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                message = _received(plain)
                arrived = time.perf_counter_ns()
                streams[message[0]]()
                plain.sendall(STAMPS.pack(arrived, time.perf_counter_ns()) + _PADDING)
        except EOFError:
            plain.close()


async def _serve_all() -> None:
    streams = {mb: streamer(mb) for mb in (0, COLD_MB)}

    async def handle(connection: high_server.ServerConnection) -> None:
        async for message in connection:
            arrived = time.perf_counter_ns()
            assert isinstance(message, bytes)
            streams[message[0]]()
            await connection.send(STAMPS.pack(arrived, time.perf_counter_ns()) + _PADDING)

    ours = await serve("127.0.0.1", 0, accept=_Hop, hello=_HELLO)
    theirs = await high_server.serve(handle, "127.0.0.1", 0, compression=None, ping_interval=None)
    plain = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve_plainly, args=(plain,), daemon=True).start()
    ports = [ours.port, next(iter(theirs.sockets)).getsockname()[1], plain.getsockname()[1]]
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await ours.close()


async def _exchanges(ports: list[int], megabytes: int) -> dict[str, Exchange]:
    asker = _Asker()
    link = await connect("127.0.0.1", ports[0], hello=_HELLO, handler=asker)
    theirs = await high_client.connect(
        f"ws://127.0.0.1:{ports[1]}", compression=None, ping_interval=None, proxy=None
    )
    plain = socket.create_connection(("127.0.0.1", ports[2]))
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = bytes([megabytes]) + bytes(PAYLOAD_BYTES - 1)
    tensor = WireTensor("fp16", (1, 1, PAYLOAD_BYTES // 2), data)

    async def by_link(*, in_handler: bool = False, written: bool = False) -> tuple[int, ...]:
        asker.answer = asyncio.get_running_loop().create_future()
        sent = time.perf_counter_ns()
        link.send(Step(1, 1, megabytes, tensor))
        if written:
            sent = time.perf_counter_ns()
        answer = await asker.answer
        back = asker.delivered if in_handler else time.perf_counter_ns()
        assert isinstance(answer, Result)
        return (sent, *STAMPS.unpack_from(answer.tensor.data), back)

    async def by_websockets() -> tuple[int, ...]:
        sent = time.perf_counter_ns()
        await theirs.send(data)
        answer = await theirs.recv()
        back = time.perf_counter_ns()
        assert isinstance(answer, bytes)
        return (sent, *STAMPS.unpack_from(answer), back)

    async def by_socket() -> tuple[int, ...]:
        sent = time.perf_counter_ns()
        plain.sendall(data)
        answer = _received(plain)
        return (sent, *STAMPS.unpack_from(answer), time.perf_counter_ns())

    return {
        "hearthnet": by_link,
        "websockets.asyncio": by_websockets,
        "plain socket": by_socket,
        "hearthnet, in the handler": partial(by_link, in_handler=True),
        "hearthnet, once written": partial(by_link, written=True),
    }


async def _measure(ports: list[int], samples: int) -> dict[str, dict[str, float]]:
    result = {}
    for name, megabytes in (("hot", 0), ("cold", COLD_MB)):
        stream = streamer(megabytes)
        times: dict[str, list[tuple[float, float]]] = {}
        exchanges = await _exchanges(ports, megabytes)
        for index in range(samples + 5):
            for kind, exchange in exchanges.items():  # alternated, so that noise hits both
                sent, arrived, answered, back = await exchange()
                stream()
                if index >= 5:
                    there, home = (arrived - sent) / 1e3, (back - answered) / 1e3
                    times.setdefault(kind, []).append((there, home))
        result[name] = _summary(times)
    return result


def _summary(times: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    summary: dict[str, float] = {}
    for kind, pairs in times.items():
        summary[f"{kind} out us"] = out = _quartile([there for there, _ in pairs])
        summary[f"{kind} back us"] = back = _quartile([home for _, home in pairs])
        summary[f"{kind} round trip us"] = out + back
    network = summary["hearthnet, once written out us"]
    handled = summary["hearthnet, in the handler back us"]
    summary["split: encode and write us"] = summary["hearthnet out us"] - network
    summary["split: network and parse us"] = network
    summary["split: wake-up us"] = summary["hearthnet back us"] - handled
    theirs = summary["websockets.asyncio round trip us"]
    ratios = {f"{kind} ratio": summary[f"{kind} round trip us"] / theirs for kind in times}
    return {**summary, **ratios}


def _quartile(values: list[float]) -> float:
    """The lower quartile: what other processes on the machine add is in the upper part."""
    return quantiles(values, n=4)[0]


async def _run(samples: int) -> dict[str, dict[str, float]]:
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __spec__.name, "serve",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert server.stdout is not None
    try:
        ports = json.loads(await server.stdout.readline())
        return await _measure(ports, samples)
    finally:
        server.kill()
        await server.wait()


def measure(samples: int = 300) -> dict[str, dict[str, float]]:
    """Lower-quartile microseconds out, back and both, hot and cold, with ours over theirs."""
    return asyncio.run(_run(samples))


def main() -> None:
    """Print `measure()`, or serve for it."""
    if sys.argv[1:] == ["serve"]:
        asyncio.run(_serve_all())
        return
    for name, values in measure().items():
        print(name)
        for key, value in values.items():
            print(f"  {key:42} {value:8.2f}")


if __name__ == "__main__":
    main()
