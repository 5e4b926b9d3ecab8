"""A Python process that has imported what a daemon and its processes need, and forks daemons and
commands.

Started by `tests.warm.daemons`, once per process that runs tests. A daemon's own imports and its
warm parent's cost six seconds of CPU, and a test that starts one tests neither: with this, both are
forked, and from there on run what they run anywhere. Each is a process with its own session,
environment and descriptors; the warm parent is the daemon's child, as it would be otherwise.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from typing import Any

from mesh.processes import nursery
from mesh.processes.nursery import CHANNEL_FD, MAX_ORDER_BYTES, Nursery, warm
from mesh.processes.warm_parent import command

TETHERED = "mesh.cli.tethered"
WARM_MODULES = (*nursery.WARM_MODULES, "mesh.cli.main", "mesh.node.daemon", TETHERED)
_STDIN, _STDOUT, _STDERR = 0, 1, 2


class ForkedParent:
    """A daemon's warm parent to be: forked before the daemon has a thread, and begun when asked."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self._ours.close()
            _be_warm_parent(theirs)
        theirs.close()

    def begin(self, control: int, environment: dict[str, str]) -> None:
        """Have it serve over that descriptor, with that environment."""
        with self._ours:
            socket.send_fds(self._ours, [json.dumps(environment).encode()], [control])

    def kill(self) -> None:
        """As `subprocess.Popen` does."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """As `subprocess.Popen` does."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _be_warm_parent(orders: socket.socket) -> None:
    message, fds, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, 1)
    if not message:
        sys.exit(0)
    orders.close()
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (_STDIN, _STDOUT):
        os.dup2(nothing, standard)
    (control,) = fds
    nursery.close_all_but({_STDIN, _STDOUT, _STDERR, control})
    os.environ.clear()
    os.environ.update(json.loads(message))
    nursery.main(control)
    sys.exit(0)


class WarmPopen(subprocess.Popen[Any]):
    """Starts processes as before, but the daemon's first warm parent, which is there already."""

    waiting: ForkedParent | None = None

    def __new__(cls, args: list[str], **how: Any) -> Any:
        parent = cls.waiting
        if parent is None or args[: len(command())] != command():
            return super().__new__(cls)
        cls.waiting = None
        (control,) = how["pass_fds"]
        parent.begin(control, how["env"])
        return parent


def _be_what_was_asked_for() -> None:
    """Take the standard descriptors and the arguments, then run as ``python -m`` does."""
    with socket.socket(fileno=int(os.environ.pop(CHANNEL_FD))) as channel:
        message, fds, _, _ = socket.recv_fds(channel, MAX_ORDER_BYTES, 3)
    for standard, fd in zip((_STDIN, _STDOUT, _STDERR), fds, strict=True):
        os.dup2(fd, standard)
        os.close(fd)
    module, *arguments = json.loads(message)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as in a terminal, also where nohup is above
    sys.argv[:] = [module, *arguments]
    sys.modules.pop(module, None)
    if module == TETHERED:
        WarmPopen.waiting = ForkedParent()
        subprocess.Popen = WarmPopen  # type: ignore[misc]
    _run(module)


def _run(module: str) -> None:
    """Run it to its end; to take apart all that was imported takes 0.2 s and helps nobody."""
    status: object = 1

    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status if isinstance(status, int) else int(status is not None))

    atexit.register(end)  # what it registers itself is called before
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code
        raise


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Nursery(int(sys.argv[1]), warm(WARM_MODULES)).serve()
    _be_what_was_asked_for()
