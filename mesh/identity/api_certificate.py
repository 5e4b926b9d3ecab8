"""The certificate of a node's HTTP API: made once for the names people reach it by, then kept.

It has a key of its own (P-256, which every HTTP client knows; many know no Ed25519), so that the
node's identity speaks to members only. Like a node's certificate it is no certificate authority:
who trusts it trusts this key under these names and nothing else. Names are only ever added, or
whoever was told to trust it would have to be told again on every network the machine visits.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import secrets
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mesh.errors import KeyUnreadable
from mesh.identity.certificates import NOT_AFTER, NOT_BEFORE, SIGN_ONLY
from mesh.private_files import read_private, write_private

logger = logging.getLogger(__name__)

MAX_NAMES = 64
_MAX_PEM_BYTES = 64 << 10
_COMMON_NAME = "hearthnet API"


def keep_certificate(certificate: Path, key: Path, names: Iterable[str]) -> str:
    """The PEM of the certificate in that file, made anew when it lacks one of `names`.

    `names` are host names and IP addresses, `key` is the file of its private key (0600), made when
    there is none. Blocks. Raises KeyUnreadable.
    """
    try:
        wanted = [str(_general(name).value) for name in names]
        private = _key(key)
        known = _read(certificate, private)
        if known is not None and set(wanted) <= set(_names(known)):
            return _pem(known)
        made = _make(private, [*wanted, *(_names(known) if known is not None else [])])
        write_private(certificate, _pem(made).encode())
    except (OSError, ValueError) as error:
        raise KeyUnreadable(
            f"The API's certificate in {certificate.parent} cannot be used: {error}.",
            fix=f"Make the directory writable; delete {key.name} and {certificate.name} there to"
            " have them made again.",
        ) from error
    logger.info("API certificate %s made for %s", certificate, ", ".join(_names(made)))
    return _pem(made)


def fingerprint(pem: str) -> str:
    """The SHA-256 of a certificate as OpenSSL prints it: ``AB:CD:...``. Raises ValueError."""
    der = x509.load_pem_x509_certificate(pem.encode()).public_bytes(serialization.Encoding.DER)
    return hashlib.sha256(der).digest().hex(":").upper()


def expiry(pem: str) -> datetime:
    """Until when a certificate is valid. Raises ValueError."""
    return x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc


def _key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        pem = read_private(path, _MAX_PEM_BYTES)
    except FileNotFoundError:
        private = ec.generate_private_key(ec.SECP256R1())
        write_private(
            path,
            private.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )
        return private
    loaded = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path} holds another kind of key")  # noqa: TRY004 - of a file's content
    return loaded


def _read(path: Path, private: ec.EllipticCurvePrivateKey) -> x509.Certificate | None:
    """The certificate in the file if it is one of this key."""
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return found if found.public_key() == private.public_key() else None


def _make(private: ec.EllipticCurvePrivateKey, names: list[str]) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _COMMON_NAME)])
    unique = list(dict.fromkeys(names))[:MAX_NAMES]
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(private.public_key())
        .serial_number(secrets.randbits(127) | 1)
        .not_valid_before(NOT_BEFORE)
        .not_valid_after(NOT_AFTER)
        .add_extension(x509.SubjectAlternativeName([_general(n) for n in unique]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(SIGN_ONLY, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(private, hashes.SHA256())
    )


def _general(name: str) -> x509.GeneralName:
    try:
        # A certificate has no place for the interface that a link-local address is of.
        return x509.IPAddress(ipaddress.ip_address(name.partition("%")[0]))
    except ValueError:
        return x509.DNSName(name)


def _names(certificate: x509.Certificate) -> list[str]:
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in found]


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
