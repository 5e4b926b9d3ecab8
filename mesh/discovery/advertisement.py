"""What a node says about one of its shards, and the dict that carries it in `Advertise`.

Decoding is strict: a field that is missing, of another type or out of bounds refuses the entry with
the field's name; keys nobody knows are ignored, so that older nodes understand newer ones. Knows
nothing of links, clocks or who is online.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from mesh import codec
from mesh.codec import Fault, Sha256, Text
from mesh.errors import BadAdvertisement
from mesh.types import (
    Address,
    Endpoint,
    LayerRange,
    ModelId,
    NodeId,
    ShardDescriptor,
    ShardHealth,
    ShardId,
    ShardMemory,
    host_port,
    shard_id,
)  # fmt: skip

MAX_SHARDS_PER_NODE = 64
MAX_LAYERS = 10_000
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Advertisement:
    """One shard and how it is doing, as its host said it."""

    descriptor: ShardDescriptor
    health: ShardHealth


def _layers(text: str) -> None:
    LayerRange.parse(text)


def _moment(text: str) -> None:
    _utc(text)


def _utc(text: str) -> datetime:
    """The time in UTC. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("must say its time zone")
    try:
        return moment.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("must be a time in UTC") from error


Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Milliseconds = Annotated[float, Meta(ge=0, le=MAX_COUNT)]
Moment = Annotated[Text, _moment]


@dataclass(frozen=True, slots=True)
class _Memory:
    weights_mb: Count
    caches_mb: Count
    headroom_mb: Count


@dataclass(frozen=True, slots=True)
class _Health:
    """`memory` is optional: hosts of earlier versions do not say it."""

    online: bool
    last_seen: Moment
    p50_latency_ms: Milliseconds
    p95_latency_ms: Milliseconds
    queue_depth: Count
    active_streams: Count
    memory: _Memory | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class _Entry:
    """An advertisement as it travels. `embeds`, `head` and `kv_tokens` are optional: earlier
    versions have none of them."""

    shard_id: Text
    model_id: Text
    weights_sha256: Sha256
    layers: Annotated[Text, _layers]
    total_layers: Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
    vram_required_mb: Count
    max_concurrent_streams: Count
    host: Text
    node_name: Text
    endpoint: Address
    dtype: Text
    determinism_class: Text
    advertised_at: Moment
    health: _Health
    embeds: bool | UnsetType = UNSET
    head: bool | UnsetType = UNSET
    kv_tokens: Count | UnsetType = UNSET


def encode(advertisement: Advertisement) -> dict[str, Any]:
    """Plain JSON-able types; `decode` gives the same advertisement back."""
    shard, health = advertisement.descriptor, advertisement.health
    memory = UNSET if health.memory is None else _Memory(*astuple(health.memory))
    said = _Health(
        health.online, health.last_seen.isoformat(), health.p50_latency_ms, health.p95_latency_ms,
        health.queue_depth, health.active_streams, memory,
    )  # fmt: skip
    return codec.plain(
        _Entry(
            shard.shard_id, shard.model_id, shard.weights_sha256, str(shard.layer_range),
            shard.total_layers, shard.vram_required_mb, shard.max_concurrent_streams, shard.host,
            shard.node_name, shard.endpoint, shard.dtype, shard.determinism_class,
            shard.advertised_at.isoformat(), said, shard.embeds or UNSET,
            shard.head or UNSET, shard.kv_tokens or UNSET,
        )
    )  # fmt: skip


def decode(data: object, *, host: NodeId) -> Advertisement:
    """Read one entry that the node `host` sent. Raises BadAdvertisement naming the field.

    A node speaks for itself only: an entry with another host is refused.
    """
    try:
        entry = codec.convert(data, _Entry)
        layers = LayerRange.parse(entry.layers)
        _check_whole(entry, layers, host)
    except Fault as fault:
        field = fault.field or "shard"
        raise BadAdvertisement(
            f"Field {field!r} of a shard's advertisement cannot be used: {fault.why}.",
            fix="Update hearthnet on the node that sent it.",
            param=field,
        ) from fault
    identifier, said = ShardId(entry.shard_id), entry.health
    descriptor = ShardDescriptor(
        identifier, ModelId(entry.model_id), entry.weights_sha256, layers, entry.total_layers,
        entry.vram_required_mb, entry.max_concurrent_streams, host, entry.node_name,
        entry.endpoint, entry.dtype, entry.determinism_class, _utc(entry.advertised_at),
        entry.embeds is True, entry.head is True,
        0 if entry.kv_tokens is UNSET else entry.kv_tokens,
    )  # fmt: skip
    memory = None if said.memory is UNSET else ShardMemory(*astuple(said.memory))
    health = ShardHealth(
        identifier, said.online, _utc(said.last_seen), said.p50_latency_ms, said.p95_latency_ms,
        said.queue_depth, said.active_streams, memory,
    )  # fmt: skip
    return Advertisement(descriptor, health)


def _check_whole(entry: _Entry, layers: LayerRange, host: NodeId) -> None:
    expected = shard_id(ModelId(entry.model_id), layers)
    if entry.shard_id != expected:
        raise Fault(f"must be {expected!r}", "shard_id")
    if entry.host != host:
        raise Fault("names another node than the one that sent it", "host")
    if layers.stop > entry.total_layers:
        raise Fault(f"reach beyond the model's {entry.total_layers} layers", "layers")
    if entry.embeds is True and layers.start > 0:
        raise Fault("is of the shard with layer 0 only", "embeds")
    if entry.head is True and layers.stop < entry.total_layers:
        raise Fault("is of the shard with the last layer only", "head")


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
    return Endpoint(f"wss://{host_port(host, port)}")
