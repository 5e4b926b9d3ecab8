"""What the process of a model's asker is told, what it answers and what it says (see
`mesh.processes.messages`).

Plain data: the daemon, which reads and writes these, loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from mesh.discovery.advertisement import Advertisement
from mesh.health.detector import Verdict
from mesh.health.series import HopSteps
from mesh.models.cuts import Cuts
from mesh.models.harvest import HarvestBatch
from mesh.pipeline.drafting import MAX_DRAFT
from mesh.processes.memory_budget import MemoryCaps
from mesh.processes.messages import ProcessMessage, Request, Start
from mesh.routing.cover import LAN_HOP_WEIGHT, Candidate, CoverRules, Policy, home_layers
from mesh.types import (
    Done,
    GenerationRequest,
    LayerRange,
    ModelId,
    NodeId,
    PipelineAborted,
    PromptPiece,
    Queued,
    RouteHop,
    ShardFailover,
    ShardId,
    ShardStatus,
    StreamFrame,
    TokenDelta,
)


@dataclass(frozen=True, slots=True)
class Offer:
    """A shard that this node may route to: what its host says of it, what the failure detector
    thinks of that node, and how far the way there is (`mesh.discovery.distance`), also in
    milliseconds where that was measured."""

    shard: Advertisement
    verdict: Verdict = Verdict.HEALTHY
    hop_weight: float = LAN_HOP_WEIGHT
    rtt_ms: float | None = None

    @property
    def layer_ms(self) -> float | None:
        """What a layer of a step took there lately; None where there was none."""
        took = self.shard.health.p50_latency_ms / len(self.shard.descriptor.layers)
        return took if took > 0 else None

    def candidate(self, own: NodeId) -> Candidate:
        """The shard as the router of the node `own` counts with it before it knows any more."""
        shard, health = self.shard.descriptor, self.shard.health
        is_self = shard.host == own
        return Candidate(
            shard, health.queue_depth, self.hop_weight, is_self,
            penalty=2 * (self.verdict is Verdict.SUSPECT), layer_ms=self.layer_ms,
            rtt_ms=0.0 if is_self else self.rtt_ms,
        )  # fmt: skip


class Layered(Protocol):
    """What is to be known of a model."""

    @property
    def total_layers(self) -> int:
        """How many decoder layers it has."""

    @property
    def cuts(self) -> Cuts:
        """Where it may be parted."""


@dataclass(frozen=True, slots=True)
class RouteLimits:
    """What the configuration says of the routes of this node's own requests."""

    max_shards: int
    allow_self_as_first: bool
    keep_first: int = 0
    keep_last: int = 0
    mix_formats: bool = False
    policy: Policy = "auto"

    def cover_rules(self, model: Layered, *, remote_ends: bool = False) -> CoverRules:
        """The rules for a route through a model of so many layers."""
        home = home_layers(model.total_layers, self.keep_first, self.keep_last, model.cuts)
        return CoverRules(
            self.max_shards,
            self.allow_self_as_first,
            home,
            mix_formats=self.mix_formats,
            policy=self.policy,
            remote_ends=remote_ends,
        )


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the daemon's configuration says about asking.

    With an empty `cache_dir` nothing is learnt about the model beforehand, nor kept.
    """

    routes: RouteLimits
    stall_limit_s: float
    activation_dtype: str
    cache_dir: str
    fallback_to_local: bool
    fallback_after: int
    spot_check_probability: float = 0.0
    activation_noise: float = 0.0
    load_limit_s: float = 300.0
    queue_limit_s: float = 20.0
    queue_places: int = 16
    draft_tokens: int = MAX_DRAFT


Thin = Literal["auto", "never", "always"]


@dataclass(frozen=True, slots=True)
class AskerOptions:
    """Where an asker computes: the configuration's values, ``auto`` included; 0 threads is auto.

    `draft_model` is the directory of a smaller model that guesses for it, if there is one. `thin`:
    whether to leave embedding and head to hops; ``auto`` where they are not on this disk. What is
    loaded stays within `caps`. `deployed_quant` is the format that the model's deployment says, ''
    for none: its head is in that one, where the device has kernels for it.
    """

    dtype: str
    device: str
    threads: int
    cache_dir: Path
    threads_dir: Path | None = None
    quant: str = "none"
    draft_model: Path | None = None
    thin: Thin = "auto"
    caps: MemoryCaps | None = None
    deployed_quant: str = ""


@dataclass(frozen=True, slots=True)
class HarvestOrder:
    """One batch as it is asked for, its rows not counted yet; `texts` are cut to `max_tokens`
    tokens each."""

    batch: HarvestBatch
    texts: tuple[str, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class LiveHop:
    """One hop of a running generation, with the times of its steps in milliseconds.

    `compute_p50_ms` is what of the median it computes; the rest is the way there and back.
    """

    shard_id: ShardId
    node: str
    host: NodeId
    layers: LayerRange
    p50_ms: float
    p95_ms: float
    compute_p50_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class LiveGeneration:
    """A running generation with its current route; `id` is one that everybody may see.

    `queued` is its place in line while it waits for room, without a route.
    """

    id: str
    model: ModelId
    route: tuple[LiveHop, ...]
    failovers: int
    queued: int = 0


@dataclass(frozen=True, slots=True)
class AskerReady:
    """The ends are loaded; `reasons` say how their device and format were chosen. `is_thin`: there
    are none here, hops run them. `abilities` as `AskerModel` of
    `mesh.pipeline.model` has them."""

    reasons: tuple[str, ...] = ()
    is_thin: bool = False
    abilities: tuple[str, ...] = ()


# Commands


class StartAsker(Start[AskerReady], frozen=True):
    """Load the ends of the model in `directory`; route to `shards` until there are other
    `RoutableShards`."""

    directory: Path
    model_id: ModelId
    options: AskerOptions
    settings: EngineSettings
    shards: tuple[Offer, ...] = ()


class RoutableShards(ProcessMessage, frozen=True):
    """Who may be routed to now, all of them."""

    shards: tuple[Offer, ...]


class Generate(Request[None], frozen=True):
    """Run a generation; its `GenerationFrame`s come before the answer and carry the id that the
    request has."""

    request: GenerationRequest


class Harvest(Request[dict[str, Any]], frozen=True):
    """Run a batch of a harvest; answered as the HTTP API gives it."""

    order: HarvestOrder


class ReadLens(Request[dict[str, Any]], frozen=True):
    """Read each layer's `top` next tokens; answered as the HTTP API gives it."""

    request: GenerationRequest
    top: int


class CountTokens(Request[int], frozen=True):
    """Count the tokens of the request's prompt."""

    request: GenerationRequest


class Credit(ProcessMessage, frozen=True):
    """So many frames more of a generation may be sent."""

    id: str
    frames: int


# What it says, and what it asks


class GenerationFrame(ProcessMessage, frozen=True):
    """A frame of a generation's stream: the one field beside the id, named as the frame's type."""

    id: str
    token_delta: TokenDelta | None = None
    prompt_piece: PromptPiece | None = None
    queued: Queued | None = None
    shard_status: ShardStatus | None = None
    shard_failover: ShardFailover | None = None
    pipeline_aborted: PipelineAborted | None = None
    done: Done | None = None

    @classmethod
    def of(cls, request_id: str, frame: StreamFrame) -> Self:
        """This frame of this generation."""
        fields: dict[str, Any] = {frame.type: frame}
        return cls(request_id, **fields)

    @property
    def frame(self) -> StreamFrame | None:
        """The frame; None when the process left it out."""
        return (
            self.token_delta
            or self.prompt_piece
            or self.queued
            or self.shard_status
            or self.shard_failover
            or self.pipeline_aborted
            or self.done
        )


class LoadLocally(Request[tuple[RouteHop, ...]], frozen=True):
    """Have the daemon load these layers on this machine, None: all; hops over them."""

    layers: LayerRange | None


class AskerReport(ProcessMessage, frozen=True):
    """What the asker does, whenever that has changed.

    `steps` are those that hops answered, and `events` what people should know, each with a
    ``type``: both since the last report. `standings` and `accounts` are rows for the status.
    """

    generations: tuple[LiveGeneration, ...] = ()
    standings: list[dict[str, Any]] = []  # noqa: RUF012 - msgspec copies it
    accounts: dict[str, Any] = {}  # noqa: RUF012
    steps: list[HopSteps] = []  # noqa: RUF012
    events: list[dict[str, Any]] = []  # noqa: RUF012
