"""One identity for tests that run a shard process and ask it themselves: TLS with its own key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from mesh.clock import SystemClock
from mesh.identity.keys import NodeKey
from mesh.identity.tls import TlsContexts, TlsMaterial
from mesh.shard.commands import ShardRequest, StartShards
from mesh.shard.permits import permit
from mesh.shard.settings import ShardSettings, lease_of
from mesh.shard.supervisor import LOAD_TIMEOUT_S, ShardSupervisor
from mesh.types import LayerRange
from mesh.wire.link import Link, LinkHandler
from mesh.wire.messages import Hello
from mesh.wire.websocket import connect

KEY = NodeKey(Ed25519PrivateKey.generate())
HELLO = Hello(KEY.node_id, "asker", "tensors", "test")


TLS = TlsContexts(TlsMaterial.of(KEY, []))
"""Contexts that trust this identity alone; made here, because making them blocks."""


def start_command(**changes: Any) -> StartShards:
    """The first command of a shard process on loopback."""
    hello = Hello(KEY.node_id, "node", "tensors", "test")
    tls = TlsMaterial.of(KEY, [])
    start = StartShards(hello=hello, tls=tls, listen_host="127.0.0.1", device="cpu", threads=1)
    return structs.replace(start, **changes)


def request(cache_dir: Path | None = None, **fields: Any) -> ShardRequest:
    """What a shard process is to load: fields of `ShardRequest` and of its `ShardSettings`."""
    limits = {key: fields.pop(key) for key in ShardSettings.__dataclass_fields__ if key in fields}
    fields["directory"], fields["layers"] = Path(fields["directory"]), str(fields["layers"])
    layers = LayerRange.parse(fields.pop("layers"))
    settings = ShardSettings(**limits)
    return ShardRequest(layers=layers, settings=settings, cache_dir=cache_dir, **fields)


@asynccontextmanager
async def hosting(
    cache_dir: Path | None, *loads: dict[str, Any], **start: Any
) -> AsyncIterator[ShardSupervisor]:
    """A shard process that has loaded all of these; `start` changes its first command."""
    requests = [request(cache_dir, **fields) for fields in loads]
    host = ShardSupervisor(start_command(**start), requests, lambda: None)
    host.start()
    try:
        await settled(host)
        yield host
    finally:
        await host.stop()


async def settled(host: ShardSupervisor) -> None:
    """Once every wanted shard has loaded or failed. Raises the first failure."""
    async with asyncio.timeout(LOAD_TIMEOUT_S):
        while not all(map(host.knows, host.wanted)):  # noqa: ASYNC110 - nobody else looks
            await asyncio.sleep(0.01)
    for error in host.failed.values():
        raise error


async def dial(host: str, port: int, handler: LinkHandler) -> Link:
    """A link to whoever has this identity, whatever it is called.

    A handler that asks for sessions (a `Line`, a test's `Asker`) gets to make tokens for them.
    """
    link = await connect(host, port, hello=HELLO, handler=handler, ssl=TLS.client())
    if hasattr(handler, "permit"):
        handler.permit = partial(permit, KEY, SystemClock(), KEY.node_id)
    if hasattr(handler, "lease_s"):
        handler.lease_s = lease_of(link.peer)
    return link
