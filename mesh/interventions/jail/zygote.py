"""The warmed parent of all jobs: imports once, then forks one child per job on command.

Started by `job.Jail` with a clean environment, null input and output and one inherited socket; it
holds no secret, keeps no file open, stays single-threaded, and ends with its socket.
Commands and reports are JSON, one per datagram, descriptors alongside.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from mesh.interventions.jail import canaries, child, kernel, lockdown
from mesh.interventions.jail.limits import JobLimits
from mesh.interventions.jail.pages import HugePages
from mesh.interventions.jail.syscalls import CpuArchitecture
from mesh.processes.heap import part_with_blocks
from mesh.processes.threads import other_threads

MAX_COMMAND_BYTES = 64 << 10
# A compiled module cannot be loaded once executable memory is refused, so all that ordinary code
# may import later is loaded now. What is not installed is not missed.
_PRELOAD = (
    canaries.__name__, "array", "bisect", "cmath", "collections", "contextlib", "copy",
    "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "heapq", "inspect",
    "io", "itertools", "json", "linecache", "math", "numbers", "operator", "pickle", "random", "re",
    "statistics", "string", "struct", "symtable", "tempfile", "textwrap", "time", "traceback",
    "types", "typing", "unicodedata", "uuid", "warnings", "weakref", "zlib", "zoneinfo",
)  # fmt: skip
_PRELOAD_WITH_TORCH = (
    "numpy", "numpy.random", "numpy.linalg", "numpy.fft", "nnsight", "einops", "sympy",
    "cloudpickle", "greenlet", "zstandard", "RestrictedPython",
)  # fmt: skip


def main(control_fd: int) -> NoReturn:
    """Serve the daemon's socket until it closes; then end."""
    control = socket.socket(fileno=control_fd)
    try:
        order = json.loads(control.recv(MAX_COMMAND_BYTES))
        namespaces = bool(order["namespaces"]) and _move_out()
        _warm(str(order["warm_up"]), str(order["argument"]))
    except BaseException as raised:  # noqa: BLE001 - sent to the daemon, and the process ends
        report(control, {"failed": "".join(traceback.format_exception(raised))[-4000:]})
        os._exit(1)
    nursery = _Nursery(control, sweep=not namespaces)
    report(control, {"ready": True, "namespaces": namespaces, "pid": os.getpid()})
    nursery.serve()
    os._exit(0)


def report(control: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send one report to the daemon; a daemon that is gone ends the process."""
    try:
        socket.send_fds(control, [json.dumps(message).encode()], fds)
    except OSError:
        os._exit(0)


def _move_out() -> bool:
    """Go into own namespaces where allowed. Returns whether; then in a child of the process."""
    here = kernel.machine()
    if here is None or not _may_move(here):
        return False
    kernel.enter_namespaces(here)
    # The pid namespace starts with the next child, whose end ends everybody in it.
    pid = os.fork()
    if pid:
        os.closerange(3, 256)
        os.waitpid(pid, 0)
        os._exit(0)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    return True


def _may_move(here: CpuArchitecture) -> bool:
    """Try it in a throwaway child: half of the move cannot be taken back."""
    pid = os.fork()
    if pid == 0:
        try:
            kernel.enter_namespaces(here)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def _warm(warm_up: str, argument: str) -> None:
    _preload(_PRELOAD)
    if warm_up:
        child.resolve(warm_up)(argument)
    if "torch" in sys.modules:
        _preload(_PRELOAD_WITH_TORCH)
        _settle_torch()
    _locate_modules()
    if threads := other_threads():
        named = ", ".join(threads)
        raise RuntimeError(f"the warm-up left threads running, which a fork would lose: {named}")
    gc.collect()
    gc.freeze()


def _preload(names: tuple[str, ...]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _settle_torch() -> None:
    import torch

    torch.set_num_threads(1)
    part_with_blocks()  # a job's memory is limited, with what its heap has in pieces
    if kernel.machine() is not None:
        # oneDNN writes machine code at run time, which the walls refuse.
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    # The processor is looked at on first use, through /proc, which a job cannot open.
    seen = torch.ones(2, 2, dtype=torch.bfloat16)
    torch.nn.functional.gelu(seen @ seen)


def _locate_modules() -> None:
    """Have `inspect` know where all modules lie, which it remembers.

    It follows links for that, which a job may not: where the environment or the user's home is
    behind one, no job would find the source of anything.
    """
    inspect.getmodule(compile("0", "<none>", "eval"))


class _Nursery:
    """Forks jobs and reports their ends."""

    def __init__(self, control: socket.socket, *, sweep: bool) -> None:
        self._control = control
        # Inside a pid namespace /proc counts by the numbers outside; its end ends all in it.
        self._sweep = sweep
        self._readable = lockdown.readable_paths()
        self._pages = HugePages()
        self._jobs: dict[int, int] = {}  # pid -> the daemon's number for the job
        if sys.platform == "linux":
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> None:
        """Until the daemon's end closes."""
        woken, wake = os.pipe()
        for fd in (woken, wake):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(woken, select.POLLIN)
        parent = os.getppid()
        is_idle_work_left = True
        # The time-out only matters where a closed datagram socket does not wake its peer.
        while os.getppid() == parent:
            ready = [fd for fd, _ in poller.poll(0 if is_idle_work_left else 5000)]
            if not ready and is_idle_work_left:
                is_idle_work_left = self._pages.step()
                continue
            if woken in ready:
                os.read(woken, 4096)
            self._reap()
            if self._control.fileno() in ready and not self._obey():
                return

    def _obey(self) -> bool:
        """One command; False when the daemon is gone."""
        try:
            message, fds, _, _ = socket.recv_fds(self._control, MAX_COMMAND_BYTES, 4)
        except OSError:
            return False
        if not message:
            return False
        command = json.loads(message)
        if "end" in command:
            return False
        if "kill" in command:
            self._kill(int(command["kill"]))
        elif "job" in command:
            self._fork(command, fds)
        return True

    def _kill(self, number: int) -> None:
        for pid, known in self._jobs.items():
            if known == number:
                os.kill(pid, signal.SIGKILL)

    def _fork(self, command: dict[str, Any], fds: list[int]) -> None:
        number = int(command["job"])
        limits = JobLimits(**command["limits"])
        job = child.ZygoteOrder(str(command["entry"]), command["hint"], limits, *fds)
        try:
            pid = os.fork()
        except OSError as error:
            report(self._control, {"refused": number, "why": str(error)})
        else:
            if pid == 0:
                child.run(job, self._readable)
            self._jobs[pid] = number
            self._announce(number, pid)
        for fd in fds:
            os.close(fd)

    def _announce(self, number: int, pid: int) -> None:
        handle = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        report(self._control, {"started": number}, () if handle is None else (handle,))
        if handle is not None:
            os.close(handle)

    def _reap(self) -> None:
        ended: list[dict[str, Any]] = []
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            number = self._jobs.pop(pid, None)
            if number is not None:
                cpu_s, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss
                ended.append({"ended": number, "status": status, "cpu_s": cpu_s, "peak": peak})
        if ended and self._sweep:
            self._kill_orphans()
        for message in ended:
            report(self._control, message)

    def _kill_orphans(self) -> None:
        """End what a job without a system call filter has left behind; it has become our child."""
        listed = Path(f"/proc/self/task/{os.getpid()}/children")
        if listed.exists():
            for pid in map(int, listed.read_text(encoding="ascii").split()):
                if pid not in self._jobs:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
