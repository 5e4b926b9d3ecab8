"""What a node says about one of its shards, and the dict that carries it in `Advertise`.

Decoding is strict: a field that is missing, of another type or out of bounds refuses the entry with
the field's name; keys nobody knows are ignored, so that older nodes understand newer ones. Knows
nothing of links, clocks or who is online.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

from mesh.errors import BadAdvertisement
from mesh.types import (
    Endpoint,
    LayerRange,
    ModelId,
    NodeId,
    ShardDescriptor,
    ShardHealth,
    ShardId,
    ShardMemory,
    shard_id,
)  # fmt: skip

MAX_TEXT = 256
MAX_SHARDS_PER_NODE = 64
MAX_LAYERS = 10_000
MAX_COUNT = 2**31 - 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ENDPOINT = re.compile(
    r"wss://(\[[0-9A-Fa-f:.]{2,45}(%[\w.-]{1,15})?\]|[A-Za-z0-9._-]{1,253}):(\d{1,5})"
)


@dataclass(frozen=True, slots=True)
class Advertisement:
    """One shard and how it is doing, as its host said it."""

    descriptor: ShardDescriptor
    health: ShardHealth


def encode(advertisement: Advertisement) -> dict[str, Any]:
    """Plain JSON-able types; `decode` gives the same advertisement back."""
    shard, health = advertisement.descriptor, advertisement.health
    return {
        "shard_id": str(shard.shard_id),
        "model_id": str(shard.model_id),
        "weights_sha256": shard.weights_sha256,
        "layers": str(shard.layer_range),
        "total_layers": shard.total_layers,
        "vram_required_mb": shard.vram_required_mb,
        "max_concurrent_streams": shard.max_concurrent_streams,
        "host": str(shard.host),
        "node_name": shard.node_name,
        "endpoint": str(shard.endpoint),
        "dtype": shard.dtype,
        "determinism_class": shard.determinism_class,
        "advertised_at": shard.advertised_at.isoformat(),
        "health": {
            "online": health.online,
            "last_seen": health.last_seen.isoformat(),
            "p50_latency_ms": health.p50_latency_ms,
            "p95_latency_ms": health.p95_latency_ms,
            "queue_depth": health.queue_depth,
            "active_streams": health.active_streams,
            **({} if health.memory is None else {"memory": asdict(health.memory)}),
        },
    }


def decode(data: object, *, host: NodeId) -> Advertisement:
    """Read one entry that the node `host` sent. Raises BadAdvertisement naming the field.

    A node speaks for itself only: an entry with another host is refused.
    """
    fields = _Fields(data, "shard")
    model = ModelId(fields.text("model_id"))
    layers = _layers(fields)
    identifier = ShardId(fields.text("shard_id"))
    if identifier != shard_id(model, layers):
        fields.refuse("shard_id", f"must be {shard_id(model, layers)!r}")
    if fields.text("host") != host:
        fields.refuse("host", "names another node than the one that sent it")
    descriptor = ShardDescriptor(
        shard_id=identifier,
        model_id=model,
        weights_sha256=fields.matching("weights_sha256", _SHA256, "64 lowercase hex digits"),
        layer_range=layers,
        total_layers=fields.count("total_layers", MAX_LAYERS),
        vram_required_mb=fields.count("vram_required_mb"),
        max_concurrent_streams=fields.count("max_concurrent_streams"),
        host=host,
        node_name=fields.text("node_name"),
        endpoint=_endpoint(fields),
        dtype=fields.text("dtype"),
        determinism_class=fields.text("determinism_class"),
        advertised_at=fields.moment("advertised_at"),
    )
    if layers.stop > descriptor.total_layers:
        fields.refuse("layers", f"reach beyond the model's {descriptor.total_layers} layers")
    return Advertisement(descriptor, _health(fields, identifier))


def decode_all(entries: Sequence[object], *, host: NodeId) -> list[Advertisement]:
    """All that `host` advertises; one bad entry, or too many of them, refuses the whole."""
    if len(entries) > MAX_SHARDS_PER_NODE:
        raise BadAdvertisement(
            f"It lists {len(entries)} shards, more than {MAX_SHARDS_PER_NODE}.",
            fix="Check what runs on the node that sent it.",
            param="shards",
        )
    return [decode(entry, host=host) for entry in entries]


def at_host(endpoint: Endpoint, host: str) -> Endpoint:
    """The same port at another address."""
    port = endpoint.rpartition(":")[2]
    return Endpoint(f"wss://[{host}]:{port}" if ":" in host else f"wss://{host}:{port}")


def _layers(fields: _Fields) -> LayerRange:
    try:
        return LayerRange.parse(fields.text("layers"))
    except ValueError as error:
        fields.refuse("layers", str(error))


def _endpoint(fields: _Fields) -> Endpoint:
    text = fields.matching("endpoint", _ENDPOINT, "wss://HOST:PORT")
    if not 0 < int(text.rpartition(":")[2]) < 65536:
        fields.refuse("endpoint", "has a port outside 1-65535")
    return Endpoint(text)


def _health(fields: _Fields, identifier: ShardId) -> ShardHealth:
    health = _Fields(fields.value("health"), "health")
    return ShardHealth(
        shard_id=identifier,
        online=health.flag("online"),
        last_seen=health.moment("last_seen"),
        p50_latency_ms=health.duration("p50_latency_ms"),
        p95_latency_ms=health.duration("p95_latency_ms"),
        queue_depth=health.count("queue_depth"),
        active_streams=health.count("active_streams"),
        memory=_memory(health),
    )


def _memory(health: _Fields) -> ShardMemory | None:
    """Optional: nodes before this one do not say it."""
    if not health.has("memory"):
        return None
    memory = _Fields(health.value("memory"), "memory")
    return ShardMemory(
        memory.count("weights_mb"), memory.count("caches_mb"), memory.count("headroom_mb")
    )


class _Fields:
    """A mapping from outside, read one checked field at a time."""

    def __init__(self, data: object, name: str) -> None:
        self._name = name
        if not isinstance(data, Mapping):
            self.refuse(name, "must be a map")
        self._data: Mapping[object, object] = data

    def refuse(self, key: str, why: str) -> NoReturn:
        raise BadAdvertisement(
            f"Field {key!r} of a shard's advertisement {why}.",
            fix="Update hearthnet on the node that sent it.",
            param=key,
        )

    def has(self, key: str) -> bool:
        return key in self._data

    def value(self, key: str) -> object:
        if key not in self._data:
            self.refuse(key, "is missing")
        return self._data[key]

    def text(self, key: str) -> str:
        """1 to MAX_TEXT printable characters: these names end up on terminals."""
        value = self.value(key)
        if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT or not value.isprintable():
            self.refuse(key, f"must be 1 to {MAX_TEXT} printable characters")
        return value

    def matching(self, key: str, pattern: re.Pattern[str], form: str) -> str:
        value = self.text(key)
        if pattern.fullmatch(value) is None:
            self.refuse(key, f"must be {form}")
        return value

    def count(self, key: str, most: int = MAX_COUNT) -> int:
        value = self.value(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            self.refuse(key, f"must be a whole number from 0 to {most}")
        return value

    def flag(self, key: str) -> bool:
        value = self.value(key)
        if not isinstance(value, bool):
            self.refuse(key, "must be true or false")
        return value

    def duration(self, key: str) -> float:
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, "must be a number")
        if not 0 <= value <= MAX_COUNT:  # false for NaN as well
            self.refuse(key, f"must be a number from 0 to {MAX_COUNT}")
        return float(value)

    def moment(self, key: str) -> datetime:
        text = self.text(key)
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            self.refuse(key, "must be an ISO 8601 time")
        if moment.tzinfo is None:
            self.refuse(key, "must say its time zone")
        try:
            return moment.astimezone(UTC)
        except OverflowError:
            self.refuse(key, "must be an ISO 8601 time")
