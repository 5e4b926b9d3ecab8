"""Whether the weights of served layers are safe on this machine: each way to change one is tried.

Every attempt is a process of its own, for the memory itself ends whoever writes to it. A canary
that does not run counts as one that got through. What the attempts do is in `mesh.shard.canaries`.
"""

from __future__ import annotations

import dataclasses
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mesh.processes.python import running

STARTED, WROTE, REFUSED, ABSENT = "STARTED", "WROTE", "REFUSED", "ABSENT"
CANARIES = (*running("mesh.processes.entry", "mesh.shard.canaries"),)
_TIMEOUT_S = 120.0
_ENDED = {-int(signal.SIGSEGV), -int(signal.SIGBUS)}

MEMORY = {
    "stored": "weights as they are stored",
    "converted": "weights converted while loading",
    "packed": "weights packed for speed",
}
"""Whoever writes to these is to be ended by the system."""
NETS = {
    "operation": "a job's tensor operation that would write to a weight is refused",
    "unnoticed": "a changed bit is noticed by the rolling check",
}


@dataclass(frozen=True)
class WeightReport:
    """What an examination found; the keys of `broken` and `absent` are names of canaries."""

    held: tuple[str, ...]
    broken: dict[str, str]
    absent: dict[str, str]
    """What there is not, or what this system cannot do: nothing that went wrong."""

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return dataclasses.asdict(self)

    def to_text(self) -> str:
        """For people: one line per canary, what does not hold first."""
        words = {**MEMORY, **NETS}
        lines = [f"  OPEN  {words[name]}: {what}" for name, what in self.broken.items()]
        lines += [f"  holds {words[name]}" for name in self.held]
        lines += [f"  none  {words[name]}: {what}" for name, what in self.absent.items()]
        head = "weights: " + ("not safe" if self.broken else "safe")
        rest = "  Memory of CUDA and MPS devices is not protected: there the rolling check notices."
        return "\n".join([head, *lines, rest])


def examine(canaries: Sequence[str] = CANARIES) -> WeightReport:
    """Let every canary fly, one after the other; some seconds each.

    `canaries` is the command that takes one's name.
    """
    held, broken, absent = [], {}, {}
    for name in (*MEMORY, *NETS):
        flown = _fly([*canaries, name])
        said = flown.stdout.split()
        if said[:1] == [ABSENT]:
            absent[name] = flown.stdout.strip().removeprefix(ABSENT).strip()
        elif said[:1] != [STARTED]:
            broken[name] = f"the canary did not run: {flown.stderr.strip().rpartition(chr(10))[2]}"
        elif _is_stopped(name, flown):
            held.append(name)
        else:
            broken[name] = "it was changed, and nothing stopped or noticed that"
    return WeightReport(tuple(held), broken, absent)


def _is_stopped(name: str, flown: subprocess.CompletedProcess[str]) -> bool:
    if name in MEMORY:
        return flown.returncode in _ENDED and WROTE not in flown.stdout
    return flown.returncode == 0 and flown.stdout.split()[1:] == [REFUSED]


def _fly(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"not done after {_TIMEOUT_S:g} s")
