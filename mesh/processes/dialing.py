"""How a process reaches another node: mutual TLS to that very node, and no other."""

from __future__ import annotations

from mesh.identity.tls import TlsContexts, require_node
from mesh.types import NodeId
from mesh.wire.connection import WebSocketLink
from mesh.wire.limits import Limits
from mesh.wire.link import LinkHandler
from mesh.wire.messages import Hello
from mesh.wire.websocket import connect

CONNECT_TIMEOUT_S = 5.0


async def connect_to(
    node: NodeId,
    host: str,
    port: int,
    *,
    hello: Hello,
    handler: LinkHandler,
    tls: TlsContexts,
    limits: Limits,
) -> WebSocketLink:
    """An open link to `node`, which is to listen there.

    Raises as `connect`, and UntrustedPeer for a node that is another, or is no longer, trusted.
    """
    link = await connect(
        host, port, hello=hello, handler=handler, limits=limits, ssl=tls.client(node),
        timeout_s=CONNECT_TIMEOUT_S,
    )  # fmt: skip
    try:
        require_node(link.peer_certificate, node)
    except BaseException:
        link.close("not the node that was dialled")
        raise
    return link
