"""The daemon's handle on the warmed parent process: start it, command it, hear its reports.

Knows the framing (one JSON map per datagram) and which futures wait for which report; what a job
is and when it must end is `job`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from mesh.errors import Busy, JailUnavailable
from mesh.interventions.jail.zygote import MAX_COMMAND_BYTES
from mesh.processes.tasks import to_its_end

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 5.0
# Everything the parent and its jobs ever see of an environment.
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/nonexistent",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # On macOS: Accelerate's threads are lost by a fork, and Objective-C ends a child by itself that
    # was forked beside any other thread.
    "VECLIB_MAXIMUM_THREADS": "1",
    "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",
    "MALLOC_CONF": "background_thread:false",  # of jemalloc, whose thread no fork takes along
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_LOST = {"status": signal.SIGKILL, "cpu_s": 0.0, "peak": 0}

Report = dict[str, Any]


class Zygote:
    """The process and our end of its socket."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.namespaces = False
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Report] = self._loop.create_future()
        self._starting: dict[int, asyncio.Future[int]] = {}
        self._running: dict[int, asyncio.Future[Report]] = {}
        control.setblocking(False)
        self._loop.add_reader(control, self._on_report)

    @classmethod
    async def start(cls, warm_up: str, argument: str, namespaces: bool, timeout_s: float) -> Zygote:
        """Start and warm it. Raises JailUnavailable with the reason when that fails."""
        ours, theirs = _datagrams()
        begun: list[subprocess.Popen[bytes]] = []
        try:
            # To its end: it would be given the number of a socket that is closed by then.
            await to_its_end(lambda: begun.append(_begun(theirs)))
        except BaseException:
            ours.close()
            for process in begun:
                process.kill()
                await asyncio.to_thread(process.wait)
            raise
        finally:
            theirs.close()
        parent = cls(begun[0], ours)
        order = {"warm_up": warm_up, "argument": argument, "namespaces": namespaces}
        try:
            parent.send(order)
            async with asyncio.timeout(timeout_s):
                ready = await parent._ready
        except TimeoutError:
            await parent.stop()
            raise JailUnavailable(
                f"the jail's parent process was not ready after {timeout_s:g} s.",
                fix="Look at the machine's load, or raise the time limit.",
            ) from None
        except BaseException:
            await parent.stop()
            raise
        parent.namespaces = bool(ready["namespaces"])
        return parent

    @property
    def alive(self) -> bool:
        """Whether it still listens."""
        return self._control.fileno() >= 0

    def send(self, message: Report, fds: tuple[int, ...] = ()) -> None:
        """One command. Raises JailUnavailable when it is gone, Busy when it does not keep up."""
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds)
        except BlockingIOError:
            raise Busy("the jail's parent process is behind.", fix="Try again.") from None
        except OSError:
            self._lose("its socket is closed")
            raise JailUnavailable(
                "the jail's parent process is gone.", fix="It is restarted; try again."
            ) from None

    def watch(
        self, number: int, started: asyncio.Future[int], ended: asyncio.Future[Report]
    ) -> None:
        """Resolve the futures with the job's process descriptor (-1: none) and its end."""
        self._starting[number] = started
        self._running[number] = ended

    def forget(self, number: int) -> None:
        """Nobody waits for this job any more."""
        self._starting.pop(number, None)
        self._running.pop(number, None)

    def end(self) -> None:
        """Kill it; every job dies with it."""
        if self._process.poll() is None:
            logger.warning("jail parent=%d is killed", self._process.pid)
            self._process.kill()

    async def stop(self) -> None:
        """Tell it to end, and close its socket; kill it when it does not. Reaps it."""
        if self.alive:
            with contextlib.suppress(Busy, JailUnavailable):
                self.send({"end": True})  # not every system says that the socket is closed
        self._lose("it was stopped")
        try:
            await asyncio.to_thread(self._process.wait, _STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.end()
            await asyncio.to_thread(self._process.wait, _STOP_TIMEOUT_S)

    def _lose(self, why: str) -> None:
        if self._control.fileno() < 0:
            return
        self._loop.remove_reader(self._control)
        self._control.close()
        gone = JailUnavailable(f"the jail's parent process is gone: {why}.", fix="Try again.")
        if not self._ready.done():
            self._ready.set_exception(gone)
        for started in self._starting.values():
            if not started.done():
                started.set_exception(gone)
        for ended in self._running.values():
            if not ended.done():
                ended.set_result(dict(_LOST))
        self._starting.clear()
        self._running.clear()

    def _on_report(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._control, MAX_COMMAND_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            message, fds = b"", []
        if not message:
            self._lose("it ended")
            return
        self._deliver(json.loads(message), fds)

    def _deliver(self, report: Report, fds: list[int]) -> None:
        if "ready" in report:
            self._ready.set_result(report)
        elif "failed" in report:
            logger.error("jail warm-up failed: %s", report["failed"])
            last = str(report["failed"]).strip().rpartition("\n")[2]
            self._ready.set_exception(
                JailUnavailable(
                    f"the jail's warm-up failed: {last.rstrip('.')}.", fix="The log has the rest."
                )
            )
        elif "started" in report:
            self._resolve_start(int(report["started"]), fds)
        elif "refused" in report:
            started = self._starting.pop(int(report["refused"]), None)
            if started is not None and not started.done():
                why = str(report["why"])
                started.set_exception(Busy(f"no process for the job: {why}.", fix="Try again."))
        elif "ended" in report:
            ended = self._running.pop(int(report["ended"]), None)
            if ended is not None and not ended.done():
                ended.set_result(report)

    def _resolve_start(self, number: int, fds: list[int]) -> None:
        started = self._starting.pop(number, None)
        if started is None or started.done():
            for fd in fds:
                os.close(fd)
        else:
            started.set_result(fds[0] if fds else -1)


def _begun(control: socket.socket) -> subprocess.Popen[bytes]:
    """The process, with that end of its socket. Blocks. Raises OSError."""
    module = "mesh.interventions.jail.zygote"
    return subprocess.Popen(
        [sys.executable, "-I", "-B", "-m", module, str(control.fileno())],
        env=_ENVIRONMENT,
        cwd="/",
        pass_fds=(control.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _datagrams() -> tuple[socket.socket, socket.socket]:
    """Two ends of a line of datagrams; where a system has it, one that says when the other end is
    closed."""
    if sys.platform != "linux":
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for end in pair:  # macOS takes 2 KiB at once unless there is room for more
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, 4 * MAX_COMMAND_BYTES)
        return pair
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
