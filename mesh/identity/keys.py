"""A node's key: made at first start, kept private, turned into the id that everybody sees.

Knows files and Ed25519. Knows nothing of certificates, links, hearths or trust.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import secrets
import stat
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mesh.errors import BadKey, KeyUnreadable
from mesh.types import NodeId

_PREFIX = "hn1"
_NODE_ID = re.compile(r"hn1[a-z2-7]{52}")
_MAX_KEY_BYTES = 4096  # a PKCS8 Ed25519 key in PEM has 119


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


def node_id(public_bytes: bytes) -> NodeId:
    """``hn1`` and the base32 (lowercase, unpadded) of the SHA-256 of a raw Ed25519 public key."""
    digest = hashlib.sha256(public_bytes).digest()
    return NodeId(_PREFIX + base64.b32encode(digest).decode().rstrip("=").lower())


def is_node_id(text: str) -> bool:
    """Whether `text` has the form of a node id; says nothing about who owns it."""
    return _NODE_ID.fullmatch(text) is not None


def short_id(full: NodeId) -> str:
    """The six characters shown on screen. Never decides anything."""
    return full.removeprefix(_PREFIX)[:6]


def load_or_create(path: Path) -> NodeKey:
    """Read the key file, or make it (0600, its directory 0700) when there is none.

    Raises KeyUnreadable when the file is not ours, is open to others or cannot be read or written,
    and BadKey when it holds no Ed25519 key; an existing file is never replaced.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.path.lexists(path):
            _create(path)
        pem = _read_private(path)
    except OSError as error:
        raise KeyUnreadable(
            f"The node key {path} cannot be used: {error.strerror or error}.",
            fix="Make the file and its directory readable and writable for this user only.",
        ) from error
    return _parse(path, pem)


def _create(path: Path) -> None:
    """Write a new key beside its place and link it there whole.

    A crash leaves no half file, and of two daemons starting at once both end up with one key.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(NodeKey(Ed25519PrivateKey.generate()).to_pem())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink(missing_ok=True)


def _read_private(path: Path) -> bytes:
    """The file's bytes, after checking on the open descriptor who else could have read them."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise KeyUnreadable(f"{path} is not a regular file.", fix="Remove what lies there.")
        if os.name == "posix":
            if status.st_uid != os.geteuid():
                raise KeyUnreadable(
                    f"The node key {path} belongs to user id {status.st_uid}, not to this user.",
                    fix="Use another state directory, or change the file's owner.",
                )
            if status.st_mode & 0o077:
                raise KeyUnreadable(
                    f"The node key {path} is open to others (mode {status.st_mode & 0o777:04o}).",
                    fix=f"If nobody has copied it, run: chmod 600 {path}",
                )
        return file.read(_MAX_KEY_BYTES + 1)


def _parse(path: Path, pem: bytes) -> NodeKey:
    try:
        private = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise _bad_key(path) from error
    if not isinstance(private, Ed25519PrivateKey):
        raise _bad_key(path)
    return NodeKey(private)


def _bad_key(path: Path) -> BadKey:
    return BadKey(
        f"{path} does not hold an Ed25519 private key.",
        fix="Restore it from a backup, or move it away: the next start makes a new identity.",
    )
