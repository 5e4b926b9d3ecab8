"""Nodes with keys and contexts, real links between them, and a count of what gets decoded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mesh.errors import MeshError
from mesh.identity.certificates import make_certificate
from mesh.identity.keys import NodeKey
from mesh.identity.tls import TlsContexts, TlsMaterial, require_node
from mesh.types import NodeId
from mesh.wire.connection import WebSocketLink
from mesh.wire.messages import Hello, Message
from mesh.wire.protocol import TensorSession
from mesh.wire.websocket import LinkServer, serve


class ManualClock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.offset_s = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.seconds + self.offset_s)


def new_key() -> NodeKey:
    return NodeKey(Ed25519PrivateKey.generate())


@dataclass(frozen=True)
class Party:
    """One machine: its key, what it trusts, how it presents itself."""

    name: str
    key: NodeKey = field(default_factory=new_key)

    @property
    def id(self) -> NodeId:
        return self.key.node_id

    @property
    def certificate(self) -> bytes:
        return make_certificate(self.key)

    def hello(self) -> Hello:
        return Hello(self.id, self.name, "tensors", "hearthnet/test")

    async def trusting(self, *others: Party) -> TlsContexts:
        """Contexts whose only anchors are the others' certificates."""
        return await asyncio.to_thread(contexts, self, *others)


def contexts(party: Party, *trusted: Party) -> TlsContexts:
    """The same where blocking is allowed."""
    return TlsContexts(TlsMaterial.of(party.key, [each.certificate for each in trusted]))


class Recorder:
    """A link handler that remembers, and echoes nothing."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.ended = asyncio.Event()

    def message(self, message: Message) -> None:
        self.messages.append(message)

    def closed(self, error: MeshError | None) -> None:
        self.ended.set()


class Served:
    """What a listening node has decoded and let in, counted where the frames are decoded."""

    def __init__(self, server: LinkServer, decoded: Decoded) -> None:
        self.server = server
        self.accepted: list[NodeId] = []
        self.handlers: list[Recorder] = []
        self._decoded = decoded

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def frames(self) -> int:
        return self._decoded.by_hello.get("server", 0)


class Decoded:
    """Frames that `TensorSession` decoded, by the side that did."""

    def __init__(self) -> None:
        self.by_hello: dict[str, int] = {}


@contextmanager
def counting(server_id: NodeId, patch: pytest.MonkeyPatch) -> Iterator[Decoded]:
    """Count every frame that any session decodes; the server's are those of `server_id`."""
    decoded = Decoded()
    receive = TensorSession.receive

    def counted(session: TensorSession, data: Any) -> list[Message]:
        side = "server" if session.hello.node_id == server_id else "client"
        decoded.by_hello[side] = decoded.by_hello.get(side, 0) + 1
        return receive(session, data)

    with patch.context() as inside:
        inside.setattr(TensorSession, "receive", counted)
        yield decoded


@asynccontextmanager
async def serving(
    party: Party, patch: pytest.MonkeyPatch, tls: TlsContexts | None
) -> AsyncIterator[Served]:
    """A listener of `party` that checks each peer's hello against its key, as a node does."""
    with counting(party.id, patch) as decoded:

        def accept(link: WebSocketLink) -> Recorder:
            served.accepted.append(require_node(link.peer_certificate, link.peer.node_id))
            served.handlers.append(Recorder())
            return served.handlers[-1]

        context = tls.server if tls is not None else None
        server = await serve("127.0.0.1", 0, accept=accept, hello=party.hello(), ssl=context)
        served = Served(server, decoded)
        try:
            yield served
        finally:
            await server.close()
