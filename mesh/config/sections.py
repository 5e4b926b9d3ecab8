"""The sections of a node's configuration: keys, defaults, bounds. `mesh.config` loads them.

Each field's docstring is its line in the reference. Nothing here reads a file or the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from mesh.capacity import named_devices
from mesh.units import memory_limit_mb


def _memory_limit(value: object) -> object:
    """A number is of GiB; raises ValueError for what is no limit."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = f"{value:g} GiB"
    if isinstance(value, str):
        memory_limit_mb(value, 1)
    return value


MemoryLimit = Annotated[str, BeforeValidator(_memory_limit)]
Devices = Annotated[str, AfterValidator(lambda text: ",".join(named_devices(text)))]
"""One or several, see `named_devices`."""


class HostSection(BaseModel):
    """``[research.distributed_inference.host]``: what this node does for others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    serve_shards: bool | None = None
    """Serve layers to other nodes. Unset: yes, unless `layers` is ``none``."""
    shard_eviction_idle_seconds: int = Field(default=600, ge=1)
    """Unload a shard that nobody used for this long; the next request loads it again."""
    shard_max_vram_mb: int = Field(default=20000, ge=1)
    """The most memory one shard may take for its weights, in MiB."""
    max_memory: MemoryLimit = ""
    """The most of this machine's memory that all models and their caches may take together, of all
    processes of this node: ``12 GiB``, ``512 MiB``, or a share of it, ``50 %``. What does not fit
    is not loaded, and others are told of no more. Empty: all that is free."""
    max_card_memory: MemoryLimit = ""
    """The same of the memory of the card that this node computes on, where it has its own."""
    nice: int = Field(default=0, ge=0, le=19)
    """The niceness of what computes here: layers, answers, jobs. 0: as other programs; 10: what a
    busy machine leaves over, about a tenth of a core that others want. An idle machine is as fast.
    """
    max_concurrent_streams: int = Field(default=8, ge=1, le=1024)
    """Sessions a shard serves at the same time; further ones are refused, and wait at the asker."""
    drain_seconds: float = Field(default=30, ge=0, le=3600)
    """How long a node that is stopped waits for running answers to end or move elsewhere."""
    session_lease_seconds: float = Field(default=60, ge=5, le=3600)
    """A session that is open without a step for so long is closed. Askers give the streams of
    answers that nobody reads back earlier, and take them again."""
    kv_tokens: int = Field(default=16384, ge=16)
    """Positions that all sessions of a shard may hold in its cache together."""
    transfer_mb_per_second: float = Field(default=0, ge=0, le=100_000)
    """How fast weights may go to other nodes and come from them, in MB per second; 0: as fast as
    they can, while what computes goes first."""
    harvest_mb: int = Field(default=0, ge=0)
    """Disk that other members' harvests (activations, written to files) may take here, in MB; 0:
    none are written. This node's own need no leave."""
    max_tap_sessions: int = Field(default=4, ge=0, le=64)
    """Jobs (nnsight traces) that a shard serves at the same time, beside its streams; 0: none."""
    tap_memory_mb: int = Field(default=4096, ge=16)
    """Activations and graphs that one job may keep on a shard, in MiB."""
    batch_invariant: bool = False
    """Compute every row alone, so that a step's result does not depend on what else the shard
    computes at that moment; several answers at once then share no pass over the weights."""


class DistributedInferenceSection(BaseModel):
    """``[research.distributed_inference]``: how this node asks others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool | None = None
    """Use other nodes' layers and offer one's own. Unset: on once the node belongs to a hearth
    (`hearthnet up` founds one). ``false``: answer from local models only, refuse the rest with
    experimental_disabled."""
    backend: Literal["small_model_layered"] = "small_model_layered"
    """How layers are run; there is one way."""
    max_shards_per_request: int = Field(default=16, ge=1, le=1024)
    """The most hops one route may have."""
    shard_health_timeout_seconds: float = Field(default=30, gt=0, le=3600)
    """A shard that was silent for this long counts as lost."""
    shard_load_timeout_seconds: float = Field(default=300, gt=0, le=3600)
    """How long a shard is waited for that says it is loading its weights."""
    fallback_to_local: bool = True
    """Answer from a local model when the mesh cannot and the model fits here."""
    spot_check_probability: float = Field(default=0.01, ge=0, le=1)
    """How often a step of another node's shard is checked against a third machine; 0: never."""
    spot_check_home_mb: int = Field(default=256, ge=0)
    """A node that holds layers checks others alone, by copies of up to so many MiB of weights in
    all, where there is no third machine; 0: never."""
    fallback_to_local_after_failures: int = Field(default=2, ge=1, le=16)
    """The how-manieth lost hop of one answer sends the rest of it to the local model."""
    activation_dtype: Literal["fp16", "bf16", "fp32"] = "fp16"
    """How activations are written between nodes, where the model tolerates it."""
    draft_tokens: int = Field(default=15, ge=0, le=15)
    """The most tokens of an answer that are guessed from what the text said before and computed
    together with the last one, where that pays; the answer is the same. 0: none."""
    draft_model: str = ""
    """A directory with a smaller model of the same tokens, or `builtin`, that guesses along at this
    node where that pays; the answer is the same. Empty: none."""
    thin: Literal["auto", "never", "always"] = "auto"
    """Whether a model's embedding and head are left to the nodes with its first and last layers,
    which then see the prompt and the answer as text. ``auto``: where they are not on this disk;
    deployments fetch them. ``never``: they have to be; ``always``: also where they are, and no
    deployment fetches them but with the first or last layers. See docs/explanation/privacy.md."""
    allow_self_as_shard: bool = False
    """Prefer this node's own layers like anybody else's, instead of other nodes first."""
    max_concurrent_pipelines: int = Field(default=8, ge=1, le=1024)
    """Generations this node runs at the same time, those that wait for a shard included; further
    ones wait as well."""
    queue_seconds: float = Field(default=60, ge=0, le=600)
    """How long a generation waits for room, here or where every shard is full, before the model is
    run on this machine alone or it is refused; 0: not at all."""
    max_queued: int = Field(default=256, ge=1, le=1024)
    """Generations that may wait for room, here and in front of one model's shards, half of them for
    one key or user; further ones are refused with `busy` at once."""
    host: HostSection = HostSection()
    """What this node does for others."""


class ResearchSection(BaseModel):
    """``[research]``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    distributed_inference: DistributedInferenceSection = DistributedInferenceSection()
    """How this node asks others."""


class ResearchPolicySection(BaseModel):
    """``[policy.research]``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable: bool | None = None
    """Allow research modules, distributed inference among them. Unset: on once the node belongs to
    a hearth. ``false``: off, whatever `research` says; nothing is advertised."""


class PolicySection(BaseModel):
    """``[policy]``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    research: ResearchPolicySection = ResearchPolicySection()
    """What experiments this node takes part in."""


class RoutingSection(BaseModel):
    """``[routing]``: what of this node's own prompts other machines may see."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keep_first: int = Field(default=0, ge=0, le=10_000)
    """How many of a model's first layers must run on this machine, which loads them for itself."""
    keep_last: int = Field(default=0, ge=0, le=10_000)
    """How many of a model's last layers must run on this machine, which loads them for itself."""
    activation_noise: float = Field(default=0, ge=0, le=1)
    """Noise on what goes into the first layer, as its standard deviation relative to the root mean
    square of each row; 0: none. See docs/explanation/privacy.md before relying on it."""
    mix_formats: bool = False
    """Whether one route may lead through shards of different `quant`."""
    policy: Literal["auto", "greedy", "cheapest"] = "auto"
    """How shards are chosen. ``greedy``: the shortest queue, then the longest shard. ``cheapest``:
    the least time by what shards and links were measured to take, where all were. ``auto``: greedy,
    unless another route takes clearly less."""


class DeploymentsSection(BaseModel):
    """``[deployments]``: how this node follows what the hearth wishes to have loaded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    replan_seconds: float = Field(default=300, ge=1, le=86400 * 7)
    """How long a machine that holds layers of a deployment may be away before others take them."""
    patience_seconds: float = Field(default=300, ge=1, le=86400)
    """How long a chat waits for a deployed model that is coming up."""
    placement: Literal["auto", "even"] = "auto"
    """Where new replicas go: where what was measured says that they are fastest, or in even parts
    over all machines; even as long as nothing was measured."""


class JobQueueSection(BaseModel):
    """``[jobs.queue]``: the jobs that wait, and what they and their results may take."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_waiting: int = Field(default=512, ge=1, le=10_000)
    """Jobs of one model that this node holds; half of the places are for one key at most."""
    payload_mb: int = Field(default=64, ge=1, le=4096)
    """The largest job that is accepted, in MB."""
    disk_mb: int = Field(default=8192, ge=1)
    """What all jobs and results may take on this node's disk, in MB."""
    patience_seconds: float = Field(default=300, ge=0, le=86400)
    """How long a job waits for a model whose layers nobody serves, or nobody has room for."""


class JobsSection(BaseModel):
    """``[jobs]``: the code of nnsight clients that this node runs, each in a process of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_running: int = Field(default=2, ge=1, le=64)
    """Jobs this node runs at the same time; more of them wait."""
    wall_seconds: float = Field(default=600, gt=0, le=86400)
    """A job that takes longer is ended."""
    cpu_seconds: int = Field(default=300, ge=1, le=86400)
    """A job that computes for longer is ended; what hops compute for it does not count."""
    memory_mb: int = Field(default=2048, ge=64)
    """Memory a job may take beyond the model's ends, in MiB."""
    result_mb: int = Field(default=256, ge=1, le=16384)
    """The largest result of a job, in MB."""
    idle_seconds: float = Field(default=900, ge=1)
    """How long the process that a model's jobs start from is kept when there are none."""
    queue: JobQueueSection = JobQueueSection()
    """The jobs that wait."""


class CoordinationSection(BaseModel):
    """``[coordination]``: where it is kept who holds which model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: Literal["memory", "sqlite", "redis", "kubernetes", "redis-only", "kubernetes-only"] = (
        "sqlite"
    )
    """Where records are kept beside memory: nowhere, in a file of this node, in a Redis, or as
    Kubernetes resources; ``-only``: there, and not in memory. Also ``MX_METADATA_BACKEND``."""
    redis_url: str = Field(default="redis://127.0.0.1:6379/0", pattern=r"^(rediss?|unix)://\S+$")
    """The Redis, ``redis://[USER:PASSWORD@]HOST:PORT/DB`` or ``rediss://`` for TLS. Also
    ``MX_REDIS_HOST`` and ``MX_REDIS_PORT``."""
    namespace: str = Field(default="default", pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    """The Kubernetes namespace of the resources: small letters, digits, and ``-`` between them.
    Also ``MX_METADATA_NAMESPACE``."""
    kubeconfig: Path | None = None
    """The file that says where the Kubernetes API server is. Unset: the pod's service account, or
    the user's own file."""
    refresh_seconds: float = Field(default=15, ge=1, le=3600)
    """How often a store that others write to as well is read again, or watched anew."""
