"""How a job ended, from what it left and what the system says of its process."""

from __future__ import annotations

import os
import signal

from mesh.interventions.jail.limits import Ending, JobLimits
from mesh.interventions.jail.logs import safe_line

Left = tuple[bool, bytes]
"""As `mesh.interventions.jail.result.read_result` gives it."""

Verdict = tuple[Ending, str]
"""How it ended, and what to say of it: empty for one that finished."""


def said(left: Left) -> Verdict:
    """By what the job itself left."""
    finished, body = left
    if finished:
        return Ending.FINISHED, ""
    lines = body.decode("utf-8", "replace").split("\n")
    return Ending.FAILED, "\n".join(safe_line(line) for line in lines)


def judge(
    status: int, cpu_s: float, left: Left | None, *, killed_as: Ending | None, limits: JobLimits
) -> Verdict:
    """By the `status` that its process ended with, and why it was killed if it was."""
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0 and left is not None:
        return said(left)
    if killed_as is Ending.WALL_LIMIT:
        return Ending.WALL_LIMIT, _after(f"{limits.wall_s:g} s, its time limit")
    if killed_as is not None:
        return killed_as, "The job was ended on request."
    if os.WIFSIGNALED(status):
        return _by_signal(os.WTERMSIG(status), cpu_s, limits.cpu_s)
    return Ending.CRASHED, "The job's process ended by itself and left no valid result."


def _by_signal(number: int, cpu_s: float, allowed_cpu_s: int) -> Verdict:
    if number == signal.SIGSYS:
        return Ending.FORBIDDEN_CALL, "The job was ended: it made a system call that no job needs."
    if number != signal.SIGKILL:
        return Ending.CRASHED, f"The job's process ended by {signal.Signals(number).name}."
    # The kernel counts in ticks and looks at them once in a while.
    if cpu_s >= allowed_cpu_s - 0.5:
        return Ending.CPU_LIMIT, _after(f"{allowed_cpu_s} s of computing, its limit")
    return Ending.CRASHED, "The job was ended by the system, most likely for want of memory."


def _after(limit: str) -> str:
    return f"The job was ended after {limit}."
