"""The life of a supervised process as plain data: limits of silence, states, loads, endings,
standings."""

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
                why = ", most likely by the kernel for lack of memory"
                by_kernel = self.was_killed and self.of_memory
                name = signal.Signals(-self.status).name
                return f"it was ended by {name}{why if by_kernel else ''}"
        return f"it ended with status {self.status}"


@dataclass(frozen=True, slots=True)
class ProcessStanding:
    """How it is with a supervised process. `held` is why none is started; `wait_s` how long until a
    silent one is replaced, or one that ended followed by another."""

    name: str
    state: ProcessState
    pid: int | None
    silent_s: float
    starts: int
    why_alone: str | None
    ending: ChildEnding | None
    held: MeshError | None
    wait_s: float

    @property
    def trouble(self) -> str | None:
        """What people have to be told of it: None when it is up, starting for the first time, or
        not to run."""
        match self.state:
            case ProcessState.SILENT:
                return (
                    f"{self.name} said nothing for {int(self.silent_s)} s;"
                    f" it is replaced in {self.wait_s:.0f} s"
                )
            case ProcessState.ENDED | ProcessState.STARTING if self.held is not None:
                return f"{self.name} is not started: {self.held.message}"
            case ProcessState.ENDED:
                return f"{self.name}: {self.ending}; it starts again in {self.wait_s:g} s"
            case ProcessState.STARTING if self.ending is not None:
                return f"{self.name}: {self.ending}; it is starting again"
            case _:
                return None

    def row(self) -> dict[str, Any]:
        """For `status`, JSON-able."""
        return {
            "name": self.name,
            "state": self.state.value,
            "pid": self.pid,
            "silent_s": round(self.silent_s, 1),
            "starts": self.starts,
            "why_alone": self.why_alone,
            "ending": None if self.ending is None else str(self.ending),
            "held": None if self.held is None else self.held.message,
        }
