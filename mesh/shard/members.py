"""Who may come in to the shards of a process: as the daemon says, also while shards are served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from mesh.errors import UntrustedPeer
from mesh.identity.tls import TlsContexts, TlsMaterial, require_node
from mesh.wire.connection import WebSocketLink

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


class Members:
    """The certificates that TLS lets in. `follow` is to run for as long as there are links."""

    def __init__(self) -> None:
        self.tls: TlsContexts | None = None
        self._latest: list[bytes] | None = None
        self._changed = asyncio.Event()

    async def start(self, material: TlsMaterial) -> TlsContexts:
        """The contexts for listening, with those whom the daemon named at the start."""
        self.tls = await asyncio.to_thread(TlsContexts, material)
        self._changed.set()  # newer ones may have come before
        return self.tls

    def name(self, certificates: Sequence[bytes]) -> None:
        """These and no others, as DER."""
        self._latest = [bytes(der) for der in certificates]
        self._changed.set()

    def require(self, link: WebSocketLink) -> None:
        """Raises UntrustedPeer for a link of somebody else."""
        require_node(link.peer_certificate, link.peer.node_id)
        if self.tls is None or not self.tls.trusts(link.peer.node_id):
            raise UntrustedPeer(  # put out between its handshake and its hello
                "This node does not trust you with its shards.", fix="See `hearthnet members`."
            )

    async def follow(self, links: Callable[[], Iterable[WebSocketLink]]) -> None:
        """Let in those who were named last, and cut the links to everybody else."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self.tls is None or self._latest is None:
                continue  # the listener starts with newer ones
            try:
                await asyncio.to_thread(self.tls.update, self._latest)
            except OSError:
                # Whoever left is not trusted any more all the same, and frees what was lacking.
                logger.exception("members not followed; again in %g s", _RETRY_S)
                asyncio.get_running_loop().call_later(_RETRY_S, self._changed.set)
            for link in links():
                if not self.tls.trusts(link.peer.node_id):
                    link.close("you are no longer trusted here")
