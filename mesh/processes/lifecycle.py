"""The life of a supervised process as plain data: limits of silence, states, loads, endings."""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mesh.errors import MeshError


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """For how long a child may say nothing, in seconds.

    Up to `start_s` until it said that it is ready: importing torch, and making sense of a device,
    may hold up everything else in it. From then on loads and long steps run beside its loop, which
    computes for a tenth of a second at most: one silent for `suspect_s` is out of order, and one
    silent for `replace_s` will not come back.
    """

    start_s: float = 120.0
    suspect_s: float = 5.0
    replace_s: float = 15.0


class ProcessState(StrEnum):
    """What is to be said of a supervised process."""

    STOPPED = "stopped"
    STARTING = "starting"
    UP = "up"
    SILENT = "silent"
    ENDED = "ended"
    RESTING = "resting"


@dataclass(frozen=True, slots=True)
class LoadNeed:
    """A load under way: of what, what it takes, and what main memory was free when it began."""

    name: str
    need_mb: int
    free_mb: int


@dataclass(slots=True)
class LoadUnderWay:
    """The load that a process told of last, None once it is done, and how far it is."""

    loading: LoadNeed | None = None
    since_s: float = 0.0
    phase: str = ""
    done_bytes: int = 0
    total_bytes: int = 0

    def row(self, now_s: float) -> dict[str, Any] | None:
        """For `status`, JSON-able."""
        if self.loading is None:
            return None
        return {
            "name": self.loading.name,
            "need_mb": self.loading.need_mb,
            "age_s": round(now_s - self.since_s, 1),
            "phase": self.phase,
            "done_bytes": self.done_bytes,
            "total_bytes": self.total_bytes,
        }


@dataclass(frozen=True, slots=True)
class ChildEnding:
    """How a child ended: its exit status, negative for a signal, and what is known of the reason.

    `said` are its last words, `loading` what it was at. `hung`: it was killed because it said
    nothing any more. `of_memory`: the kernel killed something for memory while it ran. `failed` is
    what went wrong on our own side of it.
    """

    status: int | None
    hung: bool = False
    said: MeshError | None = None
    loading: LoadNeed | None = None
    of_memory: bool = False
    failed: str = ""

    @property
    def was_killed(self) -> bool:
        """Whether somebody else sent SIGKILL, as the kernel does when memory runs out."""
        return self.status == -signal.SIGKILL and not self.hung

    def __str__(self) -> str:
        if self.said is not None:
            return f"it ended itself: {self.said.message}"
        if self.hung:
            return "it stopped answering and was replaced"
        if self.failed:
            return f"it could not be run: {self.failed}"
        if self.status is None:
            return "it could not be started"
        if self.status < 0:
            with contextlib.suppress(ValueError):
                return f"it was ended by {signal.Signals(-self.status).name}"
        return f"it ended with status {self.status}"
