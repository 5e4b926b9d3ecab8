"""How the asker reaches a shard: mutual TLS to the very node that advertised it, and no other.

Knows nothing of sessions or routes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial

from mesh.accounts.ledger import ResourceLedger
from mesh.discovery.interfaces import LOOPBACK
from mesh.errors import MeshError
from mesh.identity.tls import TlsContexts
from mesh.pipeline.links import Dial, HopLink
from mesh.processes.dialing import connect_to
from mesh.shard.permits import clock_of, permit
from mesh.shard.settings import lease_of
from mesh.wire.limits import DEFAULT_LIMITS
from mesh.wire.link import Link
from mesh.wire.messages import Hello


def secured(hello: Hello, tls: TlsContexts, accounts: ResourceLedger | None = None) -> Dial:
    """A dial over TLS; it raises UntrustedPeer for a host that is not, or is no longer, trusted.

    What asks for a session over it carries a token for that host. What a link holds in
    memory is on its host's account. This node's own shards are dialled at loopback, so that they
    are reached, and stay so, when the address they are told by goes.
    """
    limits = replace(DEFAULT_LIMITS, accounts=accounts)

    async def dial(host: str, port: int, hop_link: HopLink) -> Link:
        if hop_link.host == hello.node_id and host != LOOPBACK:
            with suppress(MeshError):  # they listen at that one address only: see `Reach.of`
                return await dial_at(LOOPBACK, port, hop_link)
        return await dial_at(host, port, hop_link)

    async def dial_at(host: str, port: int, hop_link: HopLink) -> Link:
        link = await connect_to(
            hop_link.host, host, port, hello=hello, handler=hop_link, tls=tls, limits=limits
        )
        hop_link.permit = partial(permit, tls.key, clock_of(link.peer), hop_link.host)
        hop_link.lease_s = lease_of(link.peer)
        return link

    return dial
