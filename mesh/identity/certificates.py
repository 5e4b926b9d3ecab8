"""A node's X.509 certificate: its key in the form that TLS wants. Decides nothing about trust.

A certificate is a pure function of the node key (Ed25519 signatures are deterministic), so it is
the same at every start and is stored nowhere. Its dates mean "always": OpenSSL checks them of trust
anchors too, and a machine whose clock stands at 1970 or a day ahead must still be able to link.
When a node stops being trusted, the roster says so.
"""

from __future__ import annotations

import hashlib
import warnings
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mesh.errors import UntrustedPeer
from mesh.identity.keys import NodeKey, node_id
from mesh.types import NodeId

NOT_BEFORE = datetime(1970, 1, 1, tzinfo=UTC)
NOT_AFTER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""RFC 5280, 4.1.2.5: the date of certificates without a well-defined end."""

MAX_CERTIFICATE_BYTES = 1024  # ours has about 410

_ANY_KEY = bytes.fromhex(f"302a300506032b6570032100{'58' + '66' * 31}")
"""RFC 8410, 4: an Ed25519 key in DER; RFC 8032, 5.1: the base point, which is nobody's."""

warnings.filterwarnings(
    "error", message="Parsed a serial number", category=CryptographyDeprecationWarning
)
"""Such a certificate is one error for all nodes, whichever version of cryptography they have: what
one takes and another does not would be two logs."""

_FIX = "Pair the machines again with `hearthnet invite` and `hearthnet join`."


def make_certificate(key: NodeKey) -> bytes:
    """The self-signed certificate of `key` in DER: the same bytes whenever it is called.

    It is no certificate authority: as a trust anchor it vouches for its own key and no other.
    """
    private = serialization.load_pem_private_key(key.to_pem(), password=None)
    assert isinstance(private, Ed25519PrivateKey)  # noqa: S101 - NodeKey holds no other kind
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, key.node_id)])
    serial = int.from_bytes(hashlib.sha256(key.public_bytes).digest()[:16], "big") >> 1 | 1
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(serial)
        .not_valid_before(NOT_BEFORE)
        .not_valid_after(NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(SIGN_ONLY, critical=True)
        .add_extension(_BOTH_SIDES, critical=False)
        .sign(private, None)
    )
    return certificate.public_bytes(serialization.Encoding.DER)


def rehearse() -> None:
    """Have OpenSSL look up what reading a key takes, which a forked process then need not."""
    serialization.load_der_public_key(_ANY_KEY)


def certificate_key(der: bytes) -> bytes:
    """The raw Ed25519 public key (32 bytes) of any certificate. Raises UntrustedPeer.

    Says nothing about who made the certificate; TLS or `check_certificate` does.
    """
    return _public_key(_parse(der)).public_bytes_raw()


def certificate_node_id(der: bytes) -> NodeId:
    """The id of the node that a certificate's key makes. Raises UntrustedPeer."""
    return node_id(certificate_key(der))


_BAD_EXTENSIONS = (
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)


@lru_cache(maxsize=256)
def check_certificate(der: bytes) -> bytes:
    """The raw public key of a certificate fit to be a trust anchor.

    Fit is one that its own key signed, with a positive serial number (RFC 5280, 4.1.2.2), that is
    no certificate authority and does not expire. Raises
    UntrustedPeer otherwise.
    """
    if len(der) > MAX_CERTIFICATE_BYTES:
        raise UntrustedPeer(f"A certificate has {len(der)} bytes.", fix=_FIX)
    certificate = _parse(der)
    if certificate.serial_number <= 0:
        raise UntrustedPeer("The peer's certificate cannot be read.", fix=_FIX)
    public = _public_key(certificate)
    try:
        public.verify(certificate.signature, certificate.tbs_certificate_bytes)
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        is_authority = constraints.ca
    except (InvalidSignature, ValueError, UnsupportedAlgorithm, *_BAD_EXTENSIONS) as error:
        raise UntrustedPeer(f"A certificate is not a node's own: {error}.", fix=_FIX) from error
    expires = (certificate.not_valid_before_utc, certificate.not_valid_after_utc)
    if is_authority or expires != (NOT_BEFORE, NOT_AFTER):
        raise UntrustedPeer("A certificate was not made by hearthnet.", fix=_FIX)
    return public.public_bytes_raw()


def _fit(der: bytes) -> None:
    try:
        check_certificate(der)
    except UntrustedPeer as error:
        raise ValueError(error.message.rstrip(".")) from error


Certificate = Annotated[bytes, _fit]
"""A certificate from outside that `check_certificate` takes."""


def _parse(der: bytes) -> x509.Certificate:
    try:
        return x509.load_der_x509_certificate(der)
    except (ValueError, x509.InvalidVersion, CryptographyDeprecationWarning) as error:
        raise UntrustedPeer("The peer's certificate cannot be read.", fix=_FIX) from error


def _public_key(certificate: x509.Certificate) -> Ed25519PublicKey:
    try:
        public = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UntrustedPeer("The certificate's key cannot be read.", fix=_FIX) from error
    if not isinstance(public, Ed25519PublicKey):
        raise UntrustedPeer("The certificate's key is not an Ed25519 key.", fix=_FIX)
    return public


SIGN_ONLY = x509.KeyUsage(
    digital_signature=True, content_commitment=False, key_encipherment=False,
    data_encipherment=False, key_agreement=False, key_cert_sign=False, crl_sign=False,
    encipher_only=False, decipher_only=False,
)  # fmt: skip
_BOTH_SIDES = x509.ExtendedKeyUsage(
    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
)
