"""What a node's processes are told at their start: configuration in, first commands out.

Starts nothing and owns nothing; `mesh.node.node` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from mesh import __version__
from mesh.capacity import named_devices
from mesh.config import Config
from mesh.identity.keys import NodeKey
from mesh.identity.tls import TlsMaterial
from mesh.interventions.jail.limits import JobLimits
from mesh.interventions.jobs.commands import StartJobs
from mesh.interventions.jobs.types import RunnerSettings
from mesh.models.disk_room import free_bytes
from mesh.models.local import LocalModel, local_directory
from mesh.paths import StatePaths, cache_dir, models_dir
from mesh.pipeline.commands import AskerOptions, EngineSettings, RouteLimits, StartAsker
from mesh.pipeline.entrance import Entrance
from mesh.processes.headroom import ram
from mesh.processes.memory_budget import CappedMemory, MemoryCaps
from mesh.shard.commands import Measure, ShardRequest, StartShards
from mesh.shard.settings import ShardSettings
from mesh.transfers.commands import NICE, LocalCheckpoint, StartFetcher
from mesh.types import LayerRange
from mesh.units import memory_limit_mb
from mesh.wire.messages import Hello

SOFTWARE = f"hearthnet/{__version__}"


def start_shards(
    config: Config, key: NodeKey, address: str, tls: TlsMaterial, device: str = ""
) -> StartShards:
    """The shard process of a device, '' for the only one, listening at `address`."""
    paths = StatePaths(config.state_dir)
    return StartShards(
        hello=_hello(config, key),
        tls=tls,
        listen_host=address,
        interfaces=tuple(config.interface),
        device=device or config.device,
        threads=_threads(config),
        threads_dir=paths.threads_dir,
        harvest_dir=paths.harvest_dir,
        harvest_mb=config.distributed.host.harvest_mb,
        session_lease_s=config.distributed.host.session_lease_seconds,
        caps=memory_caps(config),
        nice=config.distributed.host.nice,
    )


def memory_caps(config: Config) -> MemoryCaps | None:
    """What the owner gives to models and caches; None where nothing limits them."""
    host = config.distributed.host
    if not host.max_memory and not host.max_card_memory:
        return None
    directory = StatePaths(config.state_dir).memory_dir
    return MemoryCaps(directory, host.max_memory, host.max_card_memory)


def free_mb(config: Config) -> int:
    """What of main memory may be used while no process of this node says it; blocks a moment."""
    main = ram()
    limit_mb = memory_limit_mb(config.distributed.host.max_memory, main.total_mb)
    return main.free_mb if limit_mb is None else min(main.free_mb, limit_mb)


def measure(config: Config, device: str) -> Measure:
    """What a device of this machine is to be measured with: what its shards would compute with."""
    threads_dir = StatePaths(config.state_dir).threads_dir
    return Measure(device, _threads(config), threads_dir, dtype=config.dtype)


def blocking_looks(
    config: Config,
) -> tuple[Callable[[], int], Callable[[str, int], CappedMemory | None]]:
    """What tells how many bytes weights may still take where they are fetched to, and what of a
    device's memory its owner gives to models, as `OwnHooks` has them."""
    caps = memory_caps(config)

    def cap(device: str, total_mb: int) -> CappedMemory | None:
        budget = caps.budget(device, total_mb) if caps is not None else None
        return budget.standing() if budget is not None else None

    return partial(free_bytes, config.models_dir or models_dir()), cap


def shard(config: Config, model: LocalModel, layers: LayerRange) -> ShardRequest:
    """What the shard process is told to load."""
    limits = config.distributed.host
    return ShardRequest(
        Path(model.directory),
        model.model_id,
        layers,
        config.dtype,
        model.quant or config.quant,
        ShardSettings(
            max_concurrent_streams=limits.max_concurrent_streams,
            kv_tokens=limits.kv_tokens,
            batch_invariant=limits.batch_invariant,
            eviction_idle_s=limits.shard_eviction_idle_seconds,
            session_lease_s=limits.session_lease_seconds,
        ),
        cache_dir(),
        max_tap_sessions=limits.max_tap_sessions,
        tap_memory_mb=limits.tap_memory_mb,
        own_quant=config.quant,
    )


def start_asker(config: Config, key: NodeKey, model: LocalModel, tls: TlsMaterial) -> StartAsker:
    """One model's asker process."""
    distributed = config.distributed
    settings = EngineSettings(
        route_limits(config),
        stall_limit_s=distributed.shard_health_timeout_seconds,
        activation_dtype=distributed.activation_dtype,
        cache_dir=str(cache_dir()),
        fallback_to_local=distributed.fallback_to_local,
        fallback_after=distributed.fallback_to_local_after_failures,
        spot_check_probability=distributed.spot_check_probability,
        activation_noise=config.routing.activation_noise,
        load_limit_s=distributed.shard_load_timeout_seconds,
        queue_limit_s=distributed.queue_seconds,
        queue_places=distributed.max_queued,
        draft_tokens=distributed.draft_tokens,
    )
    options = AskerOptions(
        config.dtype,
        named_devices(config.device)[0],
        _threads(config),
        cache_dir(),
        StatePaths(config.state_dir).threads_dir,
        config.quant,
        local_directory(distributed.draft_model) if distributed.draft_model else None,
        distributed.thin,
        memory_caps(config),
        model.quant,
    )
    return StartAsker(
        Path(model.directory),
        model.model_id,
        options,
        settings,
        hello=_hello(config, key),
        tls=tls,
        nice=distributed.host.nice,
    )


def start_jobs(config: Config, key: NodeKey, tls: TlsMaterial) -> StartJobs:
    """The process of the jobs."""
    jobs = config.jobs
    limits = JobLimits(
        wall_s=jobs.wall_seconds,
        cpu_s=jobs.cpu_seconds,
        memory_bytes=jobs.memory_mb << 20,
        result_bytes=jobs.result_mb << 20,
    )
    settings = RunnerSettings(jobs.max_running, jobs.idle_seconds, cache_dir(), limits)
    nice, hello = config.distributed.host.nice, _hello(config, key)
    return StartJobs(route_limits(config), settings, hello=hello, tls=tls, nice=nice)


def start_fetcher(
    config: Config, key: NodeKey, models: Sequence[LocalModel], address: str, tls: TlsMaterial
) -> StartFetcher:
    """The process that moves weights, listening at `address`."""
    return StartFetcher(
        hello=Hello(key.node_id, config.name, "weights", SOFTWARE),
        tls=tls,
        listen_host=address,
        models=tuple(LocalCheckpoint(model.model_id, Path(model.directory)) for model in models),
        models_dir=config.models_dir or models_dir(),
        cache_dir=cache_dir(),
        interfaces=tuple(config.interface),
        bytes_per_s=config.distributed.host.transfer_mb_per_second * 1e6,
        nice=max(NICE, config.distributed.host.nice),
    )


def entrance(config: Config) -> Entrance:
    """How many generations of this node run at a time, and how long others wait."""
    limits = config.distributed
    return Entrance(limits.max_concurrent_pipelines, limits.queue_seconds, limits.max_queued)


def route_limits(config: Config) -> RouteLimits:
    """The limits of the routes of this node's own requests."""
    distributed, routing = config.distributed, config.routing
    return RouteLimits(
        distributed.max_shards_per_request,
        distributed.allow_self_as_shard,
        routing.keep_first,
        routing.keep_last,
        routing.mix_formats,
        routing.policy,
    )


def _hello(config: Config, key: NodeKey) -> Hello:
    return Hello(key.node_id, config.name, "tensors", SOFTWARE)


def _threads(config: Config) -> int:
    return 0 if config.threads == "auto" else config.threads
