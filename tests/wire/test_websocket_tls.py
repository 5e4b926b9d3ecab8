"""Links over mutual TLS."""

from __future__ import annotations

import asyncio
import ssl as tls
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from mesh.errors import (
    ConnectFailed,
)
from mesh.wire.limits import MIB
from mesh.wire.messages import Result, Step
from mesh.wire.websocket import connect, serve
from tests.waiting import until
from tests.wire.house import QUICK, House
from tests.wire.support import Recorder, hello, tensor


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed Ed25519 certificate with its key in one file."""
    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, None)
    )
    path = tmp_path_factory.mktemp("tls") / "node.pem"
    path.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + made.public_bytes(Encoding.PEM)
    )
    return path


def mutual_tls(side: int, path: Path) -> tls.SSLContext:
    """TLS 1.3 with the one certificate as both identity and trust anchor."""
    context = tls.SSLContext(side)
    context.minimum_version = tls.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = tls.CERT_REQUIRED
    context.load_cert_chain(path)
    context.load_verify_locations(path)
    return context


async def test_links_work_over_mutual_tls_and_show_the_certificates(certificate: Path) -> None:
    house = House()
    server = await serve(
        "127.0.0.1", 0, accept=house.accept, hello=hello("server"),
        ssl=mutual_tls(tls.PROTOCOL_TLS_SERVER, certificate),
    )  # fmt: skip
    asker = Recorder()
    link = await connect(
        "127.0.0.1", server.port, hello=hello("client"), handler=asker,
        ssl=mutual_tls(tls.PROTOCOL_TLS_CLIENT, certificate),
    )  # fmt: skip
    assert link.peer_certificate == server.links[0].peer_certificate
    assert link.peer_certificate is not None
    link.send(Step(1, 0, 0, tensor("int8", (3 * MIB,))))
    assert isinstance(await asker.next(), Result)
    link.close()
    await server.close()


async def test_strangers_without_a_certificate_stay_out(certificate: Path) -> None:
    limits = replace(QUICK, half_open_per_host=2)
    house = House()
    server = await serve(
        "127.0.0.1", 0, accept=house.accept, hello=hello("server"), limits=limits,
        ssl=mutual_tls(tls.PROTOCOL_TLS_SERVER, certificate),
    )  # fmt: skip
    anonymous = tls.SSLContext(tls.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname = False
    anonymous.load_verify_locations(certificate)
    with pytest.raises(ConnectFailed):
        await connect("127.0.0.1", server.port, hello=hello(), handler=Recorder(), ssl=anonymous)
    strangers = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(4)]
    async with asyncio.timeout(10):  # cut at once above the cap, at the handshake's timeout below
        await asyncio.gather(*(reader.read() for reader, _ in strangers), return_exceptions=True)
    await until(lambda: server.half_open == 0)
    assert house.handlers == []
    for _, writer in strangers:
        writer.close()
    await server.close()
