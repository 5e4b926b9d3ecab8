"""The daemon's side of its processes' warm parent (`nursery`): start it, ask it for children.

One serves all nodes of this process; it starts with the first child, and ends with this process,
however that ends. Where forking after the imports is not safe, and where the warm parent does not
get that far, every child is a process that imports for itself, and `Began.why_alone` says why.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any, Protocol

from mesh.clock import unless_done
from mesh.processes.nursery import CHANNEL_FD, LISTENER_FD, MAX_ORDER_BYTES, ForkOrder
from mesh.processes.python import running

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Until the first child is there: importing torch takes long on a slow machine."""
_END_TIMEOUT_S = 2.0
_REPORT_S = 1.0
"""How long after a child's end its parent may take to say how it ended."""
_ATTEMPTS = 2
_STDERR = 2
_TITLE_ROOM = "-" * 80
"""An argument that is not read: a child writes over it what it is."""


_PASSED_ON = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_", "TZ", "TMP", "TEMP", "XDG_", "LD_", "DYLD_",
    "PYTHON", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH_",
    "DNNL_", "ONEDNN_", "ATEN_", "CUDA_", "CUBLAS_", "NVIDIA_", "NCCL_", "HIP_", "HSA_", "ROC",
    "AMD_", "GPU_", "ZE_", "SYCL_", "TRANSFORMERS_", "TOKENIZERS_", "SAFETENSORS_", "HF_HOME",
    "HF_HUB_CACHE", "HF_HUB_OFFLINE", "SSL_CERT_",
)  # fmt: skip
"""How the names of the variables begin that a child is given: what libraries are set up with. The
node's own settings are not among them (a child is told what it needs), nor is whatever else whoever
started the node had in its environment: tokens, say."""


WITHOUT_THREADS = {
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_CONF": ",".join(
        filter(None, (os.environ.get("MALLOC_CONF"), "background_thread:false"))
    ),
}
"""For a process that is to fork: the threads that numpy starts, and jemalloc where it is preloaded,
would be lost, and nothing computes with them."""


def command() -> list[str]:
    """What runs the warm parent."""
    return running("mesh.processes.nursery")


def child_environment() -> dict[str, str]:
    """What a child sees of this process's environment."""
    return {name: text for name, text in os.environ.items() if name.startswith(_PASSED_ON)}


class ChildProcess(Protocol):
    """A process of the daemon's, however it was started."""

    pid: int
    why_alone: str | None
    """Why it was not forked from the warm parent; None when it was."""

    def kill(self) -> None:
        """End it at once with SIGKILL; nothing when it has ended."""

    async def wait(self, timeout_s: float) -> int:
        """Its exit status, negative for a signal. Raises TimeoutError."""


class SpawnedProcess(ChildProcess):
    """One that this process has started, and that has imported for itself."""

    def __init__(self, process: subprocess.Popen[bytes], why_alone: str) -> None:
        self.pid = process.pid
        self.why_alone = why_alone
        self._process = process

    def kill(self) -> None:
        self._process.kill()

    async def wait(self, timeout_s: float) -> int:
        try:
            return await asyncio.to_thread(self._process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"pid {self.pid} still runs after {timeout_s} s") from None


class Refused(Exception):
    """The warm parent forks nothing; the text says why."""


class NotForked(Exception):
    """There is no child this time, for want of something; nothing is wrong with the warm parent."""


class WarmParentLost(Exception):
    """It ended before the child was there."""

    def __str__(self) -> str:
        return "the warm parent ended"


class ForkedProcess(ChildProcess):
    """One that the warm parent has forked: it waits for it, and reports how it ended.

    The process descriptor tells of the end even when the parent does not, and a signal sent over it
    hits no other process that got the same number since.
    """

    why_alone = None

    def __init__(self, report: socket.socket) -> None:
        self.pid = 0
        self._report = report
        self._handle = -1
        self._loop = asyncio.get_running_loop()
        self._born: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        report.setblocking(False)
        self._loop.add_reader(report, self._on_report)

    async def born(self, timeout_s: float) -> None:
        """Until it runs. Raises Refused, NotForked, WarmParentLost or TimeoutError."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._born)
        except BaseException:
            self.kill()
            self.close()
            raise

    def kill(self) -> None:
        if sys.platform == "linux" and self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    async def wait(self, timeout_s: float) -> int:
        """See `ChildProcess`; as killed when nobody is left who could say how it ended."""
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(self._ended)

    def _on_report(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._report, MAX_ORDER_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            message, fds = b"", []
        said = json.loads(message) if message else {}
        if "pid" in said:
            self.pid, self._handle = said["pid"], fds[0]
            self._loop.add_reader(self._handle, self._on_exit)
            if not self._born.done():
                self._born.set_result(None)
            return
        if "status" in said:
            self._end(said["status"])
        else:  # what is left to know of a child, its process descriptor tells
            self._loop.remove_reader(self._report)
            if not self._born.done():
                self._born.set_exception(_why_unborn(said))

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._handle)
        # Whoever could say how it ended is gone, and took it along, or does not answer.
        unless_done(self._ended, _REPORT_S, lambda: self._end(-int(signal.SIGKILL)))

    def _end(self, status: int) -> None:
        self.close()
        if not self._ended.done():
            self._ended.set_result(status)

    def close(self) -> None:
        """Let go of it: nothing more is heard. Idempotent."""
        if self._report.fileno() >= 0:
            self._loop.remove_reader(self._report)
            self._report.close()
        if self._handle >= 0:
            self._loop.remove_reader(self._handle)
            _reap(self._handle)
            os.close(self._handle)
            self._handle = -1


def _reap(handle: int) -> None:
    """Have an orphan leave the process table: of what its parent left behind, process 1 is the new
    one, which in a container is the daemon."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it has a parent
            os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOHANG)


def _why_unborn(said: dict[str, Any]) -> Exception:
    if "refused" in said:
        return Refused(said["refused"])
    return NotForked(said["failed"]) if "failed" in said else WarmParentLost()


class WarmParent:
    """The process and this side's end of its socket. May be asked from any event loop.

    It can be asked before it is there: what is asked waits in the socket. The thread that starts it
    also waits for its end, as the kernel takes the end of that thread for the end of this process.
    """

    def __init__(self) -> None:
        """Have it started; waits for nothing. Raises OSError for want of descriptors."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._control = ours
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(
            target=self._run, args=(theirs,), name="warm parent", daemon=True
        )
        self._thread.start()
        atexit.register(self.end)

    def _run(self, theirs: socket.socket) -> None:
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command(), str(theirs.fileno()), _TITLE_ROOM],
                    env={**child_environment(), **WITHOUT_THREADS},
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:  # whoever asked reads the end of the socket
                logger.exception("the warm parent cannot be started", exc_info=error)
                return
        self._process.wait()

    @property
    def pid(self) -> int | None:
        """Its number, once it has one."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs, or is about to."""
        return self._thread.is_alive()

    async def fork(
        self, order: ForkOrder, channel: socket.socket, listener: socket.socket | None
    ) -> ForkedProcess:
        """A child with that end of a channel and that listening socket. Raises Refused, NotForked,
        WarmParentLost, TimeoutError or OSError.
        """
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:  # no descriptors
            raise NotForked(str(error)) from error
        with theirs:
            process = ForkedProcess(ours)
            fds = [channel.fileno(), _STDERR, theirs.fileno()]
            if listener is not None:
                fds.append(listener.fileno())
            try:
                socket.send_fds(self._control, [order.packed()], fds)
            except OSError as error:
                process.close()
                if isinstance(error, ConnectionError):  # it is gone
                    raise
                raise NotForked(str(error)) from error
        await process.born(START_TIMEOUT_S)
        return process

    def end(self) -> None:
        """End it, and with it every child; blocks a moment."""
        atexit.unregister(self.end)
        self._control.close()
        self._thread.join(_END_TIMEOUT_S)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join(_END_TIMEOUT_S)


class _Shared:
    """The one warm parent of this process, as soon as there is one."""

    parent: WarmParent | None = None
    unfit: str | None = None
    """Why there is none, where that will not change."""


async def start_process(
    order: ForkOrder, channel: socket.socket, listener: socket.socket | None = None
) -> ChildProcess:
    """Run what `order` says with that end of a channel, and that socket, forked from the warm
    parent if possible.

    Its standard error is this process's. Raises OSError.
    """
    why_alone = _why_never()
    for _ in range(_ATTEMPTS if why_alone is None else 0):
        try:
            if _Shared.parent is None or not _Shared.parent.alive:
                _Shared.parent = WarmParent()
            return await _Shared.parent.fork(order, channel, listener)
        except Refused as error:
            why_alone = _Shared.unfit = str(error)
            break
        except NotForked as error:
            why_alone = str(error)
            break
        except (OSError, TimeoutError, WarmParentLost) as error:
            why_alone = f"{type(error).__name__}: {error}"
            await asyncio.to_thread(end_warm_parent)
    if _Shared.unfit is not None:
        await asyncio.to_thread(end_warm_parent)
    logger.warning("%s imports for itself: %s", order.module, why_alone)
    return await asyncio.to_thread(_spawn, order, channel, listener, str(why_alone))


def end_warm_parent() -> None:
    """End it, and with it every child forked from it; the next child starts another."""
    parent, _Shared.parent = _Shared.parent, None
    if parent is not None:
        parent.end()


def _why_never() -> str | None:
    if sys.platform != "linux":
        return f"forking after the imports is not safe on {sys.platform}"
    if not hasattr(os, "pidfd_open"):
        return "this Python knows no process descriptors"
    return _Shared.unfit


def _spawn(
    order: ForkOrder, channel: socket.socket, listener: socket.socket | None, why_alone: str
) -> SpawnedProcess:
    given = {CHANNEL_FD: channel.fileno()}
    if listener is not None:
        given[LISTENER_FD] = listener.fileno()
    process = subprocess.Popen(
        running("mesh.processes.entry", order.module),
        env={**order.environment, **{name: str(fd) for name, fd in given.items()}},
        pass_fds=tuple(given.values()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    return SpawnedProcess(process, why_alone)
