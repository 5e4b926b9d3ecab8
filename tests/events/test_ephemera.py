"""Advertisements: the newest wins, for as long as it says and no longer."""

from __future__ import annotations

import pytest

from mesh.errors import BadEvent
from mesh.events import ephemera
from mesh.events.ephemera import Ephemera, Notice, seal_notice
from mesh.types import NodeId
from tests.events.support import HEARTH, FakeClock, key

NODE = key(0).node_id


def notice(counter: int = 1, epoch: int = 1, name: str = "shard", ttl_ms: int = 30_000) -> Notice:
    return Notice(HEARTH, NODE, name, epoch, counter, ttl_ms, {"load": counter})


def verify(node: NodeId, data: bytes, signature: bytes) -> bool:
    return node == NODE and key(0).sign(data) == signature


@pytest.fixture
def board() -> tuple[Ephemera, FakeClock]:
    clock = FakeClock()
    return Ephemera(HEARTH, verify, clock), clock


def offer(board: Ephemera, item: Notice) -> bool:
    return board.offer(*seal_notice(item, key(0).sign))


def test_the_newest_wins_in_any_order(board: tuple[Ephemera, FakeClock]) -> None:
    live, _ = board
    assert offer(live, notice(2))
    assert not offer(live, notice(1))
    assert not offer(live, notice(2))
    assert offer(live, notice(1, epoch=2))
    assert [n.epoch for n in live.live()] == [2]
    assert offer(live, notice(1, name="other"))
    assert len(live.live()) == 2


def test_life_is_counted_here_and_capped(board: tuple[Ephemera, FakeClock]) -> None:
    live, clock = board
    offer(live, notice(1, ttl_ms=5_000))
    offer(live, notice(1, name="long", ttl_ms=86_400_000))
    clock.seconds += 6
    assert [n.key for n in live.live()] == ["long"]
    clock.seconds += ephemera.MAX_TTL_S
    assert live.live() == []


def test_a_recording_does_not_bring_it_back(board: tuple[Ephemera, FakeClock]) -> None:
    live, clock = board
    old, new = (seal_notice(notice(n), key(0).sign) for n in (1, 2))
    live.offer(*old)
    live.offer(*new)
    clock.seconds += 61
    assert not live.offer(*old)
    assert not live.offer(*new)
    assert live.live() == []


def test_forged_and_foreign_ones_are_not_news(board: tuple[Ephemera, FakeClock]) -> None:
    live, _ = board
    body, signature = seal_notice(notice(), key(0).sign)
    assert not live.offer(body, bytes(64))
    assert not live.offer(body, key(1).sign(ephemera.DOMAIN + body))
    # Signed by the right key, but not as an advertisement.
    assert not live.offer(body, key(0).sign(body))
    other = Notice("another hearth", NODE, "shard", 1, 1, 1000, {})
    assert not offer(live, other)
    assert live.offer(body, signature)


def test_keys_are_bounded_and_expired_ones_give_way(board: tuple[Ephemera, FakeClock]) -> None:
    live, clock = board
    for number in range(ephemera.MAX_KEYS_PER_NODE):
        assert offer(live, notice(name=f"key-{number}"))
    assert not offer(live, notice(name="one more"))
    clock.seconds += 61
    assert offer(live, notice(name="one more"))
    live.forget(NODE)
    assert live.live() == []


@pytest.mark.parametrize(
    "body", [b"", b"\xc0", b"\x91" * 3000, bytes(20_000), b"\x98\x01\x01\x01\x01\x01\x01\x01\x01"]
)
def test_malformed_ones_are_refused(board: tuple[Ephemera, FakeClock], body: bytes) -> None:
    live, _ = board
    with pytest.raises(BadEvent):
        live.offer(body, bytes(64))
