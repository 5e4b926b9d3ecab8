"""The member feed: which peers a process trusts, as its daemon says it, while links are up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mesh.errors import BadRequest, InternalError, UntrustedPeer
from mesh.identity.certificates import certificate_node_id
from mesh.identity.tls import TlsContexts, TlsMaterial, require_node
from mesh.types import NodeId

if TYPE_CHECKING:
    from mesh.wire.connection import WebSocketLink

logger = logging.getLogger(__name__)

KeepOnly = Callable[[frozenset[NodeId]], None]
"""Cuts the links to all other nodes and opens no more to them."""


class MemberFeed:
    """The TLS contexts of a process, and the newest list of members' certificates (DER) for them.

    Lists are taken one after the other: of two in two threads, the older could be the last.
    """

    def __init__(self, tls: TlsContexts | None = None) -> None:
        """`tls` are contexts that are made already; else `open` makes them."""
        self.retry_s = 1.0
        """A list that could not be taken is taken again after so long."""
        self._tls = tls
        self._members: tuple[bytes, ...] | None = None
        self._changed = asyncio.Event()

    @property
    def tls(self) -> TlsContexts:
        """The contexts. Raises InternalError before `open`."""
        if self._tls is None:
            raise InternalError("the process is not started.", fix="Report this as a bug.")
        return self._tls

    def identify(self, link: WebSocketLink) -> None:
        """Raise UntrustedPeer for a client whose hello names another than its certificate."""
        require_node(link.peer_certificate, link.peer.node_id)

    def require_trusted(self, link: WebSocketLink, goods: str, purpose: str) -> None:
        """Raise UntrustedPeer unless a link that came in is of whom it says, who is still trusted
        with `goods`: one may have been put out between its handshake and its hello. Raise
        BadRequest where it came for another purpose."""
        self.identify(link)
        if not self.tls.trusts(link.peer.node_id):
            raise UntrustedPeer(
                f"This node does not trust you with its {goods}.", fix="See `hearthnet members`."
            )
        if link.peer.purpose != purpose:
            raise BadRequest(
                f"Links for {purpose} are taken here, not for {link.peer.purpose!r}.",
                fix="Connect to the daemon's control port.",
            )

    async def open(self, material: TlsMaterial) -> None:
        """Make the contexts, with the members that are part of the material."""
        self._tls = await asyncio.to_thread(TlsContexts, material)

    def name(self, members: Sequence[bytes]) -> None:
        """The daemon named these, and no others."""
        self._members = tuple(members)
        self._changed.set()

    async def follow(self, keep_only: KeepOnly) -> None:
        """Take every list that is named from now on. Raises what a certificate is refused with."""
        while True:
            await self._changed.wait()
            await self.take(keep_only)

    async def take(self, keep_only: KeepOnly) -> None:
        """Trust those who were named last, if any were, and nobody else."""
        self._changed.clear()
        if self._members is None:
            return
        named = [certificate_node_id(der) for der in self._members]
        trusted = frozenset([*named, self.tls.own])
        # First, because until the update ends the contexts accept those who are put out.
        keep_only(trusted)
        try:
            await asyncio.to_thread(self.tls.update, self._members)
        except OSError:
            # Whoever left is not trusted any more all the same, and frees what was lacking.
            logger.exception("members not followed; again in %g s", self.retry_s)
            asyncio.get_running_loop().call_later(self.retry_s, self._changed.set)
        keep_only(trusted)  # who came in during the update, too
