"""Every series of `/metrics`, as data: its name, what it counts, its labels and buckets; and what
is reported of hops for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mesh.types import ShardId

_MS_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000)
_STEP_BUCKETS = (0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 200, 500, 1000, 5000)
_RATE_BUCKETS = (0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_JOB_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_FIRST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_HOP_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)


StepTimes = tuple[float, float, float]
"""Milliseconds of a step: from sending it to having its result; of these the hop's computing, and
its waiting there for others."""


@dataclass(frozen=True, slots=True)
class HopSteps:
    """Steps that a shard on the node of this name has answered."""

    shard_id: ShardId
    node: str
    steps: list[StepTimes]


@dataclass(frozen=True, slots=True)
class Series:
    """One of them. A counter's name is given without the ``_total`` that Prometheus reads."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def shown(self) -> str:
        """The name as it is in a query; a histogram's has ``_bucket``, ``_sum`` or ``_count``
        behind it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


SERIES = (
    Series(
        "distributed_inference_pipeline_construct_ms",
        "histogram",
        "Milliseconds to pick a route and open its hops.",
        buckets=_MS_BUCKETS,
    ),
    Series(
        "distributed_inference_first_token_ms",
        "histogram",
        "Milliseconds from the request to its first token.",
        buckets=_MS_BUCKETS,
    ),
    Series(
        "distributed_inference_tokens_per_second",
        "histogram",
        "Decode rate of one generation, after its first token.",
        buckets=_RATE_BUCKETS,
    ),
    Series(
        "distributed_inference_shard_latency_ms",
        "histogram",
        "Milliseconds from sending a step to having its result, per shard.",
        ("shard_id",),
        _STEP_BUCKETS,
    ),
    Series("distributed_inference_failovers", "counter", "Hops replaced during a generation."),
    Series(
        "distributed_inference_fallback_to_local",
        "counter",
        "Generations that went on at home after the mesh failed them.",
    ),
    Series(
        "distributed_inference_shard_corruption_detected",
        "counter",
        "Answers refused: NaN, Inf, an absurd norm or shape, or a lie that was found out.",
    ),
    Series("hearthnet_tokens", "counter", "Tokens generated."),
    Series("hearthnet_pipelines_aborted", "counter", "Pipelines nobody could repair."),
    Series("hearthnet_tensors_widened", "counter", "Tensors too large for the wire dtype."),
    Series("hearthnet_peers_up", "gauge", "Peers with a live link."),
    Series(
        "hearthnet_ttft_seconds",
        "histogram",
        "From a request to its first token, its wait for room on the hops included.",
        buckets=_FIRST_BUCKETS,
    ),
    Series(
        "hearthnet_inter_token_seconds",
        "histogram",
        "From one token of an answer to the next, as they pass the daemon; several tokens of one"
        " step follow each other at once.",
        buckets=_GAP_BUCKETS,
    ),
    Series(
        "hearthnet_hop_seconds",
        "histogram",
        "Steps of this node's requests by node and phase: compute there, queue (waiting there for"
        " others' steps), link (all the rest: the way there and back).",
        ("peer", "phase"),
        _HOP_BUCKETS,
    ),
    Series(
        "hearthnet_tokens_by_kind",
        "counter",
        "Tokens of ended generations: prompt (computed), cached (of a prompt, taken from a cache),"
        " generated, drafted (guessed) and accepted (of these, right).",
        ("kind",),
    ),
    Series(
        "hearthnet_generations_ended",
        "counter",
        "Generations by outcome: stop, length, tool_calls, error, or cancelled (the client left).",
        ("outcome",),
    ),
    Series(
        "hearthnet_replays",
        "counter",
        "Hops whose inputs were replayed into another one, by why they were left: degraded (lost,"
        " silent or wrong), full, or draining (about to stop).",
        ("reason",),
    ),
    Series(
        "hearthnet_jobs",
        "counter",
        "Jobs of nnsight clients that ended, by status: COMPLETED or ERROR.",
        ("status",),
    ),
    Series(
        "hearthnet_job_seconds",
        "histogram",
        "From a job's begin to its end.",
        buckets=_JOB_BUCKETS,
    ),
    Series("hearthnet_jobs_running", "gauge", "Jobs that run."),
    Series("hearthnet_jobs_waiting", "gauge", "Jobs that wait."),
)
"""What is counted as it happens."""

PRESENT = (
    Series(
        "hearthnet_peer_up",
        "gauge",
        "1 for a peer with a live link, else 0. Nodes of other hearths are none.",
        ("peer",),
    ),
    Series(
        "hearthnet_link_rtt_seconds", "gauge", "Round trip to a linked peer, lately.", ("peer",)
    ),
    Series(
        "hearthnet_generations",
        "gauge",
        "Generations of this node's callers: running, or waiting for a place.",
        ("state",),
    ),
    Series(
        "hearthnet_kv_bytes",
        "gauge",
        "What the caches of this node's shards take: active (of sessions that compute), or parked"
        " (kept for a follow-up).",
        ("state",),
    ),
    Series(
        "hearthnet_kv_positions",
        "gauge",
        "Cache positions of this node's shards: used (sessions have room for them), or free.",
        ("state",),
    ),
)
"""What is looked at when Prometheus asks."""
