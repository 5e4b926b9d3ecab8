"""A listening node on loopback, for the tests that use real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import websockets.asyncio.client as high_client

from mesh.wire.connection import PATH, WebSocketLink
from mesh.wire.limits import DEFAULT_LIMITS, Limits
from mesh.wire.link import LinkHandler
from mesh.wire.messages import Message, Step
from mesh.wire.protocol import TensorSession
from mesh.wire.websocket import Doorkeeper, LinkServer, connect, serve
from tests.wire.support import Recorder, answer, hello

QUICK = replace(DEFAULT_LIMITS, handshake_s=0.2, ping_interval_s=0.05, silence_s=0.4)


class Echo(Recorder):
    """Answers every step with its own tensor."""

    def __init__(self, link: WebSocketLink) -> None:
        super().__init__()
        self.link = link

    def message(self, message: Message) -> None:
        if isinstance(message, Step):
            self.link.send(answer(message))
        else:
            super().message(message)


class House:
    """A listening node and what it accepted."""

    def __init__(self) -> None:
        self.server: LinkServer
        self.handlers: list[Echo] = []

    def accept(self, link: WebSocketLink) -> LinkHandler:
        self.handlers.append(Echo(link))
        return self.handlers[-1]

    async def dial(
        self, handler: LinkHandler | None = None, limits: Limits = DEFAULT_LIMITS
    ) -> WebSocketLink:
        return await connect(
            "127.0.0.1", self.server.port,
            hello=hello("client"), handler=handler or Recorder(), limits=limits,
        )  # fmt: skip


@asynccontextmanager
async def listening(
    limits: Limits = DEFAULT_LIMITS,
    accept: Callable[[WebSocketLink], LinkHandler] | Doorkeeper | None = None,
    host: str = "127.0.0.1",
) -> AsyncIterator[House]:
    house = House()
    house.server = await serve(
        host, 0, accept=accept or house.accept, hello=lambda: hello("server"), limits=limits
    )
    try:
        yield house
    finally:
        await house.server.close()


@asynccontextmanager
async def foreign_client(
    house: House, name: str = "foreign"
) -> AsyncIterator[high_client.ClientConnection]:
    """Somebody else's websocket client after our hello exchange: frame 1 comes next."""
    async with high_client.connect(
        f"ws://127.0.0.1:{house.server.port}{PATH}", proxy=None, compression=None
    ) as websocket:
        session = TensorSession(hello(name))
        session.start()
        await websocket.send(session.next_frame() or b"")
        await websocket.recv()
        yield websocket
