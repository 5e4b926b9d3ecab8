"""Every way onto a link that is not a member's own key: tried over real sockets, refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
import textwrap
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import NameOID

from mesh.errors import ConnectFailed, MeshError, UntrustedPeer
from mesh.identity.certificates import make_certificate
from mesh.identity.keys import NodeKey
from mesh.identity.tls import require_node
from mesh.wire.messages import Hello
from mesh.wire.websocket import connect
from tests.identity.support import Party, Recorder, Served, counting, new_key, serving


@pytest.fixture
def home() -> Party:
    return Party("home")


@pytest.fixture
def friend() -> Party:
    return Party("friend")


async def dial(
    served: Served, hello: Hello, context: ssl.SSLContext | None, handler: Recorder | None = None
) -> str:
    """Open a link as an attacker or a friend would; the accepting side's id on success."""
    link = await connect(
        "127.0.0.1", served.port, hello=hello, handler=handler or Recorder(), ssl=context
    )
    peer = require_node(link.peer_certificate, link.peer.node_id)
    link.close()
    await asyncio.wait_for(served.handlers[-1].ended.wait(), 5)
    return peer


async def test_member_links_and_both_know_whom_they_talk_to(
    home: Party, friend: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(home, monkeypatch, await home.trusting(friend)) as served:
        client = await friend.trusting(home)
        assert await dial(served, friend.hello(), client.client(home.id)) == home.id
        assert await dial(served, friend.hello(), client.client()) == home.id
        assert served.accepted == [friend.id, friend.id]
        assert served.frames >= 2


async def test_node_links_to_itself_on_loopback_with_its_own_key(
    home: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = await home.trusting()
    async with serving(home, monkeypatch, tls) as served:
        assert await dial(served, home.hello(), tls.client(home.id)) == home.id


async def test_stranger_is_refused_before_anything_is_decoded(
    home: Party, friend: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = Party("stranger")
    async with serving(home, monkeypatch, await home.trusting(friend)) as served:
        with pytest.raises(ConnectFailed):
            await dial(served, stranger.hello(), (await stranger.trusting(home)).client(home.id))
        with pytest.raises(ConnectFailed):  # with somebody else's name it is no better
            await dial(served, friend.hello(), (await stranger.trusting(home)).client(home.id))
        assert (served.frames, served.accepted) == (0, [])


async def test_client_without_a_certificate_is_refused_before_anything_is_decoded(
    home: Party, friend: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with serving(home, monkeypatch, await home.trusting(friend)) as served:
        with pytest.raises(ConnectFailed):
            await dial(served, friend.hello(), context)
        assert (served.frames, served.accepted) == (0, [])


async def test_revoked_member_is_refused_on_the_listener_that_knew_it(
    home: Party, friend: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = await home.trusting(friend)
    async with serving(home, monkeypatch, tls) as served:
        client = (await friend.trusting(home)).client(home.id)
        await dial(served, friend.hello(), client)
        before = served.frames
        await asyncio.to_thread(tls.update, [Party("other").certificate])
        with pytest.raises(ConnectFailed):
            await dial(served, friend.hello(), client)
        assert served.frames == before
        with pytest.raises(UntrustedPeer):
            tls.client(friend.id)


async def test_new_member_gets_in_without_a_new_listener(
    home: Party, friend: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = await home.trusting()
    async with serving(home, monkeypatch, tls) as served:
        await asyncio.to_thread(tls.update, [friend.certificate])
        await dial(served, friend.hello(), (await friend.trusting(home)).client(home.id))
        assert served.accepted == [friend.id]


async def test_rejected_client_learns_of_it_at_the_hello(
    home: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In TLS 1.3 its own handshake succeeds; a link must not count as up by then."""
    stranger = Party("stranger")
    async with serving(home, monkeypatch, await home.trusting()) as served:
        context = (await stranger.trusting(home)).client(home.id)

        def handshake() -> bytes:
            raw = socket.create_connection(("127.0.0.1", served.port), 5)
            with raw, context.wrap_socket(raw) as secured:
                # The handshake "succeeded".
                assert require_node(secured.getpeercert(binary_form=True), home.id) == home.id
                try:
                    return secured.recv(1)
                except (ssl.SSLError, ConnectionError):
                    return b""

        assert await asyncio.to_thread(handshake) == b""
        handler = Recorder()
        with pytest.raises(ConnectFailed):
            await dial(served, stranger.hello(), context, handler)
        assert handler.messages == []
        assert served.frames == 0


async def test_replayed_hello_of_another_member_is_refused(
    home: Party, friend: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that was dialled has seen the dialler's hello; it shows it to somebody else."""
    thief = Party("thief")
    async with serving(home, monkeypatch, await home.trusting(friend, thief)) as served:
        with pytest.raises(MeshError) as caught:
            await dial(served, friend.hello(), (await thief.trusting(home)).client(home.id))
        assert caught.value.code == "untrusted_peer"
        assert served.accepted == []
        assert served.frames == 1  # the hello itself


async def test_plain_tcp_is_refused_before_anything_is_decoded(
    home: Party, friend: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(home, monkeypatch, await home.trusting(friend)) as served:
        with pytest.raises(ConnectFailed):
            await dial(served, friend.hello(), None)
        assert (served.frames, served.accepted) == (0, [])


async def test_listener_without_tls_lets_nobody_in(
    home: Party, friend: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(home, monkeypatch, None) as served:
        with pytest.raises(MeshError) as caught:
            await dial(served, friend.hello(), None)
        assert caught.value.code == "untrusted_peer"
        assert served.accepted == []


async def test_dialler_does_not_fall_back_to_plain_tcp(
    home: Party, friend: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(home, monkeypatch, None) as served:
        with pytest.raises(ConnectFailed):
            await dial(served, friend.hello(), (await friend.trusting(home)).client(home.id))
        assert served.frames == 0


@pytest.mark.parametrize("side", ["client", "server"])
async def test_downgrade_to_tls_1_2_is_refused(
    side: str, home: Party, friend: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = await friend.trusting(home) if side == "client" else await home.trusting(friend)
    weak = old.client(home.id) if side == "client" else old.server
    if side == "server":
        weak.sni_callback = None
        weak.load_verify_locations(cadata=friend.certificate)
    weak.minimum_version = ssl.TLSVersion.TLSv1_2
    weak.maximum_version = ssl.TLSVersion.TLSv1_2
    tls = await home.trusting(friend) if side == "client" else old
    context = weak if side == "client" else (await friend.trusting(home)).client(home.id)
    async with serving(home, monkeypatch, tls) as served:
        with pytest.raises(ConnectFailed):
            await dial(served, friend.hello(), context)
        assert (served.frames, served.accepted) == (0, [])


class _Impostor:
    """A TLS server at the address that a spoofed record names; takes any client."""

    def __init__(self, key: NodeKey) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.verify_mode = ssl.CERT_NONE
        self._key = key
        self.app_bytes = b""

    async def start(self, directory: Path) -> asyncio.Server:
        pem = directory / "impostor.pem"
        certificate = ssl.DER_cert_to_PEM_cert(make_certificate(self._key)).encode()
        pem.write_bytes(certificate + self._key.to_pem())
        self.context.load_cert_chain(pem)
        return await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.context)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.app_bytes += await reader.read(1)
        writer.close()


@pytest.mark.parametrize("impostor", ["stranger", "another member"])
async def test_members_id_announced_at_an_attackers_address_gets_not_one_byte(
    impostor: str, home: Party, friend: Party, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spoofed mDNS record says that `home` is where the impostor listens."""
    key = new_key()
    known = [home.certificate] + ([make_certificate(key)] if impostor == "another member" else [])
    tls = await friend.trusting()
    await asyncio.to_thread(tls.update, known)
    attacker = _Impostor(key)
    server = await attacker.start(tmp_path)
    port = server.sockets[0].getsockname()[1]
    async with server:
        context, hello = tls.client(home.id), friend.hello()
        with counting(friend.id, monkeypatch) as decoded, pytest.raises(ConnectFailed, match="ert"):
            await connect("127.0.0.1", port, hello=hello, handler=Recorder(), ssl=context)
        assert decoded.by_hello == {}
        assert attacker.app_bytes == b""


async def test_member_cannot_vouch_for_another_key(
    home: Party, friend: Party, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trust anchor that were an authority could sign certificates for anybody."""
    guest = new_key()
    issuer = serialization.load_pem_private_key(friend.key.to_pem(), None)
    own = x509.load_der_x509_certificate(friend.certificate)
    guest_key = serialization.load_pem_private_key(guest.to_pem(), None)
    issued = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, guest.node_id)]))
        .issuer_name(own.subject)
        .public_key(guest_key.public_key())  # type: ignore[arg-type]
        .serial_number(7)
        .not_valid_before(datetime(2020, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2099, 1, 1, tzinfo=UTC))
        .sign(issuer, None)  # type: ignore[arg-type]
    )
    pem = tmp_path / "guest.pem"
    pem.write_bytes(
        issued.public_bytes(serialization.Encoding.PEM)
        + guest.to_pem()
        + own.public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(pem)
    async with serving(home, monkeypatch, await home.trusting(friend)) as served:
        with pytest.raises(ConnectFailed):
            await dial(served, Hello(guest.node_id, "guest", "tensors", "x"), context)
        assert served.frames == 0


async def test_revoked_member_cannot_resume_its_old_tls_session(
    home: Party, friend: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = await home.trusting(friend)
    async with serving(home, monkeypatch, tls) as served:
        context = (await friend.trusting(home)).client(home.id)

        def session() -> ssl.SSLSession | None:
            raw = socket.create_connection(("127.0.0.1", served.port), 5)
            raw.settimeout(0.3)
            with raw, context.wrap_socket(raw) as secured:
                with contextlib.suppress(TimeoutError):
                    secured.recv(1)  # a ticket would come now
                return secured.session

        got = await asyncio.to_thread(session)
        assert got is None or not got.has_ticket


_OTHER_TIME = textwrap.dedent(
    """
    import asyncio, sys, time
    from mesh.identity.keys import parse_pem
    from mesh.identity.tls import TlsContexts, TlsMaterial, require_node
    from mesh.wire.messages import Hello
    from mesh.wire.websocket import connect

    class Handler:
        def message(self, message): pass
        def closed(self, error): pass

    async def main():
        port, peer, pem, certificate = sys.argv[1:]
        key = parse_pem(pem.encode())
        tls = TlsContexts(TlsMaterial.of(key, [bytes.fromhex(certificate)]))
        link = await connect("127.0.0.1", int(port), hello=Hello(key.node_id, "x", "tensors", "x"),
                             handler=Handler(), ssl=tls.client(peer))
        print(require_node(link.peer_certificate, peer), time.time())
        link.close()

    asyncio.run(main())
    """
)


_SHIFT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long shift(void) { const char *s = getenv("SHIFT_S"); return s ? atol(s) : 0; }
int clock_gettime(clockid_t id, struct timespec *out) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, out);
    if (id == CLOCK_REALTIME) out->tv_sec += shift();
    return result;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *out, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""
"""A preloaded library that moves the wall clock of one process, OpenSSL's included."""

_DAY_S = 86_400


@pytest.fixture(scope="module")
def shifted_clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("moving a process's clock needs a C compiler and Linux")
    directory = tmp_path_factory.mktemp("clock")
    (directory / "shift.c").write_text(_SHIFT)
    library = directory / "shift.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, directory / "shift.c", "-ldl"], check=True
    )
    return library


@pytest.mark.parametrize("shift_s", [-_DAY_S, _DAY_S, 40 * 365 * _DAY_S, "to 1970"])
async def test_machine_with_a_wrong_clock_links(
    shift_s: int | str,
    home: Party,
    friend: Party,
    shifted_clock: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = _DAY_S - int(time.time()) if isinstance(shift_s, str) else shift_s
    async with serving(home, monkeypatch, await home.trusting(friend)) as served:
        command = [
            sys.executable, "-c", _OTHER_TIME, str(served.port), home.id,
            friend.key.to_pem().decode(), home.certificate.hex(),
        ]  # fmt: skip
        environment = {**os.environ, "LD_PRELOAD": str(shifted_clock), "SHIFT_S": str(seconds)}
        result = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=60, check=False,
            env=environment,
        )  # fmt: skip
        peer, its_time = result.stdout.split() or ("", "0")
        assert peer == home.id, result.stderr
        assert abs(float(its_time) - time.time() - seconds) < 60
        assert served.accepted == [friend.id]


async def test_unusable_anchor_changes_nothing(home: Party, friend: Party) -> None:
    tls = await home.trusting(friend)
    with pytest.raises(UntrustedPeer):
        tls.update([b"not a certificate"])
    assert tls.client(friend.id) is not None
