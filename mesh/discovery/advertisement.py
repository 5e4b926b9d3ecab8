"""What a node says about one of its shards, and the dict that carries it in `Advertise`.

Decoding is strict: a field that is missing, of another type or out of bounds refuses the entry with
the field's name; keys nobody knows are ignored, so that older nodes understand newer ones. Knows
nothing of links, clocks or who is online.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mesh import codec
from mesh.codec import Fault
from mesh.errors import BadAdvertisement
from mesh.types import (
    Endpoint,
    NodeId,
    ShardDescriptor,
    ShardHealth,
    copy_of,
    host_port,
    shard_id,
)

MAX_SHARDS_PER_NODE = 64


@dataclass(frozen=True, slots=True)
class Advertisement:
    """One shard and how it is doing, as its host said it."""

    descriptor: ShardDescriptor
    health: ShardHealth


@dataclass(frozen=True, slots=True)
class _Health:
    health: ShardHealth


_SINCE = (
    "embeds", "head", "kv_tokens", "halved", "quant", "own_quant", "short_rows", "device", "norms",
)  # fmt: skip
_HEALTH_SINCE = ("memory", "jobs", "jobs_so_far")
"""Said only where there is something to say: earlier versions have none of them."""


def encode(advertisement: Advertisement) -> dict[str, Any]:
    """Plain JSON-able types; `decode` gives the same advertisement back."""
    shard, health = advertisement.descriptor, advertisement.health
    fields = codec.plain(shard) | {"advertised_at": shard.advertised_at.isoformat()}
    more = {name: value for name in _SINCE if (value := fields.pop(name))}
    said = codec.plain(health) | {"last_seen": health.last_seen.isoformat()}
    for name in _HEALTH_SINCE:
        if not said[name]:
            del said[name]
    return {**fields, "health": said, **more}


def decode(data: object, *, host: NodeId) -> Advertisement:
    """Read one entry that the node `host` sent. Raises BadAdvertisement naming the field.

    A node speaks for itself only: an entry with another host is refused.
    """
    try:
        descriptor = codec.convert(data, ShardDescriptor)
        _check_whole(descriptor, host)
        return Advertisement(descriptor, codec.convert(data, _Health).health)
    except Fault as fault:
        field = fault.field or "shard"
        raise BadAdvertisement(
            f"Field {field!r} of a shard's advertisement cannot be used: {fault.why}.",
            fix="Update hearthnet on the node that sent it.",
            param=field,
        ) from fault


def _check_whole(shard: ShardDescriptor, host: NodeId) -> None:
    layers = shard.layers
    expected = shard_id(shard.model_id, layers, copy_of(shard.shard_id))
    if shard.shard_id != expected:
        raise Fault(f"must be {expected!r}", "shard_id")
    if shard.host != host:
        raise Fault("names another node than the one that sent it", "host")
    if layers.stop > shard.total_layers:
        raise Fault(f"reach beyond the model's {shard.total_layers} layers", "layers")
    if shard.embeds and layers.start > 0:
        raise Fault("is of the shard with layer 0 only", "embeds")
    if shard.head and layers.stop < shard.total_layers:
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
