"""Whom a process that dials trusts: those whom its daemon named last."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from mesh.identity.certificates import certificate_node_id
from mesh.identity.tls import TlsContexts
from mesh.types import NodeId

logger = logging.getLogger(__name__)

RETRY_S = 1.0

KeepOnly = Callable[[frozenset[NodeId]], None]
"""Cuts the links to all other nodes and opens no more to them."""


class Following:
    """The newest list of members' certificates, DER; taken one after the other.

    Of two lists in two threads, the older could be the last.
    """

    def __init__(self) -> None:
        self._members: tuple[bytes, ...] | None = None
        self._changed = asyncio.Event()

    def tell(self, members: Sequence[bytes]) -> None:
        """The daemon named these."""
        self._members = tuple(members)
        self._changed.set()

    async def run(self, tls: TlsContexts, keep_only: KeepOnly) -> None:
        """Take every list that is told from now on. Raises what a certificate is refused with."""
        while True:
            await self._changed.wait()
            await self.take(tls, keep_only)

    async def take(self, tls: TlsContexts, keep_only: KeepOnly) -> None:
        """Trust those who were named last, if any were, and nobody else."""
        self._changed.clear()
        if self._members is None:
            return
        trusted = {certificate_node_id(der) for der in self._members} | {tls.own}
        # First, because until the update ends the contexts accept those who are put out.
        keep_only(frozenset(trusted))
        try:
            await asyncio.to_thread(tls.update, self._members)
        except OSError:
            # Whoever left is not trusted any more all the same, and frees what was lacking.
            logger.exception("members not followed; again in %g s", RETRY_S)
            asyncio.get_running_loop().call_later(RETRY_S, self._changed.set)
