"""What the shard process tells its daemon, as msgpack-able maps.

`mesh.shard.hosting` reads them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mesh.channel import ChannelMessage
from mesh.errors import MeshError
from mesh.shard.held import HeldShard
from mesh.shard.loading import LoadedShard
from mesh.types import ShardDescriptor


def loaded_shard(shard: LoadedShard, because: str | None) -> ChannelMessage:
    """A shard is here; `because` is why it was loaded again, if it was."""
    again = [f"loaded again: {because}"] if because else []
    return {
        "op": "loaded",
        "descriptor": descriptor_fields(shard.descriptor),
        "bytes_read": shard.bytes_read,
        "load_ms": shard.load_ms,
        "reasons": [*shard.reasons, *again],
    }


def descriptor_fields(descriptor: ShardDescriptor) -> dict[str, Any]:
    """The descriptor as JSON-able fields: layers as ``lo-hi``, the time as ISO 8601."""
    return {
        **asdict(descriptor),
        "layer_range": str(descriptor.layer_range),
        "advertised_at": descriptor.advertised_at.isoformat(),
    }


async def health_of(shard: HeldShard, rss_mb: float) -> dict[str, Any]:
    """How a shard does; `rss_mb` is the whole process'."""
    health = await shard.server.health()
    return {
        "shard_id": health.shard_id,
        "online": health.online,
        "p50_latency_ms": health.p50_latency_ms,
        "p95_latency_ms": health.p95_latency_ms,
        "queue_depth": health.queue_depth,
        "active_streams": health.active_streams,
        "memory": asdict(shard.memory),
        "rss_mb": rss_mb,
        **asdict(shard.server.load_now()),
    }


def failed(command: ChannelMessage, error: MeshError) -> ChannelMessage:
    """A command could not be obeyed."""
    return {"op": "failed", "shard": command.get("shard"), "error": error.to_dict()}


def endpoint_at(host: str, port: int) -> str:
    """Where askers dial."""
    return f"wss://[{host}]:{port}" if ":" in host else f"wss://{host}:{port}"
