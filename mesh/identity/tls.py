"""Mutual TLS 1.3 between members: contexts, and whose key is at the other end.

The members' certificates are the trust anchors; nothing else is trusted, no name is checked, no
session is resumed (a ticket would outlive a revocation). A dialler trusts one certificate, that of
the node it wants to reach.

In TLS 1.3 a rejected client's handshake still succeeds on its side: a link counts as up after the
server's hello only, as `mesh.wire` has it. A change of members decides about new handshakes; links
that are up already are for their owner to close. Knows nothing of links or of who changes the
roster.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mesh.errors import UntrustedPeer
from mesh.identity.certificates import (
    certificate_node_id,
    check_certificate,
    make_certificate,
)
from mesh.identity.keys import NodeKey, node_id, parse_pem, short_id
from mesh.types import NodeId

_FIX = "Run `hearthnet members` on both machines; pair them again if one is missing there."


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """Key and certificates with which a process speaks TLS for its node. `members` are in DER.

    Holds the private key: hand it to a child over its inherited channel only. Raises BadKey for a
    key that is none, UntrustedPeer for one that is not the certificate's.
    """

    certificate: bytes
    key_pem: bytes = field(repr=False)
    members: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if check_certificate(self.certificate) != parse_pem(self.key_pem).public_bytes:
            raise UntrustedPeer("Certificate and key of this node do not fit.", fix=_FIX)

    @classmethod
    def of(cls, key: NodeKey, members: Iterable[bytes]) -> TlsMaterial:
        """The material of `key`'s node; it always trusts itself, for links within the machine."""
        own = make_certificate(key)
        return cls(own, key.to_pem(), tuple(dict.fromkeys([own, *members])))


class TlsContexts:
    """The contexts of one process, following the members.

    Making one and `update` build OpenSSL objects through a file: a few milliseconds of blocking
    work, to be done in a thread. `server` and `client` only hand out what is there.
    """

    def __init__(self, material: TlsMaterial) -> None:
        self._material = material
        self._own = certificate_node_id(material.certificate)
        self._current = self._front = _context(material, (), server=True)
        self._clients: dict[NodeId, ssl.SSLContext] = {}
        self._anchors: dict[NodeId, bytes] = {}
        self._any_client = self._front
        # A listener keeps the context that it was given; this exchanges it at each handshake.
        self._front.sni_callback = self._exchange
        self.update(material.members)

    @property
    def own(self) -> NodeId:
        """Whose contexts these are."""
        return self._own

    @property
    def server(self) -> ssl.SSLContext:
        """For listeners: one object for ever, whose handshakes follow `update`."""
        return self._front

    def client(self, expected: NodeId | None = None) -> ssl.SSLContext:
        """For dialling `expected`, whose key alone is accepted; None accepts any member.

        Raises UntrustedPeer when the expected node is no member.
        """
        if expected is None:
            return self._any_client
        context = self._clients.get(expected)
        if context is None:
            raise UntrustedPeer(f"{short_id(expected)} is not a member of this hearth.", fix=_FIX)
        return context

    @property
    def key(self) -> NodeKey:
        """The key of `own`."""
        return parse_pem(self._material.key_pem)

    def public_key(self, node: NodeId) -> bytes | None:
        """The raw key of one of those that the contexts let in now; None for anybody else."""
        certificate = self._anchors.get(node)
        return None if certificate is None else check_certificate(certificate)

    def trusts(self, node: str) -> bool:
        """Whether the node is one of those that the contexts let in now."""
        return NodeId(node) in self._clients

    def update(self, members: Iterable[bytes]) -> None:
        """Trust these certificates (DER) and our own from now on, and no others.

        Raises UntrustedPeer for a certificate that may not be an anchor; nothing changes then.
        Raises OSError when a context cannot be made (no descriptors, no memory): whoever is not
        among `members` is not trusted all the same, and those who are new are not trusted yet.
        """
        anchors = {node_id(check_certificate(der)): der for der in members}
        anchors[self._own] = self._material.certificate
        self._anchors = {member: der for member, der in self._anchors.items() if member in anchors}
        self._clients = {member: tls for member, tls in self._clients.items() if member in anchors}
        everybody = tuple(anchors.values())
        current = _context(self._material, everybody, server=True)
        any_client = _context(self._material, everybody, server=False)
        clients = {
            member: _context(self._material, (der,), server=False)
            for member, der in anchors.items()
        }
        self._current, self._any_client, self._clients = current, any_client, clients
        self._anchors = anchors

    def _exchange(self, connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = self._current


def require_node(certificate: bytes | None, expected: str) -> NodeId:
    """The peer's id by its certificate (None: a link without TLS). Raises UntrustedPeer.

    `expected` is whom we dialled, or whom the peer's hello claims to be.
    """
    actual = _node_id(certificate)
    if actual != expected:
        raise UntrustedPeer(
            f"The peer has the key of {short_id(actual)}, not that of the node it should be.",
            fix="Somebody may be posing as that node; see `hearthnet members`.",
        )
    return actual


def _node_id(certificate: bytes | None) -> NodeId:
    if certificate is None:
        raise UntrustedPeer("The peer proved no identity.", fix=_FIX)
    return certificate_node_id(certificate)


def _context(material: TlsMaterial, anchors: tuple[bytes, ...], *, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0
    with _file(ssl.DER_cert_to_PEM_cert(material.certificate).encode() + material.key_pem) as path:
        context.load_cert_chain(path)
    for der in anchors:
        context.load_verify_locations(cadata=der)
    return context


@contextlib.contextmanager
def _file(content: bytes) -> Iterator[str]:
    """A path with `content`, gone afterwards: the ssl module reads keys from files only."""
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hearthnet", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, content)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
        return
    descriptor, path = tempfile.mkstemp(prefix="hearthnet-")  # 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        yield path
    finally:
        Path(path).unlink()
