"""A TCP proxy on loopback that misbehaves when told to: cuts, swallows, dawdles, delays."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

_PIECE = 1 << 16


class Proxy:
    """Passes connections on to `host`:`port`; listens on `self.port`.

    `silent`: takes what comes and passes nothing on. `byte_s`: answers go out one byte per so many
    seconds. `chunk_s`: answers go out at most one piece (of any size) per so many seconds.
    `delay_s`: everything arrives so much later, in order.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.target = (host, port)
        self.port = 0
        self.silent = False
        self.byte_s = 0.0
        self.chunk_s = 0.0
        self.delay_s = 0.0
        self.refusing = False
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._enter, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection, both sides at once."""
        for writer in list(self._open):
            writer.transport.abort()

    def heal(self) -> None:
        """An ordinary wire again. What was swallowed is lost, so those connections are reset."""
        if self.silent:
            self.cut()
        self.silent = self.refusing = False
        self.byte_s = self.chunk_s = self.delay_s = 0.0

    # Private

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.target)
        except OSError:
            writer.transport.abort()
            return
        for end in (writer, far_writer):
            self._open.add(end)
        there = self._start(self._pass(reader, far_writer, answers=False))
        back = self._start(self._pass(far_reader, writer, answers=True))
        await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, far_writer):
            end.transport.abort()
            self._open.discard(end)

    def _start(self, work: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work, name="proxy")  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=1024)
        sender = self._start(self._send(queue, writer, answers=answers))
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(_PIECE):
                if not self.silent:
                    await queue.put((loop.time() + self.delay_s, piece))
        sender.cancel()

    async def _send(
        self,
        queue: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
        *,
        answers: bool,
    ) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while True:
                at, piece = await queue.get()
                if at > loop.time():
                    await asyncio.sleep(at - loop.time())
                if answers and self.chunk_s:
                    await asyncio.sleep(self.chunk_s)
                while answers and self.byte_s and piece:
                    writer.write(piece[:1])
                    piece = piece[1:]
                    await asyncio.sleep(self.byte_s)
                writer.write(piece)
                await writer.drain()
