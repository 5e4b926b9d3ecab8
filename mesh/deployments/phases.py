"""How far each span of this node is, in words and bytes; the failures that are tried again later.

Told by whoever acts; forgets what nobody wishes for any more. Time is told to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from mesh.clock import backoff_s
from mesh.errors import DiskFull, MeshError, NotEnoughMemory
from mesh.types import ShardId

FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 300.0


class Phase(StrEnum):
    """Where a span is on its way."""

    QUEUED = "QUEUED"
    """It waits, for memory or for others that are fetched or loaded before it."""
    PROVISIONING = "PROVISIONING"
    """Its weights are being brought to this machine."""
    DEPLOYING = "DEPLOYING"
    """It is being loaded."""
    READY = "READY"
    FAILED = "FAILED"
    """It is tried again later."""
    AWAY = "AWAY"
    """Its machine is not there."""
    RESTING = "RESTING"
    """It is COLD: nothing of it is loaded until somebody who may asks."""
    LEAVING = "LEAVING"
    """Sessions move away, then its memory is given back."""


@dataclass(frozen=True, slots=True)
class PhaseProgress:
    """A span's phase. `done` of `total` bytes are there while it is provisioned, and more come at
    `bytes_per_s`; while it is deployed they count what it is at: reading, packing. `reason` says
    what it waits for or why it failed, with what to do about it; `error` is that where it failed.
    `lacks_memory`: its machine has no room for it, in memory or on its disk."""

    phase: Phase
    done: int = 0
    total: int = 0
    reason: str | None = None
    lacks_memory: bool = False
    bytes_per_s: float = 0.0
    error: MeshError | None = None

    @property
    def eta_s(self) -> float | None:
        """Seconds that the rest takes at that rate; None while nothing comes."""
        return (self.total - self.done) / self.bytes_per_s if self.bytes_per_s > 0 else None

    def row(self) -> dict[str, Any]:
        """For the status, JSON-able."""
        return {
            "phase": self.phase.value,
            "done_bytes": self.done,
            "total_bytes": self.total,
            "bytes_per_s": self.bytes_per_s,
            "eta_s": self.eta_s,
            "reason": self.reason,
            "error": None if self.error is None else self.error.to_dict(),
        }


@dataclass(slots=True)
class _Failure:
    reason: str
    again_at: float
    count: int


class Phases:
    """By shard. `on_change` is called with each new phase, not with every byte."""

    def __init__(self, on_change: Callable[[ShardId, PhaseProgress], None]) -> None:
        self._on_change = on_change
        self._now: dict[ShardId, PhaseProgress] = {}
        self._failures: dict[ShardId, _Failure] = {}
        self._wishes: Mapping[ShardId, str] = {}

    def wished(self, wishes: Mapping[ShardId, str]) -> None:
        """By which wish each is here now: how it failed for another says nothing of this one."""
        for shard in self._failures.keys() & wishes.keys():
            if self._wishes.get(shard, wishes[shard]) != wishes[shard]:
                del self._failures[shard], self._now[shard]
        self._wishes = wishes

    def get(self, shard: ShardId) -> PhaseProgress | None:
        """How far it is."""
        return self._now.get(shard)

    def all(self) -> dict[ShardId, PhaseProgress]:
        """How far each is."""
        return dict(self._now)

    def put(
        self,
        shard: ShardId,
        phase: Phase,
        reason: str | None = None,
        *,
        lacks_memory: bool = False,
        error: MeshError | None = None,
    ) -> None:
        """It is in this phase now."""
        before = self._now.get(shard)
        kept = before if before is not None and before.phase is phase else PhaseProgress(phase)
        now = replace(kept, reason=reason, lacks_memory=lacks_memory, error=error)
        self._now[shard] = now
        if before is None or (before.phase, before.lacks_memory) != (phase, lacks_memory):
            self._on_change(shard, now)

    def bytes(
        self, shard: ShardId, done: int, total: int, bytes_per_s: float, waits_for: str = ""
    ) -> None:
        """So much of its weights is here or loaded; the rest comes so fast, or waits for that."""
        before = self._now.get(shard)
        if before is not None and before.phase in (Phase.PROVISIONING, Phase.DEPLOYING):
            self._now[shard] = replace(
                before, done=min(done, total), total=total, bytes_per_s=bytes_per_s,
                reason=waits_for or None,
            )  # fmt: skip

    def failed(self, shard: ShardId, error: MeshError, now: float) -> None:
        """It failed; it waits twice as long after each time."""
        known = self._failures.get(shard)
        count = 1 if known is None else known.count + 1
        reason = f"{error.message} {error.fix}".strip()
        self._failures[shard] = _Failure(reason, now + wait_s(count), count)
        lacks = error.code in (NotEnoughMemory.code, DiskFull.code)
        self.put(shard, Phase.FAILED, reason, lacks_memory=lacks, error=error)

    def ready(self, shard: ShardId) -> None:
        """It is served."""
        self._failures.pop(shard, None)
        self.put(shard, Phase.READY)

    def not_yet(self, now: float) -> dict[ShardId, str]:
        """What failed and is not to be tried now, with the reason."""
        return {
            shard: failure.reason
            for shard, failure in self._failures.items()
            if now < failure.again_at
        }

    def try_again(self) -> None:
        """Whatever failed may be tried now."""
        self._failures.clear()

    def keep_only(self, shards: Collection[ShardId]) -> None:
        """Forget all others."""
        for known in (self._now, self._failures):
            for shard in [each for each in known if each not in shards]:
                del known[shard]


def wait_s(failures: int) -> float:
    """For how long something is left alone that failed so often, once at least, without a break."""
    return backoff_s(failures, FIRST_WAIT_S, LONGEST_WAIT_S)
