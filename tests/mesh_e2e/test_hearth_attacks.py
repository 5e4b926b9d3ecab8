"""Attacks on a node's port and name: whole nodes of a hearth, each with its own key, log and links.

`frames` counts what the attacked node decoded of our own protocol: before a peer has proved who it
is, that is nothing at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from mesh.accounts import allowances
from mesh.accounts.ledger import ResourceLedger
from mesh.clock import SystemClock
from mesh.config import Config
from mesh.discovery.announcement import Announcement, instance_name
from mesh.discovery.directory import ShardStore
from mesh.discovery.events import PeerEvent, PeerUp, Warned
from mesh.discovery.interfaces import choose
from mesh.discovery.mdns import Mdns
from mesh.discovery.sightings import PeerState
from mesh.errors import ConnectFailed, MeshError
from mesh.hearth.control import Control
from mesh.hearth.network import Network
from mesh.hearth.network_settings import NetworkHooks, NetworkSettings
from mesh.hearth.publishing import Serving
from mesh.identity.keys import NodeKey, load_or_create
from mesh.identity.roster import TrustLevel
from mesh.paths import StatePaths
from mesh.wire.messages import PROTOCOL_VERSION, Hello
from mesh.wire.websocket import connect
from tests.identity.support import Party, Recorder, counting, serving

T = TypeVar("T")
PATIENCE_S = 20.0
LOOPBACK = "127.0.0.1"


class Events:
    """What a node's network reported, and waiting for more of it."""

    def __init__(self) -> None:
        self.all: list[PeerEvent] = []
        self._news = asyncio.Event()

    def note(self, event: PeerEvent) -> None:
        self.all.append(event)
        self._news.set()

    async def until(self, condition: Callable[[], T | None]) -> T:
        """Wait until the condition gives something."""
        async with asyncio.timeout(PATIENCE_S):
            while not (found := condition()):
                self._news.clear()
                await self._news.wait()
        return found


@dataclass
class House:
    """One node without shards: everything of it that talks to other nodes."""

    key: NodeKey
    network: Network
    events: Events

    def hello(self, purpose: str = "control") -> Hello:
        fields = {
            "hearth": self.network.require_hearth().id, "run": "r", "dial": 1,
            "address": "127.0.0.1:1",
        }  # fmt: skip
        return Hello(self.key.node_id, "node", purpose, "test", fields=fields)

    def up(self) -> set[str]:
        return {p.node_id for p in self.network.peers() if p.state is PeerState.UP and p.node_id}

    async def until_up(self, *others: House) -> None:
        wanted = {other.key.node_id for other in others}
        await self.events.until(lambda: self.up() == wanted)

    async def until_warned(self, code: str) -> Warned:
        return await self.events.until(
            lambda: next(
                (e for e in self.events.all if isinstance(e, Warned) and e.code == code), None
            )
        )


@asynccontextmanager
async def house(state_dir: Path, name: str) -> AsyncIterator[House]:
    paths = await asyncio.to_thread(StatePaths(state_dir).create)
    key = await asyncio.to_thread(load_or_create, paths.identity_key)
    config = await asyncio.to_thread(
        lambda: Config(state_dir=state_dir, name=name, port=0, interface=(LOOPBACK,))
    )
    settings = NetworkSettings.of(config, key.node_id, "test", LOOPBACK)
    clock = SystemClock()
    events = Events()
    hooks = NetworkHooks(Serving, events.note, lambda: None, lambda kind, fields: None)
    store, accounts = ShardStore(clock, expiry_s=120), ResourceLedger(clock, allowances.DAEMON)
    network = Network(key, paths, settings, store, clock, hooks, accounts)
    here = House(key, network, events)
    await network.start()
    try:
        yield here
    finally:
        await network.stop()


async def pair(home: House, guest: House) -> None:
    window = await home.network.invite(TrustLevel.TRUSTED, 60)
    await guest.network.join(window.invitation.code, f"{window.host}:{window.port}")
    await home.until_up(guest)
    await guest.until_up(home)


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[House]:
    async with house(tmp_path / "home", "home") as here:
        yield here


def old_tls(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def without_certificate() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def dial(target: House, hello: Hello, context: ssl.SSLContext | None) -> None:
    """A link as an attacker opens it; raises ConnectFailed or what the node refuses it with."""
    link = await connect(
        LOOPBACK, target.network.port, hello=hello, handler=Recorder(), ssl=context
    )
    link.close()


async def test_strangers_get_no_frame_decoded(home: House, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = Party("stranger")
    at_home = Party("home", home.key)
    hello = Hello(stranger.id, "x", "control", "test", fields=home.hello().fields)
    with counting(home.key.node_id, monkeypatch) as decoded:
        own = await stranger.trusting(at_home)
        ways = [None, without_certificate(), own.client(home.key.node_id)]
        ways.append(old_tls((await stranger.trusting(at_home)).client(home.key.node_id)))
        for context in ways:
            for said in (hello, home.hello()):
                with pytest.raises(ConnectFailed):
                    await dial(home, said, context)
        reader, writer = await asyncio.open_connection(LOOPBACK, home.network.port)
        writer.write(b"GET /mesh/v1/link HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        with contextlib.suppress(ConnectionError):
            assert b"HTTP" not in await reader.read()
        writer.close()
        assert decoded.by_hello.get("server", 0) == 0
        assert home.up() == set()


async def test_members_are_held_to_their_own_key_and_to_tls_1_3(
    home: House, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        friend = await stack.enter_async_context(house(tmp_path / "friend", "friend"))
        guest = await stack.enter_async_context(house(tmp_path / "guest", "guest"))
        await pair(home, friend)
        await guest_joins(home, guest, friend)
        by_guest = await Party("guest", guest.key).trusting(Party("home", home.key))

        # a downgrade, with a member's own key
        old = await Party("guest", guest.key).trusting(Party("home", home.key))
        with pytest.raises(ConnectFailed):
            await dial(home, guest.hello(), old_tls(old.client(home.key.node_id)))

        # the hello of another member, replayed over the guest's link
        ups = [e for e in home.events.all if isinstance(e, PeerUp)]
        with pytest.raises((ConnectFailed, MeshError)):
            await dial(home, friend.hello(), by_guest.client(home.key.node_id))
        assert [e for e in home.events.all if isinstance(e, PeerUp)] == ups

        # put out: its handshake fails, and its links are gone in the whole hearth
        await Control(home.network).revoke("guest", "sold")
        await home.until_up(friend)
        await friend.until_up(home)
        with pytest.raises(ConnectFailed):
            await dial(home, guest.hello(), by_guest.client(home.key.node_id))
        assert guest.up() == set()


async def guest_joins(home: House, guest: House, friend: House) -> None:
    window = await home.network.invite(TrustLevel.TRUSTED, 60)
    await guest.network.join(window.invitation.code, f"{window.host}:{window.port}")
    await home.until_up(friend, guest)
    await friend.until_up(home, guest)


async def test_an_announced_member_at_an_impostors_address_is_not_told_a_byte(
    home: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mDNS is a hint: the record names a member, the key behind it is somebody else's."""
    async with house(tmp_path / "friend", "friend") as friend:
        await pair(home, friend)
        hearth = home.network.require_hearth().id
    impostor = Party("impostor")
    trusting_home = await impostor.trusting(Party("home", home.key))
    mdns = Mdns(lambda: choose([LOOPBACK])[0])
    async with serving(impostor, monkeypatch, trusting_home) as served:
        knocked = asyncio.Event()
        enter = served.server.enter

        def entered(*arguments: object) -> None:
            knocked.set()
            enter(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(served.server, "enter", entered)
        record = Announcement(
            instance=instance_name(friend.key.node_id, "abcdef"), node_id=friend.key.node_id,
            hearth=hearth, name="friend", version=PROTOCOL_VERSION, port=served.port, addresses=(),
        )  # fmt: skip
        await mdns.start(record, lambda: None, lambda event: None)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await knocked.wait()
            await home.events.until(lambda: turned_away(home, served.port))
        finally:
            await mdns.stop()
        assert served.frames == 0
        assert served.accepted == []
        assert home.up() == set()


def turned_away(home: House, port: int) -> bool:
    """Whether home knows that nobody it wants answers there."""
    return any(p.address.endswith(f":{port}") and p.reason for p in home.network.peers())


async def test_a_cloned_key_is_noticed_and_named(home: House, tmp_path: Path) -> None:
    async with house(tmp_path / "friend", "friend") as friend:
        await pair(home, friend)
        await asyncio.to_thread(shutil.copytree, tmp_path / "friend", tmp_path / "copy")
        async with house(tmp_path / "copy", "copy") as copy:
            assert copy.key.node_id == friend.key.node_id
            warning = await home.until_warned("cloned_key")
            for each in (friend, copy):
                assert str(each.network.port) in warning.message


async def test_a_thousand_half_open_connections_keep_no_member_out(
    home: House, tmp_path: Path
) -> None:
    async with house(tmp_path / "friend", "friend") as friend:
        await pair(home, friend)
        hello = friend.hello()
    tls = await Party("friend", friend.key).trusting(Party("home", home.key))
    sockets: list[socket.socket] = []
    opened = asyncio.Event()
    flood = asyncio.create_task(_flood(home.network.port, sockets, opened), name="flood")
    try:
        async with asyncio.timeout(PATIENCE_S):
            await opened.wait()
        for _ in range(5):  # at the first attempt, each time
            await dial(home, hello, tls.client(home.key.node_id))
        assert not flood.done()
        async with house(tmp_path / "friend", "friend") as friend:
            await home.until_up(friend)
            await friend.until_up(home)
    finally:
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)
        for each in sockets:
            each.close()


async def _flood(port: int, sockets: list[socket.socket], opened: asyncio.Event) -> None:
    """A thousand connections from many addresses that say nothing; then more and more of them."""
    loop = asyncio.get_running_loop()
    number = 0
    while True:
        number += 1
        one = socket.socket()
        sockets.append(one)
        one.setblocking(False)
        one.bind((f"127.0.0.{2 + number % 100}", 0))
        with contextlib.suppress(OSError):
            await loop.sock_connect(one, (LOOPBACK, port))
        if number >= 1000:
            opened.set()
            await asyncio.sleep(0.005)
