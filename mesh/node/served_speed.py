"""What serving and asking take, against what was measured beforehand: the truth of now corrects it.

Fed with what shards say of their latest steps and with answers that have ended; starts nothing and
reads no clock. Each kind of figure follows slowly, so that one odd minute changes little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median
from typing import TypeVar

from mesh.capacity import Device, Speed
from mesh.discovery.advertisement import Advertisement
from mesh.types import Done, ModelId, NodeId, ShardId

K = TypeVar("K")

CONTRADICTION = 1.5
"""By such a factor serving may differ from what was measured, before that is measured again."""

_GAIN = 0.1
_ENOUGH = 20
"""Looks with new steps before a factor says that the measurement was wrong."""

_MOST = 4.0
"""A larger factor is no speed, but something else that is wrong there."""

_ANSWERS = 8
_LEAST_TOKENS = 8
_KEYS = 64


@dataclass(slots=True)
class _Factor:
    """By what the layers of one format take longer than foretold; a running geometric mean."""

    log: float = 0.0
    looks: int = 0

    def take(self, ratio: float) -> None:
        self.looks += 1
        gain = max(_GAIN, 1 / self.looks)
        self.log += gain * (log(min(_MOST, max(1 / _MOST, ratio))) - self.log)


class ServedSpeed:
    """This node's own device, corrected by what its shards take."""

    def __init__(self) -> None:
        self._factors: dict[str, _Factor] = {}
        self._seen: dict[ShardId, tuple[float, float]] = {}

    def look(self, device: Device, shards: Iterable[Advertisement]) -> None:
        """Learn from shards that have taken steps since the last look, of one stream at most:
        several share a visit."""
        seen: dict[ShardId, tuple[float, float]] = {}
        for each in shards:
            shard, health = each.descriptor, each.health
            signs = seen[shard.shard_id] = health.p50_latency_ms, health.p95_latency_ms
            speed, memory = device.speed(shard.format), health.memory
            before = self._seen.get(shard.shard_id)
            if before in (None, signs) or health.active_streams > 1 or health.p50_latency_ms <= 0:
                continue
            if speed is None or memory is None or not memory.weights_mb:
                continue
            reading_ms = (memory.weights_mb << 20) / speed.decode_gb_s / 1e6
            foretold_ms = len(shard.layers) * speed.layer_ms + reading_ms
            took_ms = health.p50_latency_ms - device.visit_ms
            self._factors.setdefault(shard.format, _Factor()).take(took_ms / foretold_ms)
        self._seen = seen

    def corrected(self, device: Device) -> Device:
        """The device as it serves."""
        return replace(device, speeds=tuple(self._corrected(speed) for speed in device.speeds))

    @property
    def contradicts(self) -> bool:
        """Whether the shards have long taken clearly more or less than was measured."""
        known = [each for each in self._factors.values() if each.looks >= _ENOUGH]
        return any(abs(each.log) > log(CONTRADICTION) for each in known)

    def forget(self) -> None:
        """The device was measured again."""
        self._factors.clear()

    def _corrected(self, speed: Speed) -> Speed:
        factor = self._factors.get(speed.format)
        if factor is None:
            return speed
        by = exp(factor.log)
        return replace(
            speed, decode_gb_s=speed.decode_gb_s / by, layer_ms=min(1e9, speed.layer_ms * by)
        )


class AskedTimes:
    """What answers took at this node's askers besides computing: by model what a token cost here,
    head, sampling and sending; by node what the way there and back cost a step, and its rate."""

    def __init__(self) -> None:
        self._own: dict[ModelId, deque[float]] = {}
        self._ways: dict[NodeId, deque[float]] = {}
        self._rates: dict[NodeId, deque[float]] = {}

    def take(self, done: Done) -> None:
        """Learn from an answer that came token by token over one route."""
        guessed = done.drafted_tokens or done.failovers or done.fallback
        if guessed or not done.route or done.completion_tokens < _LEAST_TOKENS:
            return
        if done.tokens_per_second <= 0:
            return
        _keep(self._own, done.route[0].shard.model_id, done.asker_ms)
        for hop, took in zip(done.route, done.hops, strict=False):
            _keep(self._ways, hop.shard.host, took.p50_ms - took.compute_p50_ms)
            if took.mb_s > 0:
                _keep(self._rates, hop.shard.host, took.mb_s)

    def of(self, model: ModelId) -> float | None:
        """Milliseconds that a token of it costs at the asker, the median of the latest answers.
        None before the second."""
        return _usual(self._own.get(model))

    def way_ms(self, node: NodeId) -> float | None:
        """Milliseconds of a step's way to this node and back, likewise."""
        return _usual(self._ways.get(node))

    def mb_s(self, node: NodeId) -> float | None:
        """At what rate rows go to this node and come back, in MB/s, likewise."""
        return _usual(self._rates.get(node))


def _keep(kept: dict[K, deque[float]], key: K, figure: float) -> None:
    if key not in kept and len(kept) >= _KEYS:
        kept.pop(next(iter(kept)))
    kept.setdefault(key, deque(maxlen=_ANSWERS)).append(max(0.0, figure))


def _usual(known: deque[float] | None) -> float | None:
    return median(known) if known is not None and len(known) > 1 else None
