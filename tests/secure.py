"""One identity for tests that run a shard process and ask it themselves: TLS with its own key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mesh.clock import SystemClock
from mesh.identity.keys import NodeKey
from mesh.identity.tls import TlsContexts, TlsMaterial
from mesh.shard.hosting import HostSpec, ShardHost
from mesh.shard.leases import lease_of
from mesh.shard.permits import permit
from mesh.wire.link import Link, LinkHandler
from mesh.wire.messages import Hello
from mesh.wire.websocket import connect

KEY = NodeKey(Ed25519PrivateKey.generate())
HELLO = Hello(KEY.node_id, "asker", "tensors", "test")


TLS = TlsContexts(TlsMaterial.of(KEY, []))
"""Contexts that trust this identity alone; made here, because making them blocks."""


def start_command(cache_dir: object) -> dict[str, Any]:
    """The ``start`` command of a shard process on loopback."""
    return {
        "listen_host": "127.0.0.1", "listen_port": 0, "device": "cpu", "threads": 1,
        "hello": {"node_id": KEY.node_id, "node_name": "node", "software": "test"},
        "tls": TlsMaterial.of(KEY, []).to_fields(),
        "cache_dir": str(cache_dir) if cache_dir is not None else None,
    }  # fmt: skip


@asynccontextmanager
async def hosting(
    cache_dir: object, *loads: dict[str, Any], **start: Any
) -> AsyncIterator[ShardHost]:
    """A shard process that has loaded all of these; `start` changes its ``start`` command."""
    host = ShardHost(HostSpec(start_command(cache_dir) | start, loads), lambda: None)
    host.start()
    try:
        await host.wait_settled()
        yield host
    finally:
        await host.stop()


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
