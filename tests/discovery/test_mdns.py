"""Multicast DNS for real, on loopback; floods go into one instance's own packet handler."""

from __future__ import annotations

import asyncio
import logging
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import psutil
import pytest
from zeroconf import DNSOutgoing, DNSPointer, DNSText
from zeroconf.const import _CLASS_IN, _FLAGS_AA, _FLAGS_QR_RESPONSE, _TYPE_PTR, _TYPE_TXT

from mesh.discovery.announcement import SERVICE_TYPE, Announcement, instance_name
from mesh.discovery.events import Warned
from mesh.discovery.interfaces import InterfaceChoice
from mesh.discovery.mdns import MAX_INSTANCES, Mdns, MdnsSettings
from mesh.discovery.multicast import joinable
from tests.descriptors import none_left
from tests.discovery.network import PATIENCE_S, QUICK_MDNS, loopback, new_id


class Listener:
    """One Mdns and what it reported."""

    def __init__(
        self,
        hearth: str,
        choose: Callable[[], list[InterfaceChoice]] = loopback,
        settings: MdnsSettings = QUICK_MDNS,
    ) -> None:
        node_id = new_id()
        instance = instance_name(node_id, secrets.token_hex(3))
        self.own = Announcement(instance, node_id, hearth, "kitchen", 1, 7700, ())
        self.mdns = Mdns(choose, settings=settings)
        self.warnings: list[Warned] = []
        self.changed = asyncio.Event()

    async def start(self) -> None:
        await self.mdns.start(self.own, self.changed.set, self._warn)

    def _warn(self, warning: Warned) -> None:
        self.warnings.append(warning)
        self.changed.set()

    def sees(self, other: Listener) -> Announcement | None:
        """What it knows of another; nodes of other tests are around as well."""
        for announcement in self.mdns.announcements():
            if announcement.instance == other.own.instance:
                return announcement
        return None

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


def inside(mdns: Mdns) -> tuple[Any, Any]:
    """The library's socket and what it announces."""
    multicast: Any = mdns._multicast
    return multicast._zeroconf.zeroconf, multicast._info


@asynccontextmanager
async def listening(*listeners: Listener) -> AsyncIterator[None]:
    try:
        for listener in listeners:
            await listener.start()
        yield
    finally:
        await asyncio.gather(*(listener.mdns.stop() for listener in listeners))


@pytest.fixture
def hearth() -> str:
    return f"test-{secrets.token_hex(8)}"


async def test_announcement_is_seen_with_all_it_says(hearth: str) -> None:
    one, other = Listener(hearth), Listener(hearth)
    async with listening(one, other):
        await one.until(lambda: one.sees(other) is not None)
        seen = one.sees(other)
        assert seen is not None
        assert (seen.node_id, seen.hearth, seen.name) == (other.own.node_id, hearth, "kitchen")
        assert (seen.version, seen.endpoints()) == (1, ["127.0.0.1:7700"])
        assert one.own.instance not in {a.instance for a in one.mdns.announcements()}
        assert not one.warnings


async def test_changed_shards_reach_the_others(hearth: str) -> None:
    one, other = Listener(hearth), Listener(hearth)
    async with listening(one, other):
        await one.until(lambda: one.sees(other) is not None)
        for shards in ("tiny:0-7", "tiny:8-15"):
            await other.mdns.announce(shards)
            await one.until(lambda shards=shards: getattr(one.sees(other), "shards", "") == shards)


async def opening(listener: Listener) -> asyncio.Task[None]:
    """Its start, when it has begun to open its sockets."""
    starting = asyncio.create_task(listener.start())
    while not listener.mdns.addresses:  # noqa: ASYNC110 - it is so for some turns only
        await asyncio.sleep(0)
    return starting


async def test_what_is_said_while_it_opens_reaches_the_others(hearth: str) -> None:
    one, other = Listener(hearth), Listener(hearth)
    async with listening(one):
        starting = await opening(other)
        try:
            await other.mdns.announce_window(4711)
            assert not starting.done()
            await starting
            await one.until(lambda: getattr(one.sees(other), "pairing", None) == 4711)
        finally:
            await other.mdns.stop()


async def test_who_gives_up_while_it_opens_leaves_nothing_that_answers(hearth: str) -> None:
    before = sockets()
    starting = await opening(Listener(hearth))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert sockets() == before


def sockets() -> int:
    """How many of this process speak mDNS."""
    mine = psutil.Process().net_connections("udp")
    return sum(each.laddr.port == 5353 for each in mine if each.laddr)


@pytest.mark.parametrize("stands_still_s", [0.0, 1.0, 3.2])
async def test_goodbye_is_heard(hearth: str, stands_still_s: float) -> None:
    """Also where the machine stands still after the first of several, and it had just begun; and no
    socket of it is left."""
    one, other = Listener(hearth, settings=MdnsSettings()), Listener(hearth)
    async with listening(one):
        before = await asyncio.to_thread(sockets)
        async with listening(other):
            await one.until(lambda: one.sees(other) is not None)
            asyncio.get_running_loop().call_later(0.05, time.sleep, stands_still_s)
        await one.until(lambda: one.sees(other) is None)
        assert await asyncio.to_thread(sockets) == before


async def test_node_that_vanishes_silently_is_dropped_and_found_again(hearth: str) -> None:
    one, other = Listener(hearth), Listener(hearth)
    async with listening(one, other):
        await one.until(lambda: one.sees(other) is not None)
        zeroconf, info = inside(other.mdns)
        zeroconf.registry.async_remove(info)  # it answers nobody from here on, and says no goodbye
        await one.until(lambda: one.sees(other) is None)
        zeroconf.registry.async_add(info)
        await one.until(lambda: one.sees(other) is not None)


async def test_interfaces_that_change_are_followed(hearth: str) -> None:
    available: list[InterfaceChoice] = []
    one, other = Listener(hearth), Listener(hearth, choose=lambda: list(available))
    async with listening(one, other):
        assert [w.code for w in other.warnings] == ["no_multicast"]
        available += loopback()
        await one.until(lambda: one.sees(other) is not None)


async def test_interfaces_are_looked_at_again_when_a_link_is_lost(hearth: str) -> None:
    available: list[InterfaceChoice] = []
    rarely = replace(QUICK_MDNS, refresh_s=3600.0)
    one, other = Listener(hearth), Listener(hearth, lambda: list(available), rarely)
    async with listening(one, other):
        available += loopback()
        other.mdns.look_again()
        await one.until(lambda: one.sees(other) is not None)


async def test_without_descriptors_it_looks_again_once_there_are_some(hearth: str) -> None:
    available: list[InterfaceChoice] = []
    one, other, found = Listener(hearth), Listener(hearth, lambda: list(available)), loopback()
    async with listening(one, other):
        with none_left():
            available += found
            await other.until(lambda: len(other.warnings) > 1)
        await one.until(lambda: one.sees(other) is not None)


async def test_unheard_announcements_are_a_warning(hearth: str) -> None:
    deaf = Listener(hearth, settings=MdnsSettings(hear_self_s=0.1))
    deaf.mdns._on_state = lambda instance, alive: None  # type: ignore[method-assign]
    async with listening(deaf):
        await deaf.until(lambda: bool(deaf.warnings))
        [warning] = deaf.warnings
        assert warning.code == "no_multicast"
        assert "firewall" in warning.message
        assert "--peer 127.0.0.1:7700" in warning.fix


def test_address_that_is_not_ours_cannot_join() -> None:
    assert joinable("127.0.0.1") is None
    assert joinable("198.51.100.7")


@pytest.mark.parametrize("plausible", [True, False])
async def test_flood_of_bogus_records_is_bounded(
    hearth: str, plausible: bool, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = Listener(hearth, settings=MdnsSettings(resolve_timeout_s=0.2)), Listener(hearth)
    async with listening(one, other):
        await one.until(lambda: one.sees(other) is not None)
        before = psutil.Process().memory_info().rss
        with caplog.at_level(logging.WARNING, logger="mesh.discovery.mdns"):
            for packet in bogus(10_000, plausible=plausible):
                receive(one.mdns, packet)
                await asyncio.sleep(0)
        assert len(one.mdns._rows) <= MAX_INSTANCES
        assert len(one.mdns._unresolved) <= MAX_INSTANCES
        grown = psutil.Process().memory_info().rss - before
        assert grown < 20 << 20  # zeroconf's own cache of 10 000 records included
        assert len([r for r in caplog.records if "ignored" in r.message]) <= 1
        assert one.sees(other) is not None


def bogus(count: int, *, plausible: bool) -> list[bytes]:
    """Response packets with pointers to instances that do not exist."""
    packets: list[bytes] = []
    for start in range(0, count, 50):
        out = DNSOutgoing(_FLAGS_QR_RESPONSE | _FLAGS_AA)
        for number in range(start, start + 50):
            name = (
                instance_name(new_id(), f"{number:06x}")
                if plausible
                else f"printer {number}.{SERVICE_TYPE}"
            )
            out.add_answer_at_time(DNSPointer(SERVICE_TYPE, _TYPE_PTR, _CLASS_IN, 4500, name), 0)
            if number % 10 == 0:
                out.add_answer_at_time(DNSText(name, _TYPE_TXT, _CLASS_IN, 4500, b"\x05junk!"), 0)
        packets += out.packets()
    return packets


def receive(mdns: Mdns, packet: bytes) -> None:
    """As if it had come from the network, but for this instance only."""
    zeroconf, _ = inside(mdns)
    zeroconf.engine.protocols[0].datagram_received(packet, ("127.0.0.1", 5353))


_GOES_AWAY = """
import asyncio, logging, subprocess
from mesh.discovery.multicast import Multicast

async def main():
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    multicast = await Multicast.open(["127.0.0.1"], None, lambda *_: None, ttl_s=60)
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    await asyncio.sleep(2)
    await multicast.close()

logging.basicConfig()
asyncio.run(main())
"""


def test_a_network_that_goes_away_is_one_line_in_the_log() -> None:
    unshare = ["unshare", "--net", "--map-root-user", "--user"]
    try:
        subprocess.run([*unshare, "ip", "link", "set", "lo", "up"], check=True, timeout=20)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network of one's own here: {error}")
    told = subprocess.run(
        [*unshare, sys.executable, "-c", _GOES_AWAY],
        capture_output=True, text=True, timeout=60, check=True,
    ).stderr  # fmt: skip
    assert told.count("Network is unreachable") == 1
    assert "Traceback" not in told
