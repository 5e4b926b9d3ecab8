"""An API that others reach: TLS with a certificate that clients can know, and nothing but TLS."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from mesh.api.tls import ApiTls, api_tls
from mesh.client import Client
from mesh.config import Config, load_config
from mesh.errors import BadValue, KeyUnreadable, TlsRequired, UntrustedPeer
from mesh.identity.api_certificate import MAX_NAMES, fingerprint
from mesh.paths import StatePaths
from tests.api.conftest import SETTINGS, Served, serving

LAN = "192.0.2.7"
PLAIN = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n\r\n"


def made(root: Path, *addresses: str, **settings: Any) -> ApiTls:
    """What a node with this state directory serves TLS with."""
    StatePaths(root).create()
    tls = api_tls(Config(state_dir=root, api_host="0.0.0.0", **settings), addresses)  # noqa: S104
    assert tls is not None
    return tls


@pytest.fixture
def tls(tmp_path: Path) -> ApiTls:
    return made(tmp_path, LAN)


@pytest.fixture
def foreign(tmp_path: Path) -> ApiTls:
    """Another node's."""
    return made(tmp_path / "other", LAN)


@pytest.fixture
async def api(tls: ApiTls) -> AsyncIterator[Served]:
    """Bound to loopback, where it needs none, and serving TLS all the same."""
    async with serving(tls=tls) as served:
        yield served


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the docs tell other machines' users to do."""
    monkeypatch.setenv("SSL_CERT_FILE", str(StatePaths(tmp_path).api_certificate))


# What is served with


def names_in(tls: ApiTls) -> list[str]:
    certificate = x509.load_pem_x509_certificate(tls.certificate.encode())
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in found]


def test_loopback_needs_none(tmp_path: Path) -> None:
    assert api_tls(Config(state_dir=tmp_path), [LAN]) is None
    assert list(tmp_path.iterdir()) == []


def test_the_certificate_is_kept_and_its_key_is_private(tmp_path: Path) -> None:
    first, again = made(tmp_path, LAN), made(tmp_path, LAN)
    assert first.certificate == again.certificate
    assert first.sha256 == again.sha256 == fingerprint(again.certificate)
    assert len(first.sha256) == 32 * 3 - 1
    key = StatePaths(tmp_path).api_certificate_key
    assert key.stat().st_mode & 0o077 == 0
    key.chmod(0o644)
    with pytest.raises(KeyUnreadable, match="open to others"):
        made(tmp_path, LAN)


def test_a_name_once_vouched_for_stays_and_the_key_too(tmp_path: Path) -> None:
    at_home, away = made(tmp_path, LAN), made(tmp_path, "198.51.100.4")
    assert {LAN, "127.0.0.1", "::1", "localhost"} <= set(names_in(at_home))
    assert {LAN, "198.51.100.4"} <= set(names_in(away))
    assert made(tmp_path, LAN).certificate == away.certificate, "it comes home and needs no other"
    keys = [x509.load_pem_x509_certificate(t.certificate.encode()).public_key()
            for t in (at_home, away)]  # fmt: skip
    assert keys[0] == keys[1]
    for number in range(MAX_NAMES):
        last = made(tmp_path, f"203.0.113.{number}")
    assert len(names_in(last)) == MAX_NAMES


def test_a_bound_address_is_the_one_vouched_for(tmp_path: Path) -> None:
    tls = api_tls(Config(state_dir=tmp_path, api_host=LAN), ["198.51.100.4"])
    assert tls is not None
    assert LAN in names_in(tls)
    assert "198.51.100.4" not in names_in(tls)


def test_an_address_with_its_interface_needs_no_new_one_each_time(tmp_path: Path) -> None:
    config = Config(state_dir=tmp_path, api_host="fe80::1%eth0")
    StatePaths(tmp_path).create()
    first, again = api_tls(config, []), api_tls(config, [])
    assert first is not None
    assert again is not None
    assert first.certificate == again.certificate


@pytest.mark.parametrize("what", ["garbage", "of another key"])
def test_a_certificate_that_is_not_ours_is_made_again(tmp_path: Path, what: str) -> None:
    before, paths = made(tmp_path, LAN), StatePaths(tmp_path)
    if what == "garbage":
        paths.api_certificate.write_text("nothing")
    else:
        other = made(tmp_path / "other", LAN)
        paths.api_certificate.write_text(other.certificate)
    after = made(tmp_path, LAN)
    assert names_in(after) == names_in(before)
    assert after.certificate != before.certificate
    assert after.certificate == paths.api_certificate.read_text()


def test_a_damaged_key_is_named(tmp_path: Path) -> None:
    made(tmp_path, LAN)
    StatePaths(tmp_path).api_certificate_key.write_text("nothing")
    with pytest.raises(KeyUnreadable, match="API's certificate") as refused:
        made(tmp_path, LAN)
    assert "delete api-cert.key" in refused.value.fix


# One's own


@pytest.fixture
def own(tmp_path: Path) -> dict[str, Path]:
    """Somebody's certificate, made by an authority whose own is behind it in the file."""
    return given(tmp_path, 2999)


def given(tmp_path: Path, until: int) -> dict[str, Path]:
    private = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("authority", "own")}
    signed = {}
    for name, is_authority in (("authority", True), ("own", False)):
        subject, issuer = (
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
            for common in (name, "authority")
        )
        address = x509.IPAddress(ipaddress.ip_address(LAN))
        signed[name] = (
            x509.CertificateBuilder(issuer, subject, private[name].public_key(), 1)
            .not_valid_before(datetime(2020, 1, 1, tzinfo=UTC))
            .not_valid_after(datetime(until, 1, 1, tzinfo=UTC))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .sign(private["authority"], hashes.SHA256())
            .public_bytes(serialization.Encoding.PEM)
        )
    chain, key = tmp_path / "chain.pem", tmp_path / "own.key"
    chain.write_bytes(b"a comment\n" + signed["own"] + signed["authority"])
    key.write_bytes(_pem(private["own"], serialization.NoEncryption()))
    return {"api_tls_cert": chain, "api_tls_key": key}


def _pem(
    private: ec.EllipticCurvePrivateKey, how: serialization.KeySerializationEncryption
) -> bytes:
    return private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)


def test_one_s_own_certificate_is_served_also_on_loopback(
    tmp_path: Path, own: dict[str, Path]
) -> None:
    tls = api_tls(Config(state_dir=tmp_path / "state", **own), [])
    assert tls is not None
    assert tls.certificate.strip() in own["api_tls_cert"].read_text()
    assert LAN in names_in(tls), "the first of the chain"
    assert not (tmp_path / "state").exists()
    both = tmp_path / "both.pem"
    both.write_text(own["api_tls_cert"].read_text() + own["api_tls_key"].read_text())
    again = api_tls(Config(state_dir=tmp_path / "state", api_tls_cert=both), [])
    assert again is not None
    assert again.sha256 == tls.sha256


def test_unusable_files_are_named_by_their_setting(tmp_path: Path, own: dict[str, Path]) -> None:
    encrypted = tmp_path / "encrypted.key"
    private = ec.generate_private_key(ec.SECP256R1())
    encrypted.write_bytes(_pem(private, serialization.BestAvailableEncryption(b"secret")))
    other = tmp_path / "other.key"
    other.write_bytes(_pem(private, serialization.NoEncryption()))
    for change, param, words in [
        ({"api_tls_cert": tmp_path / "no"}, "api_tls_cert", "cannot be read"),
        ({"api_tls_key": tmp_path / "no"}, "api_tls_key", "cannot be read"),
        ({"api_tls_key": other}, "api_tls_cert", "MISMATCH"),
        ({"api_tls_key": encrypted}, "api_tls_cert", "encrypted"),
        ({"api_tls_cert": own["api_tls_key"]}, "api_tls_cert", "cannot be served with"),
    ]:
        with pytest.raises(BadValue, match=words) as refused:
            api_tls(Config(state_dir=tmp_path / "state", **{**own, **change}), [])
        assert refused.value.param == param


def test_a_key_alone_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="api_tls_cert is not"):
        load_config({"api_tls_key": tmp_path / "key.pem"})


@pytest.mark.parametrize("until", [2999, 2021])
async def test_the_own_client_knows_it_whoever_vouches_for_it_and_when(
    tmp_path: Path, until: int
) -> None:
    config = await asyncio.to_thread(Config, **await asyncio.to_thread(given, tmp_path, until))
    tls = await asyncio.to_thread(api_tls, config, [])
    assert tls is not None
    async with serving(tls=tls) as api, Client(api.url, certificate=tls.certificate) as client:
        assert await client.readiness() == []


# Who asks


@pytest.mark.usefixtures("trusted")
async def test_clients_trust_the_file_by_the_names_in_it(api: Served) -> None:
    for name in ("localhost", "127.0.0.1"):
        url = f"https://{name}:{api.server.port}"
        async with httpx.AsyncClient(base_url=url) as http:
            assert (await http.get("/v1/models")).is_success
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as client:
            answer = await client.chat.completions.create(
                model="echo", messages=[{"role": "user", "content": "a"}]
            )
            assert answer.choices[0].message.content
    async with (
        serving(tls=api.server.tls, host="127.0.0.9") as unnamed,
        httpx.AsyncClient(base_url=unnamed.url) as http,
    ):
        with pytest.raises(httpx.ConnectError, match=r"127\.0\.0\.9"):
            await http.get("/v1/models")


def test_a_strict_client_finds_nothing_wrong_with_it(tls: ApiTls) -> None:
    """As Python 3.13 and later check by default."""
    client = ssl.create_default_context(cafile=tls.file)
    client.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=LAN)
    theirs = tls.context.wrap_bio(to_server, to_client, server_side=True)
    for side in (ours, theirs, ours, theirs):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    assert ours.version() == "TLSv1.3"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9"])
async def test_the_own_client_knows_the_very_certificate(
    tls: ApiTls, foreign: ApiTls, host: str
) -> None:
    async with serving(tls=tls, host=host) as api:
        async with Client(api.url, certificate=tls.certificate) as client:
            assert await client.readiness() == []
        for certificate in (foreign.certificate, None):
            async with Client(api.url, certificate=certificate) as client:
                with pytest.raises(UntrustedPeer, match="not trusted here") as refused:
                    await client.status()
                assert "SSL_CERT_FILE" in refused.value.fix


@pytest.mark.usefixtures("trusted")
async def test_what_its_user_trusts_is_trusted_at_the_end_of_a_tunnel_too(api: Served) -> None:
    async with Client(api.url) as client:
        assert await client.readiness() == []


# Whoever speaks no TLS


async def plainly(api: Served, *parts: bytes) -> bytes:
    """What comes back of these bytes, to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.02)
    async with asyncio.timeout(5):
        answer = await reader.read()
    writer.close()
    return answer


async def test_plain_http_is_told_to_speak_tls(api: Served) -> None:
    large = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 900000\r\n\r\n" + b"x" * 900_000
    for request in ([PLAIN], [PLAIN[:1], PLAIN[1:]], [large], [b"PRI * HTTP/2.0\r\n"]):
        head, _, body = (await plainly(api, *request)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        error = json.loads(body)["error"]
        assert error["code"] == "tls_required"
        assert "in the clear" in error["fix"]
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.get(api.url.replace("https", "http") + "/v1/models")
        assert answer.status_code == 400
    async with Client(api.url.replace("https", "http")) as client:
        with pytest.raises(TlsRequired):
            await client.status()


@pytest.mark.parametrize("said", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"])
async def test_who_does_not_go_on_is_cut_off(tls: ApiTls, said: bytes) -> None:
    async with serving(replace(SETTINGS, head_timeout_s=0.2), tls) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
        writer.write(said)
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() in (b"", b"\x15\x03\x01\x00\x02\x02\x32")
        writer.close()


async def test_silent_connections_keep_nobody_out(tls: ApiTls) -> None:
    async with serving(replace(SETTINGS, head_timeout_s=60, max_opening=8), tls) as api:
        silent = [
            await asyncio.open_connection("127.0.0.1", api.server.port, local_addr=(host, 0))
            for host in ["127.0.0.2"] + ["127.0.0.3"] * 20
        ]
        async with Client(api.url, certificate=tls.certificate) as client, asyncio.timeout(10):
            await client.readiness()
        (modest, _), (greedy, _) = silent[:2]
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                assert await greedy.read() == b""
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await modest.read()
        for _, writer in silent:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def test_stopping_frees_the_port_and_what_was_being_opened(tls: ApiTls) -> None:
    async with serving(replace(SETTINGS, head_timeout_s=60), tls) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
        port = api.server.port
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()
    again = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
    again.close()


def test_authorities_are_read_where_one_is_needed_only(tmp_path: Path) -> None:
    (tmp_path / "authorities").write_text("no certificate")

    def said(url: str) -> str:
        """What a process says that makes a client and has a broken list of authorities."""
        script = f"from mesh.client import Client\nClient({url!r})"
        environment = {**os.environ, "SSL_CERT_FILE": str(tmp_path / "authorities")}
        command = [sys.executable, "-c", script]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        ).stderr

    assert said("http://example.org:1") == ""
    assert "SSLError" in said("https://example.org:1")
