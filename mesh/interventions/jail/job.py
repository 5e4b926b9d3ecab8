"""The daemon's side of the jail: start the warmed parent, run jobs in it, end them on time.

A job gets bytes and a socket, and gives back bytes. What is in them is the callers' business;
this module decodes nothing that a job wrote, except how many bytes it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from mesh.clock import unless_done
from mesh.errors import Busy, JailUnavailable, MeshError
from mesh.interventions.jail.child import PAYLOAD_LENGTH
from mesh.interventions.jail.doctor import ENTRY as CANARY_ENTRY
from mesh.interventions.jail.doctor import JailReport, JailStrength, examine
from mesh.interventions.jail.limits import Ending, JobLimits, JobOutcome
from mesh.interventions.jail.logs import LogPump
from mesh.interventions.jail.result import read_result, result_file
from mesh.interventions.jail.standby import JobKind, Standby
from mesh.interventions.jail.usage import Usage, usage_of
from mesh.interventions.jail.verdict import Left, Verdict, judge, said
from mesh.interventions.jail.warm import Report, Zygote

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 5.0
_END_TIMEOUT_S = 2.0


class JailedJob:
    """One running job. `channel` is our end of its socket: non-blocking, bytes from a stranger.

    It reads end-of-file when the job ends. Use as a context manager: leaving it kills the job if
    it still runs, and closes what is open; a transport made of `channel` is closed before that.
    """

    def __init__(self, number: int, limits: JobLimits, parent: Zygote) -> None:
        self.channel, self._theirs = socket.socketpair()
        self.channel.setblocking(False)
        self._number = number
        self._limits = limits
        self._parent = parent
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._ended.add_done_callback(self._stop_timer)
        self._hung_up: asyncio.Future[None] = self._loop.create_future()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._killed_as: Ending | None = None
        self._process_fd = -1
        self._result_fd = -1
        self._log: LogPump | None = None
        self._on_text: Callable[[str], None] = lambda _: None
        self._timer: asyncio.TimerHandle | None = None
        self._outcome: asyncio.Task[JobOutcome] | None = None
        self._begun_s = time.monotonic()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        await self.outcome()
        self.channel.close()

    async def outcome(self) -> JobOutcome:
        """Wait for the end, which `JobLimits.wall_s` bounds. Cancelling it leaves the job alone."""
        if self._outcome is None:
            name = f"jail-job-{self._number}-end"
            self._outcome = self._loop.create_task(self._conclude(), name=name)
        return await asyncio.shield(self._outcome)

    def kill(self, ending: Ending = Ending.KILLED) -> None:
        """End the job now, with SIGKILL. Does nothing once it has ended."""
        if self._ended.done() or self._killed_as is not None:
            return
        self._killed_as = ending
        if sys.platform == "linux" and self._process_fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process_fd, signal.SIGKILL)
        else:
            self._parent.send({"kill": self._number})
        if self._timer is not None:
            self._timer.cancel()
        # A parent that does not report the end is no use any more; its end is every job's.
        unless_done(self._ended, _END_TIMEOUT_S, self._parent.end)

    async def launch(self, entry: str, hint: str | None, payload_bytes: int) -> None:
        """Have the warmed parent fork it, and wait until it is. Called once, by `Jail`."""
        limits = self._limits
        self._result_fd = result_file(limits.result_bytes)
        log_read, log_write = os.pipe()
        self._log = LogPump(log_read, self._print, limits.log_bytes, limits.log_bytes_per_s)
        # A payload is not the job's own doing.
        room = dataclasses.replace(limits, memory_bytes=limits.memory_bytes + payload_bytes)
        command = {
            "job": self._number, "entry": entry, "hint": hint, "limits": dataclasses.asdict(room),
        }  # fmt: skip
        fds = (self._result_fd, self._theirs.fileno(), log_write)
        started: asyncio.Future[int] = self._loop.create_future()
        # Not from the await below: a cancellation in the turn of the answer would lose it.
        started.add_done_callback(self._keep_process)
        try:
            self._parent.watch(self._number, started, self._ended)
            self._parent.send(command, fds)
            unless_done(started, _START_TIMEOUT_S, lambda: started.set_exception(TimeoutError()))
            await started
        finally:
            self._theirs.close()
            os.close(log_write)

    async def begin(self, payload: bytes, on_text: Callable[[str], None]) -> None:
        """Give it what it is to work on; its time runs from now on. Called once, by `Jail`."""
        self._on_text = on_text
        self._begun_s = time.monotonic()
        self._timer = self._loop.call_later(self._limits.wall_s, self.kill, Ending.WALL_LIMIT)
        with contextlib.suppress(ConnectionError):  # it has ended, which is known soon
            for part in (PAYLOAD_LENGTH.pack(len(payload)), payload):
                await self._loop.sock_sendall(self.channel, part)

    @property
    def has_ended(self) -> bool:
        """Whether the parent has said that its process is gone."""
        return self._ended.done()

    @property
    def lives(self) -> bool:
        """Whether its process runs, as the system says it: the parent says it later."""
        if self._ended.done() or self._process_fd < 0:
            return False
        poll = select.poll()
        poll.register(self._process_fd, select.POLLIN)  # readable once the process has ended
        return not poll.poll(0)

    def hung_up(self) -> None:
        """Its channel is at its end: if it has left a result, that is its outcome.

        Nobody has to wait for the end of the process then, which takes the system a while.
        """
        if not self._hung_up.done():
            self._hung_up.set_result(None)

    def _print(self, text: str) -> None:
        self._on_text(text)

    def _keep_process(self, started: asyncio.Future[int]) -> None:
        if not started.cancelled() and started.exception() is None:
            self._process_fd = started.result()

    def on_end(self, notify: Callable[[], None]) -> None:
        """Call `notify` once, when its outcome is known, or when it is abandoned."""
        self._over.add_done_callback(lambda _: notify())

    def abandon(self) -> None:
        """Close everything after a launch that failed or was cancelled half-way."""
        self._parent.forget(self._number)
        with contextlib.suppress(MeshError):
            self._parent.send({"kill": self._number})
        self._ended.cancel()
        self._over.cancel()
        self._close()
        self._theirs.close()
        self.channel.close()

    def _stop_timer(self, _ended: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _close(self) -> None:
        if self._log is not None:
            self._log.close()
        for fd in (self._process_fd, self._result_fd):
            if fd >= 0:
                os.close(fd)
        self._process_fd = self._result_fd = -1

    async def _conclude(self) -> JobOutcome:
        try:
            return await self._await_outcome()
        finally:
            self._close()
            if not self._over.done():
                self._over.set_result(None)

    async def _await_outcome(self) -> JobOutcome:
        ends: list[asyncio.Future[Any]] = [self._ended, self._hung_up]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not self._ended.done():
            wall_s = time.monotonic() - self._begun_s
            used, left = await asyncio.to_thread(self._look)
            if left is not None:
                self.kill()
                if used is None:  # where only the parent can say
                    used = _usage_in(await self._ended)
                return self._made(left, said(left), wall_s, used)
        report = await self._ended
        wall_s = time.monotonic() - self._begun_s
        used = _usage_in(report)
        left = await asyncio.to_thread(read_result, self._result_fd)
        verdict = judge(
            int(report["status"]), used.cpu_s, left, killed_as=self._killed_as, limits=self._limits
        )
        return self._made(left, verdict, wall_s, used)

    def _look(self) -> tuple[Usage | None, Left | None]:
        return usage_of(self._process_fd), read_result(self._result_fd)

    def _made(self, left: Left | None, verdict: Verdict, wall_s: float, used: Usage) -> JobOutcome:
        ending, text = verdict
        if self._log is not None:
            self._log.close()
        result = left[1] if left is not None and ending is Ending.FINISHED else b""
        return JobOutcome(ending, result, text, wall_s, used.cpu_s, used.peak_bytes)


def _usage_in(report: Report) -> Usage:
    return Usage(float(report["cpu_s"]), int(report["peak"]) * 1024)


class Jail:
    """A warmed parent and the jobs forked from it, at most `max_jobs` at a time.

    Make one with `start`, one per model: the warm-up holds the model's skeleton. `report` says how
    strong its walls are; nothing runs that they are too weak for.
    """

    def __init__(self, parent: Zygote, max_jobs: int) -> None:
        self.report: JailReport | None = None
        self._parent = parent
        self._max_jobs = max_jobs
        self._running = 0
        self._numbers = 0
        self._standby = Standby(self._fork)

    @classmethod
    async def start(
        cls,
        warm_up: str,
        argument: str = "",
        *,
        max_jobs: int = 4,
        namespaces: bool = True,
        timeout_s: float = 120.0,
    ) -> Jail:
        """Start the parent and wait until it is warm.

        Args:
            warm_up: entry point ``module:function``, called once with `argument` in the parent:
                load here whatever every job needs. Empty: nothing, not even torch.
            argument: for the warm-up, at most 60 KiB; no secrets, every job can read it.
            max_jobs: how many may run at once.
            namespaces: use them where the kernel allows it.
            timeout_s: bound on the warm-up.
        Raises JailUnavailable when the parent does not come up.
        """
        parent = await Zygote.start(warm_up, argument, namespaces, timeout_s)
        jail = cls(parent, max_jobs)
        try:
            await jail.examine()
        except BaseException:
            await jail.stop()
            raise
        return jail

    async def examine(self) -> None:
        """Attack every wall and write the `report`; once more when it was bad for a bad moment.

        Raises JailUnavailable when the parent is gone.
        """
        self.report = await examine(self._run_canary, namespaces=self._parent.namespaces)

    @property
    def alive(self) -> bool:
        """Whether the warmed parent still runs; when not, start another jail."""
        return self._parent.alive

    @property
    def running(self) -> int:
        """How many jobs run now."""
        return self._running

    async def start_job(
        self,
        entry: str,
        payload: bytes,
        *,
        trusted: bool,
        hint: str | None = None,
        limits: JobLimits | None = None,
        on_text: Callable[[str], None] = lambda _: None,
    ) -> JailedJob:
        """Run a job that calls ``entry(payload, channel) -> bytes``, a ``module:function``.

        Args:
            entry: ours, never the submitter's.
            payload: handed over as it is.
            hint: what jobs of this kind may do before they have a payload, which is then done
                ahead of time where one of the same kind was run last: `entry` is called as
                ``entry(hint, channel)`` and what it returns with the payload. At most 32 KiB.
            trusted: whether the submitter's key is; needed where the walls are weak.
            limits: bounds of this job.
            on_text: gets the lines it prints, joined by newlines where several came at once,
                control characters removed.
        Raises Busy at `max_jobs`; JailUnavailable when the parent is gone or the walls too weak.
        """
        level = self.report.level if self.report is not None else JailStrength.NONE
        if level is JailStrength.NONE or (level is JailStrength.WEAK and not trusted):
            raise JailUnavailable(
                "this node cannot wall in foreign code.",
                fix="`hearthnet doctor jail` says what is missing. Where its level is weak, a key"
                " of `hearthnet keys create --scope interventions --trusted` may run code.",
            )
        if self._running >= self._max_jobs:
            raise Busy(f"{self._running} jobs run already.", fix="Try again when one has ended.")
        return await self._run_one(JobKind(entry, hint, limits or JobLimits()), payload, on_text)

    async def _run_one(
        self, kind: JobKind, payload: bytes, on_text: Callable[[str], None]
    ) -> JailedJob:
        self._running += 1
        try:
            job = await self._standby.take(kind, len(payload))
            job = job or await self._fork(kind, len(payload))
        except BaseException:
            self._one_less()
            raise
        job.on_end(self._one_less)
        if kind.hint is not None:
            job.on_end(lambda: self._standby.keep(kind))
        try:
            await job.begin(payload, on_text)
        except BaseException:
            job.kill()
            job.abandon()
            raise
        return job

    async def _fork(self, kind: JobKind, payload_bytes: int) -> JailedJob:
        self._numbers += 1
        job = JailedJob(self._numbers, kind.limits, self._parent)
        try:
            await job.launch(kind.entry, kind.hint, payload_bytes)
        except TimeoutError:
            job.abandon()
            self._parent.end()
            raise JailUnavailable(
                "the jail's parent process does not answer.", fix="It is restarted; try again."
            ) from None
        except BaseException:
            job.abandon()
            raise
        return job

    async def _run_canary(self, payload: bytes, limits: JobLimits) -> tuple[JobOutcome, bytes]:
        kind = JobKind(CANARY_ENTRY, None, limits)
        async with await self._run_one(kind, payload, lambda _: None) as job:
            outcome = await job.outcome()
            sent = b""
            with contextlib.suppress(BlockingIOError, ConnectionError):
                while chunk := job.channel.recv(4096):
                    sent += chunk
            return outcome, sent

    def _one_less(self) -> None:
        self._running -= 1

    async def stop(self) -> None:
        """End the parent and with it every job."""
        await self._standby.close()
        await self._parent.stop()


async def examine_machine(*, namespaces: bool = True) -> JailReport:
    """How strong a jail on this machine is, found out with one that holds nothing.

    Raises JailUnavailable when not even its parent process starts.
    """
    jail = await Jail.start("", namespaces=namespaces)
    report = jail.report
    await jail.stop()
    if report is None:
        raise JailUnavailable("the examination found nothing.", fix="The log has the rest.")
    return report
