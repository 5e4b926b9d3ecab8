"""What Prometheus reads. Those of `distributed_inference_` carry the mesh specification's names
(section 5.10); all others are `hearthnet_` and in seconds, bytes or counts.

Labels are shard ids, names of nodes and a few fixed words, so that their number stays small. The
reference page is written from `SERIES`.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mesh.health.series import PRESENT, SERIES, HopSteps, Series
from mesh.types import (
    Done,
    PipelineAborted,
    ShardFailover,
    StreamFrame,
    TokenDelta,
)


@dataclass(frozen=True, slots=True)
class PeerNow:
    """A peer at the moment of a scrape; `rtt_s` is None where it was not measured."""

    name: str
    short_id: str
    is_up: bool
    rtt_s: float | None


@dataclass(frozen=True, slots=True)
class NodeNow:
    """What is there at the moment of a scrape: peers, generations by state, and what the caches of
    this node's shards hold, in bytes and positions, by state."""

    peers: Sequence[PeerNow] = ()
    generations: tuple[tuple[str, int], ...] = (("running", 0), ("waiting", 0))
    kv_bytes: tuple[tuple[str, float], ...] = (("active", 0), ("parked", 0))
    kv_positions: tuple[tuple[str, int], ...] = (("used", 0), ("free", 0))


class Metrics:
    """All series of one node, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        made = {each.name: _made(each, self._registry) for each in SERIES}
        self._made: dict[str, Any] = made
        self.jobs = JobSeries(made)
        self.generations = GenerationSeries(made)

    def frame(self, frame: StreamFrame) -> None:
        """Count one frame of a generation."""
        made = self._made
        match frame:
            case TokenDelta():
                made["hearthnet_tokens"].inc(len(frame.token_ids))
            case ShardFailover():
                made["distributed_inference_failovers"].inc()
                made["hearthnet_replays"].labels(reason=frame.reason).inc()
            case PipelineAborted():
                made["hearthnet_pipelines_aborted"].inc()
            case Done():
                self._done(frame)

    def steps(self, answered: HopSteps) -> None:
        """Steps that a shard has answered."""
        shard_id, peer = answered.shard_id, answered.node
        latency = self._made["distributed_inference_shard_latency_ms"].labels(shard_id=shard_id)
        seconds = self._made["hearthnet_hop_seconds"]
        phases = [seconds.labels(peer=peer, phase=each) for each in ("compute", "queue", "link")]
        for total_ms, compute_ms, queue_ms in answered.steps:
            latency.observe(total_ms)
            link_ms = max(0.0, total_ms - compute_ms - queue_ms)
            for phase, took_ms in zip(phases, (compute_ms, queue_ms, link_ms), strict=True):
                phase.observe(took_ms / 1e3)

    def corruption(self) -> None:
        """A hop's answer was refused."""
        self._made["distributed_inference_shard_corruption_detected"].inc()

    def render(self, present: NodeNow = NodeNow()) -> bytes:
        """The text exposition format."""
        self._made["hearthnet_peers_up"].set(sum(peer.is_up for peer in present.peers))
        now = CollectorRegistry()
        now.register(_PresentSeries(present))
        return generate_latest(self._registry) + generate_latest(now)

    def _done(self, done: Done) -> None:
        made, kinds = self._made, self._made["hearthnet_tokens_by_kind"]
        made["distributed_inference_pipeline_construct_ms"].observe(done.construct_ms)
        if done.completion_tokens:
            made["distributed_inference_first_token_ms"].observe(done.first_token_ms)
            made["hearthnet_ttft_seconds"].observe(done.first_token_ms / 1e3)
        if done.tokens_per_second:
            made["distributed_inference_tokens_per_second"].observe(done.tokens_per_second)
        if done.fallback:
            made["distributed_inference_fallback_to_local"].inc()
        made["hearthnet_tensors_widened"].inc(done.widened)
        counted = {
            "prompt": done.prompt_tokens - done.cached_tokens,
            "cached": done.cached_tokens,
            "generated": done.completion_tokens,
            "drafted": done.drafted_tokens,
            "accepted": done.accepted_tokens,
        }
        for kind, count in counted.items():
            kinds.labels(kind=kind).inc(count)


class GenerationSeries:
    """What becomes of generations, and how their tokens follow each other."""

    def __init__(self, made: dict[str, Any]) -> None:
        """`made` are all series of the node, by their names; it uses its own."""
        self._gaps: Histogram = made["hearthnet_inter_token_seconds"]
        self._ended: Counter = made["hearthnet_generations_ended"]

    def gap(self, seconds: float) -> None:
        """A token came so long after the one before it."""
        self._gaps.observe(seconds)

    def end(self, outcome: str) -> None:
        """One ended: ``stop``, ``length``, ``error`` or ``cancelled``."""
        self._ended.labels(outcome=outcome).inc()


class JobSeries:
    """What becomes of nnsight clients' jobs."""

    def __init__(self, made: dict[str, Any]) -> None:
        """`made` are all series of the node, by their names; it uses its own."""
        self._ended: Counter = made["hearthnet_jobs"]
        self._seconds: Histogram = made["hearthnet_job_seconds"]
        self._running: Gauge = made["hearthnet_jobs_running"]
        self._waiting: Gauge = made["hearthnet_jobs_waiting"]

    def end(self, status: str, wall_s: float) -> None:
        """A job ended as COMPLETED or ERROR, `wall_s` after it was begun; 0 if it never was."""
        self._ended.labels(status=status).inc()
        if wall_s:
            self._seconds.observe(wall_s)

    def watch(self, counts: Callable[[], tuple[int, int]]) -> None:
        """`counts` says how many jobs run and how many wait."""
        self._running.set_function(lambda: counts()[0])
        self._waiting.set_function(lambda: counts()[1])


class _PresentSeries(Collector):
    """One scrape's gauges: a peer that is not known any more has no series."""

    def __init__(self, present: NodeNow) -> None:
        self._present = present

    def collect(self) -> Iterator[Metric]:
        present = self._present
        peers = _labelled(present.peers)
        values: dict[str, Iterable[tuple[str, float]]] = {
            "hearthnet_peer_up": [(label, float(peer.is_up)) for label, peer in peers],
            "hearthnet_link_rtt_seconds": [
                (label, peer.rtt_s) for label, peer in peers if peer.rtt_s is not None
            ],
            "hearthnet_generations": present.generations,
            "hearthnet_kv_bytes": present.kv_bytes,
            "hearthnet_kv_positions": present.kv_positions,
        }
        for each in PRESENT:
            family = GaugeMetricFamily(each.name, each.help, labels=each.labels)
            for label, value in values[each.name]:
                family.add_metric([label], value)
            yield family


def _labelled(peers: Sequence[PeerNow]) -> list[tuple[str, PeerNow]]:
    """Each under its name, and where several have one with what tells them apart; a series may be
    there once only."""
    names = Tally(peer.name for peer in peers)
    found = {
        peer.name if names[peer.name] == 1 else f"{peer.name} {peer.short_id}": peer
        for peer in peers
    }
    return list(found.items())


def _made(series: Series, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    name, said, labels = series.name, series.help, series.labels
    if series.kind == "histogram":
        return Histogram(name, said, labels, registry=registry, buckets=series.buckets)
    kind = Counter if series.kind == "counter" else Gauge
    return kind(name, said, labels, registry=registry)
