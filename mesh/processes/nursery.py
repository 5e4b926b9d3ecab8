"""The warm parent of a node's processes: imports once what all of them need, then forks each.

Started by `warm_parent` with an environment that names no secret, null input and output and one
socket. It is asked over that socket, one JSON map per datagram with the child's descriptors
alongside, and tells each child's number and end over a socket that came with the request. It stays
single-threaded, holds no key, opens no file after the imports and never sees a prompt: whatever a
child is told, it is told after the fork, over a channel that is closed here.

A child begins with its channel, its standard error, perhaps a listening socket and nothing else
that is open; with a session,
an environment and random numbers of its own. It ends with this process (PR_SET_PDEATHSIG), and
this process with the daemon. So when this process is killed, every child is: they are all started
anew from another one, which is simpler and safer than children that nobody can wait for.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.logs import set_levels
from mesh.processes.python import running
from mesh.processes.shared_pages import settle
from mesh.processes.threads import other_threads

MAX_ORDER_BYTES = 128 << 10
WARM_MODULES = (
    "mesh.shard.process",
    "mesh.pipeline.process",
    "mesh.interventions.jobs.process",
    "mesh.transfers.process",
)
"""What a node's processes run, imported ahead with all that they import."""

CHANNEL_FD = "HEARTHNET_CHANNEL_FD"
"""The variable that names a child's end of its channel."""
LISTENER_FD = "HEARTHNET_LISTENER_FD"
"""The variable that names the listening socket that a child was given, if it was."""
LOG_LEVEL = "info"
"""Of what a child logs."""
_PR_SET_PDEATHSIG = 1
_STANDARD = {0, 1, 2}


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """What a child is to run, and with which environment."""

    module: str
    environment: dict[str, str]

    def packed(self) -> bytes:
        """For the socket."""
        return json.dumps({"module": self.module, "environment": self.environment}).encode()


def warm(modules: tuple[str, ...]) -> str | None:
    """Import them. Why this process must not fork now, or None when it may."""
    from mesh.processes.lean import import_modelling_or_begin_again

    gc.disable()  # what it freed would be holes, which children fill: pages that nobody shares
    try:
        import_modelling_or_begin_again()
        for name in modules:
            importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - told to the daemon, whose children say it as well
        return f"{type(error).__name__} while importing: {error}"
    _rehearse()
    gc.freeze()
    gc.collect()  # finds nothing, but lets go of what lists of free objects hold, as children do
    if (why := why_unfit()) is None:
        settle()
    return why


def _rehearse() -> None:
    """Do what every child begins with and may share: what it finds already done, it writes nothing
    of."""
    from mesh.identity import certificates
    from mesh.processes import messages

    set_levels(LOG_LEVEL)
    certificates.rehearse()
    messages.rehearse()


def why_unfit() -> str | None:
    """Why a fork of this process could not be trusted, or None."""
    if threads := other_threads():
        return f"importing started threads, which a fork would lose: {', '.join(threads)}"
    # An accelerator that was looked at cannot be used after a fork; it leaves its device open.
    devices = [name for name in _open_files() if name.startswith("/dev/") and name != os.devnull]
    if devices:
        return f"importing opened {devices[0]}, which cannot be used after a fork"
    return None


def _open_files() -> list[str]:
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the directory that is being read is among them
            found.append(str(fd.readlink()))
    return [name for name in found if not name.startswith(("/dev/pts/", "/dev/tty"))]


class Nursery:
    """Forks what is asked for and tells how it ended, until the daemon's end of `control` closes.

    Everything is kept by descriptor number: a child closes all of them, and an object that closed
    its own once more could hit one that was opened since.
    """

    def __init__(self, control: int, unfit: str | None) -> None:
        self._control = control
        self._unfit = unfit
        self._reports: dict[int, tuple[int, int]] = {}
        """The child's process descriptor -> its pid, and where its end is told."""
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)

    def serve(self) -> ForkOrder:
        """Returns in each child, with what it is to be; in this process never."""
        while True:
            for fd, _ in self._poller.poll():
                if fd != self._control:
                    self._tell_end(fd)
                elif (order := self._obey()) is not None:
                    return order

    def _obey(self) -> ForkOrder | None:
        with socket.socket(fileno=os.dup(self._control)) as control:
            message, fds, _, _ = socket.recv_fds(control, MAX_ORDER_BYTES, 4)
        if not message:
            os._exit(0)
        order = ForkOrder(**json.loads(message))
        channel, stderr, report, *listener = fds
        if self._unfit is not None:
            _send(report, {"refused": self._unfit})
        elif self._fork(report) == 0:
            _settle(order, channel, stderr, *listener)
            return order
        else:
            for fd in (channel, stderr, *listener):
                os.close(fd)
            return None
        for fd in fds:
            os.close(fd)
        return None

    def _fork(self, report: int) -> int:
        if sys.platform != "linux":  # `warm_parent` starts this process nowhere else
            return -1
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # for want of processes or memory; those that run are left alone
            return _failed(report, error)
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it was gone before that was asked for
                os._exit(0)
            return 0
        try:
            handle = os.pidfd_open(pid)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return _failed(report, error)
        _send(report, {"pid": pid}, (handle,))
        self._reports[handle] = (pid, report)
        self._poller.register(handle, select.POLLIN)
        return pid

    def _tell_end(self, handle: int) -> None:
        pid, report = self._reports.pop(handle)
        self._poller.unregister(handle)
        _, status = os.waitpid(pid, 0)
        _send(report, {"status": os.waitstatus_to_exitcode(status)})
        os.close(report)
        os.close(handle)


def _failed(report: int, error: OSError) -> int:
    """Tell that there is no child this time; -1."""
    _send(report, {"failed": str(error)})
    os.close(report)
    return -1


def _send(fd: int, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    with (
        contextlib.suppress(OSError),  # nobody waits for it any more
        socket.socket(fileno=os.dup(fd)) as end,
    ):
        socket.send_fds(end, [json.dumps(message).encode()], fds)


# In the child


def _settle(order: ForkOrder, channel: int, stderr: int, listener: int | None = None) -> None:
    """Leave behind what is not this child's own; single-threaded, right after the fork."""
    os.setsid()
    os.dup2(stderr, 2)
    close_all_but({*_STANDARD, channel} | (set() if listener is None else {listener}))
    os.environ.clear()
    os.environ.update(order.environment)
    os.environ[CHANNEL_FD] = str(channel)
    if listener is not None:
        os.environ[LISTENER_FD] = str(listener)
    _reseed()
    _rename(order.module)
    gc.enable()


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor of this process that is not among these."""
    start = 0
    for fd in sorted(keep):
        if start < fd:  # an empty range would close everything
            os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))


def _reseed() -> None:
    """`random` and OpenSSL notice a fork by themselves; these do not."""
    random.seed()
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed(int.from_bytes(os.urandom(4)))
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _rename(module: str) -> None:
    """Have `ps` show what this process is, in the room that the parent's arguments take."""
    with Path("/proc/self/stat").open("rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # proc_pid_stat(5): arg_start, arg_end
    if start == 0:
        return
    title = "\0".join((*running("mesh.processes.entry", module), "")).encode()
    room = end - start
    ctypes.memmove(start, title[: room - 1].ljust(room, b"\0"), room)


def main(control: int) -> None:
    """Be the warm parent, and in each fork of it what was asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    order = Nursery(control, warm(WARM_MODULES)).serve()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from mesh.processes.child import end_with_parent
    from mesh.processes.entry import become

    end_with_parent()
    become(order.module)


if __name__ == "__main__":
    main(int(sys.argv[1]))
