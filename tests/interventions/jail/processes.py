"""What tests of a jail's surroundings need: a jail that starts in a moment, and its process."""

from __future__ import annotations

import psutil

from mesh.interventions.jail import zygote
from mesh.interventions.jail.doctor import ENTRY as CANARY
from mesh.interventions.jail.doctor import JailReport, JailStrength
from mesh.interventions.jail.job import Jail
from mesh.interventions.jail.limits import JobLimits, JobOutcome


class Unexamined(Jail):
    """Whose walls are not attacked before the first job."""

    async def examine(self) -> None:
        """See `Jail`."""
        self.report = JailReport(
            JailStrength.OS, (), {}, namespaces=False, landlock_abi=0, filtered_calls=True
        )


def warmed_parent() -> psutil.Process:
    """The process of the one jail that this process has."""
    (parent,) = (
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and zygote.__name__ in child.cmdline()
    )
    return parent


async def run_canary(jail: Jail, payload: bytes, limits: JobLimits) -> tuple[JobOutcome, bytes]:
    """As an examination of `jail` does it; what the canary has sent besides."""
    async with await jail.start_job(CANARY, payload, trusted=True, limits=limits) as job:
        outcome = await job.outcome()
        try:
            return outcome, job.channel.recv(4096)
        except (BlockingIOError, ConnectionError):
            return outcome, b""
