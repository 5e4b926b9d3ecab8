"""The one way in: strict, bounded; a refusal names the field, the value and what was due."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgpack
import pytest
from msgspec import Meta

from mesh import codec
from mesh.codec import Canonical, Fault, SignedForm, Text, UInt32
from mesh.identity.roster import TrustLevel


@dataclass(frozen=True, slots=True)
class Hop:
    """A form in a form."""

    host: Text
    port: Annotated[int, Meta(ge=1, le=65535)]


@dataclass(frozen=True, slots=True)
class Route:
    """A form of everything that travels."""

    name: Text
    hops: tuple[Hop, ...]
    level: TrustLevel
    load: Annotated[float, codec.finite]
    key: bytes = b""
    seen: UInt32 = 0

    def __post_init__(self) -> None:
        if len(self.hops) > 2:
            raise Fault("is longer than anybody needs", "hops")


GOOD: dict[str, Any] = {
    "name": "a", "hops": [{"host": "b", "port": 1}], "level": 2, "load": 0.5, "key": b"k",
    "seen": 3,
}  # fmt: skip
ROUTE = Route("a", (Hop("b", 1),), TrustLevel.TRUSTED, 0.5, b"k", 3)


def test_a_form_survives_the_way_out_and_in() -> None:
    assert codec.convert(GOOD, Route) == ROUTE
    assert msgpack.packb(codec.plain(ROUTE)) == msgpack.packb(GOOD)


@pytest.mark.parametrize(
    ("change", "field", "why"),
    [
        ({"name": 5}, "name", "expected `str`, got `int`"),
        ({"name": ""}, "name", "expected `str` of length >= 1, got ''"),
        ({"name": "\x1b[31m"}, "name", "cannot be printed, got '\\x1b[31m'"),
        ({"name": "x" * 300}, "name", "expected `str` of length <= 256, got 'xxx"),
        ({"hops": [{"host": "b", "port": 0}]}, "port", "expected `int` >= 1, got 0"),
        ({"hops": [{"host": "b"}]}, "port", "is missing"),
        ({"hops": [{"host": "\u202e", "port": 1}]}, "host", "got '\\u202e'"),
        ({"hops": [GOOD["hops"][0]] * 3}, "hops", "is longer than anybody needs"),
        ({"level": True}, "level", "expected `int`, got `bool`"),
        ({"level": 7}, "level", "invalid enum value 7"),
        ({"level": 2.0}, "level", "expected `int`, got `float`"),
        ({"load": "0.5"}, "load", "expected `float`, got `str`"),
        ({"load": float("nan")}, "load", "is not finite, got nan"),
        ({"key": "a2V5"}, "key", "expected `bytes`, got `str`"),
        ({"seen": -1}, "seen", "expected `int` >= 0, got -1"),
        ({"seen": 1 << 100}, "seen", "got a number of 101 bits"),
    ],
)
def test_a_refusal_names_field_value_and_what_was_due(
    change: dict[str, Any], field: str, why: str
) -> None:
    with pytest.raises(Fault) as caught:
        codec.convert({**GOOD, **change}, Route)
    assert caught.value.field == field
    assert why in caught.value.why
    assert len(caught.value.why) < 200


def test_keys_nobody_knows_are_ignored_unless_the_form_is_closed() -> None:
    more = {**GOOD, "mood": 1}
    assert codec.convert(more, Route) == ROUTE
    with pytest.raises(Fault, match="mood"):
        codec.convert(more, Route, closed=True)


def test_a_default_stands_in_for_a_key_unless_the_map_is_to_be_complete() -> None:
    less = {name: value for name, value in GOOD.items() if name != "seen"}
    assert codec.convert(less, Route).seen == 0
    with pytest.raises(Fault, match="seen") as caught:
        codec.convert(less, Route, complete=True)
    assert caught.value.field == "seen"


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"\xc1", "strict msgpack"),
        (b"\xdd\x7f\xff\xff\xff", "strict msgpack"),
        (msgpack.packb(1) + b"\0", "strict msgpack"),
        (msgpack.packb(list(range(codec.MAX_ELEMENTS + 1))), "strict msgpack"),
        (b"\x82\xa1a\1\xa1a\1", "duplicate key"),
        (msgpack.packb(msgpack.ExtType(5, b"x")), "strict msgpack"),
        (msgpack.packb(nested(codec.MAX_DEPTH + 1)), "nested deeper"),
        (b"\x91" * 5000, "strict msgpack"),
    ],
)
def test_bytes_that_cost_memory_or_mean_two_things_are_refused(body: bytes, why: str) -> None:
    with pytest.raises(Fault, match=why):
        codec.unpack(body)


def test_values_as_deep_and_wide_as_is_allowed_are_read() -> None:
    for value in (nested(codec.MAX_DEPTH), list(range(codec.MAX_ELEMENTS))):
        assert codec.unpack(msgpack.packb(value)) == value


class Said(SignedForm, frozen=True, tag=3):
    """Something signed."""

    author: str
    payload: dict[str, Any] | list[Any]


SIGNED = Canonical(Said, max_bytes=4096, depth=2)


@pytest.mark.parametrize("payload", [{"a": [1, 2.5, None, True, b"x"]}, [["y"]], {}])
def test_what_is_signed_has_one_encoding(payload: Any) -> None:
    body = SIGNED.pack(Said("n", payload))
    assert body == msgpack.packb([3, "n", payload])
    assert SIGNED.unpack(body) == Said("n", payload)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (msgpack.packb([2, "n", {}]), "version"),
        (msgpack.packb([3, 5, {}]), "author"),
        (msgpack.packb([3, "n", 1]), "payload"),
        (msgpack.packb([3, "n", {"a": [[1]]}]), "payload"),
        (msgpack.packb([3, "n", {"a": float("inf")}]), "payload"),
        (msgpack.packb([3, "n", {"a": msgpack.Timestamp(1)}]), "payload"),
        (msgpack.packb([3, "n", list(range(codec.MAX_ELEMENTS + 1))]), "payload"),
        (msgpack.packb([3, "n", {str(n): 0 for n in range(codec.MAX_ELEMENTS + 1)}]), ""),
        (msgpack.packb([3, "n", {}, 1]), ""),
        (msgpack.packb([3, "n"]), ""),
        (b"\x93\x03\xa1n\x82\xa1a\1\xa1a\1", ""),
        (b"\x93\x03\xd9\1n\x80", ""),
        (b"\x93\xcc\x03\xa1n\x80", ""),
        (b"\x93\x03\xa1n\x91\xca\x3f\xc0\0\0", ""),
        (b"\x93\x03\xa1n" + b"\x91" * 4000, ""),
        (b"\xdd\x7f\xff\xff\xff", ""),
    ],
)
def test_anything_else_is_not_what_was_signed(body: bytes, field: str) -> None:
    with pytest.raises(Fault) as caught:
        SIGNED.unpack(body)
    assert caught.value.field == field
