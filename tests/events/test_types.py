"""The event's bytes: what is read, and that everything else is refused."""

from __future__ import annotations

import hashlib
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import BadEvent
from mesh.events.types import DOMAIN, GENESIS, MAX_EVENT_BYTES, decode, seal
from mesh.types import NodeId
from tests.events.support import HEARTH, Author

SIGNATURE = bytes(64)
scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
    | st.floats(allow_nan=False, allow_infinity=False)
)  # fmt: skip
payloads = st.dictionaries(
    st.text(),
    st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=5,
)


def fields(**changes: Any) -> list[Any]:
    values = {
        "ver": 2, "hearth": HEARTH, "author": "hn1a", "generation": 3, "seq": 2,
        "prev": b"p" * 32, "lamport": 3, "wall": 4, "type": "model.published",
        "payload": {"model_id": "m"},
    }  # fmt: skip
    return list({**values, **changes}.values())


@given(payloads)
def test_what_is_sealed_is_read_back_verbatim(payload: dict[str, Any]) -> None:
    author = Author(0)
    event = seal(author.draft("a.type", payload), author.key.sign)
    again = decode(event.body, event.signature)
    assert again == event
    assert again.payload == payload
    assert again.id == hashlib.sha256(event.body).digest()
    assert again.signed_bytes == DOMAIN + event.body


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_or_canonical(data: bytes) -> None:
    _check(data)


@given(st.data())
def test_damaged_events_are_refused_or_canonical(data: st.DataObject) -> None:
    body = bytearray(msgpack.packb(fields(payload=data.draw(payloads))))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    _check(bytes(body[: data.draw(st.integers(0, len(body)))]))


def _check(data: bytes) -> None:
    try:
        event = decode(data, SIGNATURE)
    except BadEvent:
        return
    values = [
        2, event.hearth_id, event.author, event.generation, event.seq, event.prev,
        event.lamport, event.wall_ms, event.type, event.payload,
    ]  # fmt: skip
    assert msgpack.packb(values) == data


@pytest.mark.parametrize(
    "changes",
    [
        {"ver": 1}, {"ver": True}, {"generation": 0}, {"generation": "1"},
        {"hearth": ""}, {"hearth": b"h"}, {"hearth": "h" * 129},
        {"author": ""}, {"author": "a b"}, {"author": "\x1b[2J"}, {"author": None},
        {"seq": 0}, {"seq": -1}, {"seq": True}, {"seq": 2**63}, {"seq": 2.0},
        {"seq": 1}, {"prev": GENESIS}, {"prev": b"p" * 31}, {"prev": "p" * 32},
        {"lamport": 0}, {"lamport": 2**63}, {"wall": -1}, {"wall": 1.5},
        {"type": ""}, {"type": "\x1b[2J"}, {"type": "x" * 65},
        {"payload": None}, {"payload": 1}, {"payload": {b"key": 1}}, {"payload": {1: 1}},
        {"payload": {"x": float("nan")}}, {"payload": {"x": float("inf")}},
        {"payload": {"x": msgpack.Timestamp(1)}}, {"payload": {"x": msgpack.ExtType(4, b"")}},
        {"payload": [[[[[[[[[[1]]]]]]]]]]}, {"payload": {"x": b"x" * MAX_EVENT_BYTES}},
    ],
)  # fmt: skip
def test_fields_of_the_wrong_form_are_refused(changes: dict[str, Any]) -> None:
    decode(msgpack.packb(fields()), SIGNATURE)
    with pytest.raises(BadEvent):
        decode(msgpack.packb(fields(**changes), strict_types=False), SIGNATURE)


@pytest.mark.parametrize(
    "tail",
    [
        b"\x82\xa1a\x01\xa1a\x02",  # one key twice
        b"\x81\xa1a\xcc\x01",  # a number longer than it needs to be
        b"\x81\xa1a\xca\x3f\x80\x00\x00",  # a float of four bytes
        b"\xde\x00\x01\xa1a\x01",  # a map header longer than it needs to be
        b"\x81\xa1a\x01\x00",  # something behind the end
    ],
)
def test_other_encodings_of_the_same_content_are_refused(tail: bytes) -> None:
    body = msgpack.packb(fields(payload={}))[:-1]
    assert decode(body + b"\x81\xa1a\x01", SIGNATURE).payload == {"a": 1}
    with pytest.raises(BadEvent):
        decode(body + tail, SIGNATURE)


def test_announced_sizes_cost_no_memory() -> None:
    import tracemalloc

    bombs = [b"\xdd\xff\xff\xff\xff", b"\xdd\x00\x00\x20\x00" * 3000, b"\x91" * 16000, b"\xdf" * 99]
    tracemalloc.start()
    for bomb in bombs:
        with pytest.raises(BadEvent):
            decode(bomb, SIGNATURE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_draft_that_others_would_refuse_is_not_signed() -> None:
    author = Author(0)
    for payload in ({"x": object()}, {"x": float("nan")}, {"x": 2**70}):
        with pytest.raises(BadEvent):
            seal(author.draft("a.type", payload), author.key.sign)
    assert author.id != NodeId("")
