"""What Prometheus reads. The first six carry the mesh specification's names (section 5.10).

Labels are shard ids and node names only, so that their number stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from mesh.types import Done, PipelineAborted, ShardFailover, ShardId, StreamFrame, TokenDelta

_MS_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000)
_STEP_BUCKETS = (0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 200, 500, 1000, 5000)
_RATE_BUCKETS = (0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_PREFIX = "distributed_inference_"


class Metrics:
    """All series of one node, in a registry of their own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._construct = Histogram(
            _PREFIX + "pipeline_construct_ms",
            "Time to pick a route and open its hops.",
            buckets=_MS_BUCKETS,
            registry=registry,
        )
        self._first_token = Histogram(
            _PREFIX + "first_token_ms",
            "From the request to its first token.",
            buckets=_MS_BUCKETS,
            registry=registry,
        )
        self._rate = Histogram(
            _PREFIX + "tokens_per_second",
            "Decode rate of one generation, after its first token.",
            buckets=_RATE_BUCKETS,
            registry=registry,
        )
        self._shard_latency = Histogram(
            _PREFIX + "shard_latency_ms",
            "From sending a step to having its result, per shard.",
            ["shard_id"],
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self._failovers = Counter(
            _PREFIX + "failovers", "Hops replaced during a generation.", registry=registry
        )
        self._fallbacks = Counter(
            _PREFIX + "fallback_to_local",
            "Generations that went on at home after the mesh failed them.",
            registry=registry,
        )
        self._corrupt = Counter(
            _PREFIX + "shard_corruption_detected",
            "Answers refused: NaN, Inf, an absurd norm or shape, or a lie that was found out.",
            registry=registry,
        )
        self._tokens = Counter("hearthnet_tokens", "Tokens generated.", registry=registry)
        self._aborted = Counter(
            "hearthnet_pipelines_aborted", "Pipelines nobody could repair.", registry=registry
        )
        self._widened = Counter(
            "hearthnet_tensors_widened", "Tensors too large for the wire dtype.", registry=registry
        )
        self._peers = Gauge("hearthnet_peers_up", "Peers with a live link.", registry=registry)
        self.jobs = JobSeries(registry)

    def frame(self, frame: StreamFrame) -> None:
        """Count one frame of a generation."""
        match frame:
            case TokenDelta():
                self._tokens.inc(len(frame.token_ids))
            case ShardFailover():
                self._failovers.inc()
            case PipelineAborted():
                self._aborted.inc()
            case Done():
                self._construct.observe(frame.construct_ms)
                self._first_token.observe(frame.first_token_ms)
                self._widened.inc(frame.widened)
                if frame.tokens_per_second:
                    self._rate.observe(frame.tokens_per_second)
                if frame.fallback:
                    self._fallbacks.inc()

    def latencies(self, shards: Mapping[ShardId, list[float]]) -> None:
        """Steps' milliseconds per shard id."""
        for shard_id, values in shards.items():
            series = self._shard_latency.labels(shard_id=shard_id)
            for value in values:
                series.observe(value)

    def corruption(self) -> None:
        """A hop's answer was refused."""
        self._corrupt.inc()

    def peers(self, up: int) -> None:
        """How many peers are linked now."""
        self._peers.set(up)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)


class JobSeries:
    """What becomes of nnsight clients' jobs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ended = Counter(
            "hearthnet_jobs", "Jobs of nnsight clients that ended.", ["status"], registry=registry
        )
        self._seconds = Histogram(
            "hearthnet_job_seconds", "From a job's begin to its end.", registry=registry
        )
        self._running = Gauge("hearthnet_jobs_running", "Jobs that run.", registry=registry)
        self._waiting = Gauge("hearthnet_jobs_waiting", "Jobs that wait.", registry=registry)

    def end(self, status: str, wall_s: float) -> None:
        """A job ended as COMPLETED or ERROR, `wall_s` after it was begun; 0 if it never was."""
        self._ended.labels(status=status).inc()
        if wall_s:
            self._seconds.observe(wall_s)

    def watch(self, counts: Callable[[], tuple[int, int]]) -> None:
        """`counts` says how many jobs run and how many wait."""
        self._running.set_function(lambda: counts()[0])
        self._waiting.set_function(lambda: counts()[1])
