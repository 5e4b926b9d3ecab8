"""A shard that lies: it speaks the real protocol over a real socket and computes with a real shard.

Everything is passed on between the asker and an honest shard; only the numbers of its results are
changed, or their shape. What it claims to be is the honest shard's advertisement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch

from mesh.errors import LinkLost, MeshError
from mesh.types import WireDtype
from mesh.wire.activations import to_torch, to_wire
from mesh.wire.connection import WebSocketLink
from mesh.wire.link import Link
from mesh.wire.messages import Failure, Hello, Message, Result, WireTensor
from mesh.wire.websocket import LinkServer, serve
from tests import secure

Lie = Callable[[torch.Tensor], torch.Tensor]
"""From the honest (1, rows, hidden) to what is said instead."""


def nan(honest: torch.Tensor) -> torch.Tensor:
    """One value is no number."""
    honest[0, -1, 0] = float("nan")
    return honest


def infinity(honest: torch.Tensor) -> torch.Tensor:
    """One value is infinite."""
    honest[0, -1, -1] = float("inf")
    return honest


def absurd_norm(honest: torch.Tensor) -> torch.Tensor:
    """The right direction, a million times too long."""
    return honest * 1e6


def plausible_garbage(honest: torch.Tensor) -> torch.Tensor:
    """Noise with the norm of the honest row: only computing it again tells."""
    noise = torch.randn(honest.shape, generator=torch.Generator().manual_seed(7))
    return noise * (honest.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True))


def row_too_many(honest: torch.Tensor) -> torch.Tensor:
    """A row that nobody asked for."""
    return torch.cat([honest, honest[:, -1:]], dim=1)


def narrower(honest: torch.Tensor) -> torch.Tensor:
    """Half the hidden width."""
    return honest[..., : honest.shape[-1] // 2]


class Liar:
    """Listens on `port` and lies about what the shard at `target` says, from result `after` on."""

    def __init__(self, target: int, lie: Lie, *, after: int = 0) -> None:
        self.target = target
        self.port = 0
        self.lies = 0
        self.results = 0
        self._lie = lie
        self._after = after
        self._server: LinkServer | None = None

    async def __aenter__(self) -> Self:
        tls = secure.TLS.server
        hello = Hello(secure.KEY.node_id, "liar", "tensors", "test")
        self._server = await serve("127.0.0.1", 0, accept=self._accept, hello=hello, ssl=tls)
        self.port = self._server.port
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._server is not None:
            await self._server.close()

    def twist(self, message: Message) -> Message:
        """What the asker gets to see."""
        if not isinstance(message, Result):
            return message
        self.results += 1
        if self.results <= self._after:
            return message
        self.lies += 1
        said = self._lie(to_torch(message.tensor).float().clone()).contiguous()
        dtype = WireDtype(message.tensor.dtype)
        tensor: WireTensor = to_wire(said, dtype if torch.isfinite(said).all() else WireDtype.FP32)
        return replace(message, tensor=tensor)

    def _accept(self, link: WebSocketLink) -> _Asker:
        return _Asker(self, link)


class _Asker:
    """The asker's end: waits with what it gets until the honest shard is reached."""

    def __init__(self, liar: Liar, link: Link) -> None:
        self._liar = liar
        self._link = link
        self._honest: Link | None = None
        self._waiting: list[Message] = []
        self._task = asyncio.create_task(self._reach(), name="liar reaches the honest shard")

    async def _reach(self) -> None:
        try:
            self._honest = await secure.dial(
                "127.0.0.1", self._liar.target, _Honest(self._liar, self._link)
            )
        except MeshError as error:
            self._link.close(str(error))
            return
        for message in self._waiting:
            self._honest.send(message)

    def message(self, message: Message) -> None:
        if self._honest is None:
            self._waiting.append(message)
        elif not self._honest.is_closed:
            self._honest.send(message)

    def closed(self, error: MeshError | None) -> None:
        if self._honest is not None:
            self._honest.close()


class _Honest:
    """The honest shard's end."""

    def __init__(self, liar: Liar, asker: Link) -> None:
        self._liar = liar
        self._asker = asker

    def message(self, message: Message) -> None:
        if self._asker.is_closed:
            return
        try:
            self._asker.send(self._liar.twist(message))
        except LinkLost:
            return
        except MeshError as error:
            session = getattr(message, "session", None)
            self._asker.send(Failure(error.to_dict(), session))

    def closed(self, error: MeshError | None) -> None:
        self._asker.close()
