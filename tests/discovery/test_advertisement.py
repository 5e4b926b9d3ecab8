"""Advertisements survive the wire, and nothing malformed does."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.discovery.advertisement import (
    MAX_SHARDS_PER_NODE,
    Advertisement,
    decode,
    decode_all,
    encode,
)
from mesh.errors import BadAdvertisement
from mesh.identity.keys import node_id
from mesh.types import (
    MAX_COUNT,
    Endpoint,
    LayerRange,
    ModelId,
    NodeId,
    ShardDescriptor,
    ShardHealth,
    ShardMemory,
    copy_of,
    shard_id,
)
from tests.discovery.network import advertised

HOST, OTHER = node_id(b"host"), node_id(b"other")
texts = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=40
)
counts = st.integers(0, MAX_COUNT)
durations = st.floats(0, 1e9)
moments = st.datetimes(datetime(1990, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001


@st.composite
def advertisements(draw: st.DrawFn) -> Advertisement:
    start = draw(st.integers(0, 200))
    span = LayerRange(start, start + draw(st.integers(1, 200)))
    model = ModelId(draw(texts))
    identifier = shard_id(model, span)
    descriptor = ShardDescriptor(
        shard_id=identifier,
        model_id=model,
        weights_sha256=draw(st.text("0123456789abcdef", min_size=64, max_size=64)),
        layers=span,
        total_layers=span.stop + draw(st.integers(0, 50)),
        vram_required_mb=draw(counts),
        max_concurrent_streams=draw(counts),
        host=HOST,
        node_name=draw(texts),
        endpoint=Endpoint(f"wss://127.0.0.1:{draw(st.integers(1, 65535))}"),
        dtype=draw(texts),
        determinism_class=draw(texts),
        advertised_at=draw(moments),
        kv_tokens=draw(counts),
        halved=draw(st.booleans()),
        quant=draw(st.sampled_from(["", "none", "int8", "auto"])),
        own_quant=draw(st.sampled_from(["", "none", "auto"])),
    )
    health = ShardHealth(
        draw(st.booleans()), draw(moments), draw(durations), draw(durations),
        draw(counts), draw(counts),
        draw(st.none() | st.builds(ShardMemory, counts, counts, counts)),
        draw(counts), draw(counts),
    )  # fmt: skip
    return Advertisement(descriptor, health)


@given(advertisements())
def test_round_trip_over_json_and_msgpack(advertisement: Advertisement) -> None:
    data = encode(advertisement)
    assert decode(json.loads(json.dumps(data)), host=HOST) == advertisement
    assert decode(msgpack.unpackb(msgpack.packb(data)), host=HOST) == advertisement


def test_a_node_that_says_nothing_of_its_memory_is_understood() -> None:
    data = encode(advertised(HOST, "0-3"))
    assert "memory" not in data["health"]
    assert decode(data, host=HOST).health.memory is None
    data["health"]["memory"] = {"weights_mb": 1, "caches_mb": -1, "headroom_mb": 3}
    with pytest.raises(BadAdvertisement) as refused:
        decode(data, host=HOST)
    assert refused.value.param == "caches_mb"


def test_keys_of_newer_nodes_are_ignored() -> None:
    shard = advertised(HOST)
    data = encode(shard)
    assert (
        decode({**data, "colour": 1, "health": {**data["health"], "mood": 2}}, host=HOST) == shard
    )


FIELDS = [k for k in encode(advertised(HOST)) if k != "health"]
HEALTH_FIELDS = list(encode(advertised(HOST))["health"])


@pytest.mark.parametrize("key", [*FIELDS, "health"])
@pytest.mark.parametrize("bad", ["missing", None, [], {}, b"x"])
def test_missing_or_ill_typed_field_is_refused_by_name(key: str, bad: Any) -> None:
    data = encode(advertised(HOST))
    if bad == "missing":
        del data[key]
    else:
        data[key] = bad
    with pytest.raises(BadAdvertisement) as caught:
        decode(data, host=HOST)
    expected = {key} | (set(HEALTH_FIELDS) if key == "health" and bad == {} else set())
    assert caught.value.param in expected


@pytest.mark.parametrize("key", HEALTH_FIELDS)
@pytest.mark.parametrize(
    "bad", ["missing", None, "yes", [], float("nan"), float("inf"), -1, 10**400]
)
def test_bad_health_is_refused_by_name(key: str, bad: Any) -> None:
    data = encode(advertised(HOST))
    if bad == "missing":
        del data["health"][key]
    else:
        data["health"][key] = bad
    with pytest.raises(BadAdvertisement) as caught:
        decode(data, host=HOST)
    assert caught.value.param == key


def test_a_further_copy_of_the_same_layers_has_its_number_in_its_id() -> None:
    data = {**encode(advertised(HOST)), "shard_id": "tiny:0-7#2"}
    assert copy_of(decode(data, host=HOST).descriptor.shard_id) == 2
    assert copy_of(decode(encode(advertised(HOST)), host=HOST).descriptor.shard_id) == 0


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("host", OTHER),
        ("shard_id", "tiny:0-8"),
        ("shard_id", "tiny:0-7#0"),
        ("shard_id", "tiny:0-7#01"),
        ("shard_id", "tiny:0-7#one"),
        ("layers", "7-0"),
        ("layers", "0-7777777"),
        ("layers", "0-16"),
        ("head", True),
        ("embeds", True),
        ("weights_sha256", "A" * 64),
        ("weights_sha256", "a" * 63),
        ("total_layers", True),
        ("total_layers", -1),
        ("total_layers", 10**9),
        ("vram_required_mb", 1.5),
        ("node_name", ""),
        ("node_name", "x" * 257),
        ("node_name", "\x1b[31mred"),
        ("node_name", "a\u202eb"),
        ("endpoint", "http://127.0.0.1:1"),
        ("endpoint", "wss://127.0.0.1:0"),
        ("endpoint", "wss://127.0.0.1:65536"),
        ("endpoint", "wss://user@host:1/path"),
        ("endpoint", "wss://a..b:7700"),
        ("endpoint", "wss://[:::::]:1"),
        ("advertised_at", "yesterday"),
        ("advertised_at", "2026-01-02T03:04:05"),
        ("advertised_at", "0001-01-01T00:00:00+23:59"),
    ],
)
def test_value_out_of_bounds_is_refused_by_name(key: str, bad: Any) -> None:
    middle = advertised(HOST, "4-7") if key == "embeds" else advertised(HOST)
    data = {**encode(middle), key: bad}
    if key == "layers":
        data["shard_id"] = f"tiny:{bad}"
    with pytest.raises(BadAdvertisement) as caught:
        decode(data, host=HOST)
    assert caught.value.param == key
    assert caught.value.fix


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*FIELDS, "health"]), JSON), st.booleans())
def test_arbitrary_values_are_either_read_or_refused(changes: dict[str, Any], whole: bool) -> None:
    data = changes if whole else {**encode(advertised(HOST)), **changes}
    try:
        read = decode(data, host=HOST)
    except BadAdvertisement:
        return
    assert decode(encode(read), host=HOST) == read


def test_too_many_shards_are_refused_before_any_is_read() -> None:
    with pytest.raises(BadAdvertisement) as caught:
        decode_all([None] * (MAX_SHARDS_PER_NODE + 1), host=NodeId(HOST))
    assert caught.value.param == "shards"
