"""Shards as `mesh.deployments` sees them, out of what processes and neighbours say of them.

Part of the composition root.
"""

from __future__ import annotations

from collections.abc import Sequence

from mesh.capacity import Device
from mesh.deployments.formats import LoadedFormat
from mesh.deployments.reconcile import OwnShard, ServedShard, ShardStage
from mesh.discovery.advertisement import Advertisement
from mesh.node.holdings import Holdings
from mesh.types import ShardDescriptor


def own_shards(held: Holdings) -> list[OwnShard]:
    """What this node serves or is loading to serve."""
    found = []
    shards = {shard.descriptor.shard_id: shard for shard in held.host.serving}
    for device, name, request in [
        (device, name, request)
        for device, process in held.host.processes.items()
        for name, request in process.wanted.items()
    ]:
        model, shard = held.models.get(request.model_id), shards.get(name)
        memory = shard.health.memory if shard is not None else None
        dtype = shard.descriptor.dtype if shard is not None else ""
        found.append(
            OwnShard(
                name,
                request.model_id,
                model.weights_sha256 if model is not None else "",
                request.layers,
                memory.total_mb if memory is not None else 0,
                ShardStage.LOADING if shard is None else ShardStage.READY,
                by_hand=name in held.by_hand,
                device=device,
                loaded=LoadedFormat(
                    dtype, request.quant, request.settings.kv_tokens, request.own_quant
                ),
            )
        )
    return found


def served_shard(shard: ShardDescriptor) -> ServedShard:
    """A shard that is advertised."""
    loaded = LoadedFormat(shard.dtype, shard.quant, shard.kv_tokens, shard.own_quant)
    return ServedShard(shard.host, shard.model_id, shard.weights_sha256, shard.layers, loaded)


def becomes_free_mb(shard: Advertisement) -> int:
    """MiB that are free once a shard is gone: its weights, and the caches promised to it."""
    memory = shard.health.memory
    beside_mb = memory.headroom_mb if memory is not None else 0
    return max(0, shard.descriptor.vram_required_mb - beside_mb)


def device_of(shard: ShardDescriptor, devices: Sequence[Device]) -> Device:
    """Which of its host's devices a shard is on; the first where its host does not say."""
    named = (each for each in devices if each.name == shard.device)
    return next(named, devices[0] if devices else Device("", 0, 0))
