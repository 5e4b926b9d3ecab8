"""Notices: the newest wins, signed, and nothing older ever again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import BadEvent
from mesh.events import ephemera
from mesh.events.ephemera import Ephemera, Notice, decode_notice, seal_notice
from mesh.types import NodeId
from tests.events.support import HEARTH, key

NODE = key(0).node_id


def notice(counter: int = 1, epoch: int = 1, name: str = "shards", node: NodeId = NODE) -> Notice:
    return Notice(HEARTH, node, name, epoch, counter, 30_000, {"load": counter})


def verify(node: NodeId, data: bytes, signature: bytes) -> bool:
    return node == NODE and key(0).sign(data) == signature


@pytest.fixture
def board() -> Ephemera:
    return Ephemera(HEARTH, verify)


def offer(board: Ephemera, item: Notice) -> Notice | None:
    return board.offer(*seal_notice(item, key(0).sign), NODE)


def test_the_newest_wins_in_any_order(board: Ephemera) -> None:
    assert offer(board, notice(2)) == notice(2)
    assert offer(board, notice(1)) is None
    assert offer(board, notice(2)) is None
    assert offer(board, notice(1, epoch=2)) == notice(1, epoch=2)
    assert offer(board, notice(9, epoch=1)) is None
    assert offer(board, notice(1, name="other")) is not None


@pytest.mark.parametrize("damage", ["no signature", "another key", "not as a notice", "a bit"])
def test_forged_ones_are_refused_and_keep_nothing_out(board: Ephemera, damage: str) -> None:
    body, signature = seal_notice(notice(5), key(0).sign)
    forged = {
        "no signature": b"",
        "another key": key(1).sign(ephemera.DOMAIN + body),
        "not as a notice": key(0).sign(body),
        "a bit": bytes([signature[0] ^ 1]) + signature[1:],
    }[damage]
    with pytest.raises(BadEvent, match="signature"):
        board.offer(body, forged, NODE)
    # It did not count: the real one with the same number is news.
    assert board.offer(body, signature, NODE) == notice(5)


def test_another_hearths_are_refused(board: Ephemera) -> None:
    with pytest.raises(BadEvent, match="another hearth"):
        offer(board, Notice("another hearth", NODE, "shards", 1, 1, 1000, {}))


def test_whoever_hands_on_anothers_does_not_use_up_its_number(board: Ephemera) -> None:
    body, signature = seal_notice(notice(5), key(0).sign)
    with pytest.raises(BadEvent, match="another node"):
        board.offer(body, signature, key(1).node_id)
    assert board.offer(body, signature, NODE) == notice(5)


def test_keys_are_bounded_until_the_node_is_forgotten(board: Ephemera) -> None:
    for number in range(ephemera.MAX_KEYS_PER_NODE):
        assert offer(board, notice(name=f"key-{number}"))
    with pytest.raises(BadEvent, match="too many"):
        offer(board, notice(name="one more"))
    board.forget(NODE)
    assert offer(board, notice(name="one more"))


@pytest.mark.parametrize(
    "body", [b"", b"\xc0", b"\x91" * 3000, bytes(200_000), b"\x98\x01\x01\x01\x01\x01\x01\x01\x01"]
)
def test_malformed_ones_are_refused(board: Ephemera, body: bytes) -> None:
    with pytest.raises(BadEvent):
        board.offer(body, bytes(64), NODE)


@given(st.binary(max_size=300))
def test_no_bytes_break_the_decoder(body: bytes) -> None:
    try:
        decode_notice(body)
    except BadEvent:
        return
    assert seal_notice(decode_notice(body), key(0).sign)[0] == body
