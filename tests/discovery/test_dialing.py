"""Who is dialled, when, and how patiently."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mesh.discovery.announced import follow
from mesh.discovery.announcement import Announcement, instance_name
from mesh.discovery.dialing import (
    Dialer,
    DialResult,
    DialSettings,
    Target,
    parse_endpoint,
)
from mesh.discovery.sightings import PeerState, Sightings
from mesh.errors import BadValue
from mesh.types import NodeId
from tests.discovery.network import PATIENCE_S

SMALL, OWN, LARGE = (NodeId("hn1" + letter * 52) for letter in "abc")
QUICK = DialSettings(first_s=0.001, most_s=0.002, refused_s=60, yield_s=60, timeout_s=1)


class Phone:
    """Counts dials; answers each endpoint as told."""

    def __init__(self, settings: DialSettings, **answers: DialResult) -> None:
        self.answers = answers
        self.calls: list[str] = []
        self.linked: set[NodeId] = set()
        self.rang = asyncio.Event()
        self.dialer = Dialer(self._dial, self.linked.__contains__, own_id=OWN, settings=settings)

    async def _dial(self, target: Target, endpoint: str) -> DialResult:
        self.calls.append(endpoint)
        self.rang.set()
        result = self.answers[endpoint]
        if result is DialResult.LINKED and target.node_id is not None:
            self.linked.add(target.node_id)
        return result

    async def until(self, calls: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.calls) < calls:
                self.rang.clear()
                await self.rang.wait()


async def test_unreachable_target_is_tried_again_and_again_at_every_endpoint() -> None:
    phone = Phone(QUICK, a=DialResult.FAILED, b=DialResult.FAILED)
    phone.dialer.add("x", ("a", "b"), LARGE)
    await phone.until(6)
    await phone.dialer.stop()
    assert phone.calls[:6] == ["a", "b"] * 3


async def test_linked_target_is_dialled_again_only_once_the_link_is_lost() -> None:
    phone = Phone(QUICK, a=DialResult.FAILED, b=DialResult.LINKED)
    phone.dialer.add("x", ("a", "b"), LARGE)
    await phone.until(2)
    await asyncio.sleep(0.05)  # many times the longest wait
    assert phone.calls == ["a", "b"]
    phone.linked.clear()
    phone.dialer.lost(LARGE)
    await phone.until(3)
    await phone.dialer.stop()
    assert phone.calls == ["a", "b", "b"]  # the one that worked comes first


async def test_many_endpoints_take_turns_and_the_one_that_worked_keeps_its_place() -> None:
    dead = {f"dead{number}": DialResult.FAILED for number in range(20)}
    phone = Phone(QUICK, true=DialResult.LINKED, **dead)
    phone.dialer.add("x", (*dead, "true"), LARGE)
    await phone.until(21)
    assert phone.calls == [*dead, "true"]
    phone.dialer.discard("x")  # as after a forged goodbye
    phone.linked.clear()
    phone.dialer.add("x", tuple(dead), LARGE)
    await phone.until(22)
    await phone.dialer.stop()
    assert phone.calls[-1] == "true"


async def test_endpoints_that_are_announced_later_wait_for_their_turn() -> None:
    first, second = ([f"{word}{number}" for number in range(8)] for word in ("dead", "new"))
    answers = dict.fromkeys([*first, *second], DialResult.FAILED)
    phone = Phone(replace(QUICK, first_s=60, most_s=60), true=DialResult.LINKED, **answers)
    phone.dialer.add("x", (*first, "true"), LARGE)
    await phone.until(4)
    phone.dialer.add("x", (*second, "true"), LARGE)
    await phone.until(5)
    await phone.dialer.stop()
    assert phone.calls == [*first[:4], "true"]


async def test_links_that_break_at_once_are_dialled_less_and_less_often() -> None:
    """The news that a link is gone comes before, while or after anybody waits behind it."""
    phone = Phone(replace(QUICK, first_s=0.02, most_s=60), a=DialResult.LINKED)
    loop = asyncio.get_running_loop()

    async def dial_and_break(target: Target, endpoint: str) -> DialResult:
        phone.calls.append(endpoint)
        phone.rang.set()
        if len(phone.calls) % 2:
            phone.linked.add(LARGE)
            loop.call_soon(phone.linked.clear)
        loop.call_soon(phone.dialer.lost, LARGE)
        return DialResult.LINKED

    phone.dialer = Dialer(
        dial_and_break,
        phone.linked.__contains__,
        own_id=OWN,
        settings=replace(QUICK, first_s=0.02, most_s=60),
    )
    phone.dialer.add("x", ("a",), LARGE)
    begin = loop.time()
    await phone.until(6)
    # five waits of at least half of 20, 40, 80, 160, 320 ms
    assert loop.time() - begin >= 0.31
    await phone.dialer.stop()


async def test_refusing_target_is_left_alone_until_its_address_changes() -> None:
    phone = Phone(QUICK, a=DialResult.REFUSED, b=DialResult.REFUSED)
    phone.dialer.add("x", ("a",), LARGE)
    await phone.until(1)
    await asyncio.sleep(0.05)
    assert phone.calls == ["a"]
    phone.dialer.add("x", ("b",), LARGE)
    await phone.until(2)
    await phone.dialer.stop()
    assert phone.calls == ["a", "b"]


async def test_smaller_id_dials_first() -> None:
    phone = Phone(QUICK, a=DialResult.FAILED, b=DialResult.FAILED)
    phone.dialer.add("small", ("a",), SMALL)
    phone.dialer.add("large", ("b",), LARGE)
    await phone.until(3)
    await phone.dialer.stop()
    assert set(phone.calls) == {"b"}


async def test_discarded_target_is_not_dialled_any_more() -> None:
    phone = Phone(QUICK, a=DialResult.FAILED)
    phone.dialer.add("x", ("a",), LARGE)
    await phone.until(2)
    phone.dialer.discard("x")
    calls = len(phone.calls)
    await asyncio.sleep(0.05)
    assert len(phone.calls) == calls
    assert phone.dialer.targets() == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("192.168.1.5:7700", ("192.168.1.5", 7700)),
        ("attic.local:1", ("attic.local", 1)),
        ("[fe80::1%eth0]:7700", ("fe80::1%eth0", 7700)),
    ],
)
def test_endpoint_is_read(text: str, expected: tuple[str, int]) -> None:
    assert parse_endpoint(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "attic", "attic:", ":7700", "attic:0", "attic:65536", "a:-1", f"attic:{'9' * 5000}"],
    ids=lambda text: text[:12],
)
def test_endpoint_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(BadValue) as caught:
        parse_endpoint(text)
    assert caught.value.param == "peer"


async def test_who_was_refused_is_dialled_again_once_something_has_changed() -> None:
    phone = Phone(QUICK, a=DialResult.REFUSED)
    phone.dialer.add("static a", ("a",))
    await phone.until(1)
    await asyncio.sleep(0.05)
    assert phone.calls == ["a"]
    phone.dialer.retry()
    await phone.until(2)
    await phone.dialer.stop()
    assert phone.dialer.targets() == []


async def test_announcements_of_one_node_take_turns_however_many_addresses_each_has() -> None:
    phone, sightings = Phone(QUICK), Sightings(lambda event: None)

    def announced(*addresses: str, node: NodeId = LARGE, hearth: str = "home") -> Announcement:
        instance = instance_name(node, f"{len(addresses):06x}")
        return Announcement(instance, node, hearth, "attic", 1, 7, addresses)

    def targets() -> dict[str, tuple[str, ...]]:
        return {target.key: target.endpoints for target in phone.dialer.targets()}

    seen = [announced("a", "b", "c"), announced("d"), announced("e", node=SMALL, hearth="other")]
    phone.dialer.add("static f:7", ("f:7",), SMALL)
    follow(seen, "home", phone.dialer, sightings)
    assert targets() == {"static f:7": ("f:7",), f"mdns {LARGE}": ("d:7", "a:7", "b:7", "c:7")}
    assert [(row.address, row.state) for row in sightings.rows()] == [
        ("e:7", PeerState.OTHER_HEARTH)
    ]
    follow([], "home", phone.dialer, sightings)
    assert targets() == {"static f:7": ("f:7",)}
    assert sightings.rows() == []
    await phone.dialer.stop()
