"""The API's TLS certificate: the node's own for it, or one that the settings name.

An API that others reach carries their keys, so beyond loopback there is no other way to serve it.
Knows files and certificates; listening is `mesh.api.listener`'s.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from mesh.config import Config
from mesh.errors import BadValue
from mesh.identity.api_certificate import expiry, fingerprint, keep_certificate
from mesh.paths import StatePaths
from mesh.runtime import first_certificate


@dataclass(frozen=True, slots=True)
class ApiTls:
    """A server's context, and by what clients know it.

    `certificate` is the PEM of the server's own certificate, `file` where it is, `sha256` its
    fingerprint as OpenSSL prints it, `expires` when it is no longer valid.
    """

    context: ssl.SSLContext
    certificate: str
    file: Path
    sha256: str
    expires: datetime

    def shown(self) -> dict[str, str]:
        """What people need in order to trust it, JSON-able."""
        expires = self.expires.isoformat()
        return {"sha256": self.sha256, "certificate": str(self.file), "expires": expires}


def api_tls(config: Config, addresses: Iterable[str]) -> ApiTls | None:
    """What an API with these settings serves TLS with; None on loopback, unless they ask for it.

    `addresses` are those of this machine that others know it by. Blocks. Raises BadValue naming the
    setting, KeyUnreadable.
    """
    if config.api_tls_cert is not None:
        return given_tls(config.api_tls_cert, config.api_tls_key or config.api_tls_cert)
    if config.api_is_loopback:
        return None
    paths = StatePaths(config.state_dir)
    bound = [config.api_host] if not config.api_is_wildcard else list(addresses)
    names = [*_host_names(), "127.0.0.1", "::1", *bound]
    pem = keep_certificate(paths.api_certificate, paths.api_certificate_key, names)
    return _loaded(pem, paths.api_certificate, paths.api_certificate_key)


def given_tls(certificate: Path, key: Path) -> ApiTls:
    """What is served with this certificate and this key. Blocks. Raises BadValue."""
    pem = _text(certificate, "api_tls_cert")
    _text(key, "api_tls_key")
    try:
        return _loaded(pem, certificate, key)
    except (OSError, ValueError) as error:  # of TLS as well
        raise BadValue(
            f"{certificate} and {key} cannot be served with: {error}.",
            fix="Name a certificate in PEM, its chain behind it, and the unencrypted key that"
            " belongs to it.",
            param="api_tls_cert",
        ) from error


def _text(file: Path, param: str) -> str:
    try:
        return file.read_text("ascii")
    except (OSError, ValueError) as error:
        raise BadValue(
            f"{param} names {file}, which cannot be read: {error}.",
            fix="Name a PEM file that this user may read.",
            param=param,
        ) from error


def _loaded(pem: str, certificate: Path, key: Path) -> ApiTls:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(certificate, key, password=_no_password)
    own = ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(first_certificate(pem)))
    return ApiTls(context, own, certificate, fingerprint(own), expiry(own))


def _no_password() -> NoReturn:
    raise ValueError("the key is encrypted")


def _host_names() -> list[str]:
    """As this machine calls itself, and as mDNS does."""
    own = socket.gethostname()
    known = [own, own.partition(".")[0], own.partition(".")[0] + ".local", "localhost"]
    return [name for name in known if name.isascii() and name.strip(".")]
