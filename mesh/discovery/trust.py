"""What discovery asks of whoever knows the members."""

from __future__ import annotations

from typing import Protocol

from mesh.accounts.ledger import ResourceLedger
from mesh.identity.tls import TlsContexts
from mesh.types import NodeId


class PeerTrust(Protocol):
    """Who may link, and whose shards count. The hearth provides it."""

    @property
    def tls(self) -> TlsContexts:
        """The contexts of all links between daemons; they follow the members."""

    @property
    def accounts(self) -> ResourceLedger:
        """What each peer holds and uses in this process."""

    def may_serve(self, node: NodeId) -> bool:
        """Whether what the node advertises may be listed."""

    def sign(self, data: bytes) -> bytes:
        """This node's signature, 64 bytes."""

    def verify(self, node: NodeId, data: bytes, signature: bytes) -> bool:
        """Whether the signature is that of a present member; False for everybody else."""
