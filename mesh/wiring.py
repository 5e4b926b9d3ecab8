"""What a node's processes are told at their start: configuration in, plain fields out.

Starts nothing and owns nothing; `mesh.node` does.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mesh import __version__
from mesh.config import Config
from mesh.identity.keys import NodeKey
from mesh.interventions.jobs.process import JobsSpec, limits_of
from mesh.models.local import LocalModel
from mesh.paths import StatePaths, cache_dir
from mesh.pipeline.asker import AskerSpec
from mesh.shard.hosting import HostSpec
from mesh.types import LayerRange
from mesh.wire.messages import Hello

SOFTWARE = f"hearthnet/{__version__}"


def host_spec(
    config: Config, key: NodeKey, models: list[LocalModel], address: str, tls: dict[str, Any]
) -> HostSpec:
    """The shard process: listening at `address`, serving what each model is to be served of."""
    start = {
        "tls": tls,
        "listen_host": address,
        "listen_port": 0,
        "interfaces": list(config.interface),
        "hello": {"node_id": key.node_id, "node_name": config.name, "software": SOFTWARE},
        "device": config.device,
        "threads": _threads(config),
        "threads_dir": str(StatePaths(config.state_dir).threads_dir),
        "cache_dir": str(cache_dir()),
        "harvest_dir": str(StatePaths(config.state_dir).harvest_dir),
        "harvest_mb": config.distributed.host.harvest_mb,
        "session_lease_s": config.distributed.host.session_lease_seconds,
    }
    return HostSpec(start, tuple(shard(config, m, m.layers) for m in models if m.layers))


def shard(config: Config, model: LocalModel, layers: LayerRange) -> dict[str, Any]:
    """What the shard process is told to load."""
    limits = config.distributed.host
    return {
        "directory": model.directory,
        "model_id": model.model_id,
        "layers": str(layers),
        "dtype": config.dtype,
        "max_concurrent_streams": limits.max_concurrent_streams,
        "kv_tokens": limits.kv_tokens,
        "eviction_idle_s": limits.shard_eviction_idle_seconds,
        "session_lease_s": limits.session_lease_seconds,
        "max_tap_sessions": limits.max_tap_sessions,
        "tap_memory_mb": limits.tap_memory_mb,
    }


def asker_spec(config: Config, key: NodeKey, model: LocalModel, tls: dict[str, Any]) -> AskerSpec:
    """One model's asker process."""
    distributed = config.distributed
    settings = {
        "max_shards": distributed.max_shards_per_request,
        "allow_self_as_first": distributed.allow_self_as_shard,
        "stall_limit_s": distributed.shard_health_timeout_seconds,
        "activation_dtype": distributed.activation_dtype,
        "cache_dir": str(cache_dir()),
        "fallback_to_local": distributed.fallback_to_local,
        "fallback_after": distributed.fallback_to_local_after_failures,
        "spot_check_probability": distributed.spot_check_probability,
        "keep_first": config.routing.keep_first,
        "keep_last": config.routing.keep_last,
        "activation_noise": config.routing.activation_noise,
        "load_limit_s": distributed.shard_load_timeout_seconds,
    }
    options = {
        "dtype": config.dtype,
        "device": config.device,
        "threads": _threads(config),
        "threads_dir": str(StatePaths(config.state_dir).threads_dir),
        "cache_dir": str(cache_dir()),
    }
    hello = _hello(config, key)
    wanted = {"directory": model.directory, "model_id": model.model_id}
    return AskerSpec(model.model_id, wanted, hello, options, settings, tls)


def jobs_spec(config: Config, key: NodeKey, tls: dict[str, Any]) -> JobsSpec:
    """The process of the jobs."""
    jobs = config.jobs
    settings = {
        "max_shards": config.distributed.max_shards_per_request,
        "allow_self_as_first": config.distributed.allow_self_as_shard,
        "keep_first": config.routing.keep_first,
        "keep_last": config.routing.keep_last,
        "max_running": jobs.max_running,
        "idle_s": jobs.idle_seconds,
        "cache_dir": str(cache_dir()),
        "limits": limits_of(
            wall_s=jobs.wall_seconds,
            cpu_s=jobs.cpu_seconds,
            memory_mb=jobs.memory_mb,
            result_mb=jobs.result_mb,
        ),
    }
    return JobsSpec(_hello(config, key), settings, tls)


def _hello(config: Config, key: NodeKey) -> dict[str, Any]:
    return asdict(Hello(key.node_id, config.name, "tensors", SOFTWARE))


def _threads(config: Config) -> int:
    return 0 if config.threads == "auto" else config.threads
