"""A node's key: made at first start, kept private, turned into the id that everybody sees.

Knows files and Ed25519. Knows nothing of certificates, links, hearths or trust.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from pathlib import Path
from typing import Annotated

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from mesh.errors import BadKey, KeyUnreadable
from mesh.private_files import read_private, write_once
from mesh.types import NodeId

_PREFIX = "hn1"
_NODE_ID = re.compile(r"hn1[a-z2-7]{52}")
NodeIdText = Annotated[NodeId, Meta(pattern=rf"\A{_NODE_ID.pattern}\Z")]
"""A node id from outside."""
_MAX_KEY_BYTES = 4096  # a PKCS8 Ed25519 key in PEM has 119
_RESTORE = "Restore it from a backup, or move it away: the next start makes a new identity."


class NodeKey:
    """The private key of this node. Never printed, never sent."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public_bytes: bytes = private.public_key().public_bytes_raw()
        self.node_id: NodeId = node_id(self.public_bytes)

    def __repr__(self) -> str:
        return f"NodeKey({short_id(self.node_id)})"

    def sign(self, data: bytes) -> bytes:
        """The 64-byte Ed25519 signature of `data`; the caller prefixes it with its domain."""
        return self._private.sign(data)

    def to_pem(self) -> bytes:
        """PKCS8, unencrypted: for the key file and for TLS only."""
        return self._private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )


def parse_pem(pem: bytes) -> NodeKey:
    """The key in `NodeKey.to_pem`'s form. Raises BadKey."""
    try:
        private = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise BadKey("This is not a private key.", fix=_RESTORE) from error
    if not isinstance(private, Ed25519PrivateKey):
        raise BadKey("This is not an Ed25519 key.", fix=_RESTORE)
    return NodeKey(private)


def node_id(public_bytes: bytes) -> NodeId:
    """``hn1`` and the base32 (lowercase, unpadded) of the SHA-256 of a raw Ed25519 public key."""
    digest = hashlib.sha256(public_bytes).digest()
    return NodeId(_PREFIX + base64.b32encode(digest).decode().rstrip("=").lower())


def is_node_id(text: str) -> bool:
    """Whether `text` has the form of a node id; says nothing about who owns it."""
    return _NODE_ID.fullmatch(text) is not None


def short_id(full: NodeId) -> str:
    """The six characters shown on screen. Never decides anything."""
    return without_prefix(full)[:6]


def without_prefix(full: NodeId) -> str:
    """What tells an id from others."""
    return full.removeprefix(_PREFIX)


def load_or_create(path: Path) -> NodeKey:
    """Read the key file, or make it (0600, its directory 0700) when there is none.

    Raises KeyUnreadable when the file is not ours, is open to others or cannot be read or written,
    and BadKey when it holds no Ed25519 key; an existing file is never replaced.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.path.lexists(path):
            write_once(path, NodeKey(Ed25519PrivateKey.generate()).to_pem())
    except OSError as error:
        raise _unusable(path, error) from error
    return read_key(path)


def read_key(path: Path) -> NodeKey:
    """Read the key file. Raises as `load_or_create`."""
    try:
        pem = read_private(path, _MAX_KEY_BYTES)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        return parse_pem(pem)
    except BadKey as error:
        raise BadKey(f"{path} does not hold a node key. {error.message}", fix=_RESTORE) from error


def _unusable(path: Path, error: OSError) -> KeyUnreadable:
    return KeyUnreadable(
        f"The node key {path} cannot be used: {error.strerror or error}.",
        fix="Make the file and its directory readable and writable for this user only, and see"
        " that the disk has room.",
    )
