"""Daemons and commands for tests, forked from one process that has imported everything
(`tests.warm.python`)."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from tempfile import TemporaryFile
from typing import IO, cast

from mesh.cli.local_node import LocalNode
from mesh.config import ENV_PREFIX
from mesh.processes.nursery import MAX_ORDER_BYTES, ForkOrder

START_LIMIT_S = 120.0
_TITLE_ROOM = "-" * 80
_STDERR = 2


class ForkedDaemon:
    """A process that this one did not start itself, as far as `LocalNode` asks of one."""

    def __init__(self, report: socket.socket) -> None:
        self.returncode: int | None = None
        self._report = report
        report.settimeout(START_LIMIT_S)
        message, fds, _, _ = socket.recv_fds(report, MAX_ORDER_BYTES, 1)
        self.pid: int = json.loads(message)["pid"]
        (self._handle,) = fds
        # Who does not wait for its end has nothing to close, as with `subprocess.Popen`.
        weakref.finalize(self, report.close)

    def poll(self) -> int | None:
        """As `subprocess.Popen` does."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As `subprocess.Popen` does."""
        if self.returncode is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"daemon {self.pid}", timeout or 0.0)
            message = self._report.recv(MAX_ORDER_BYTES)
            self.returncode = json.loads(message)["status"] if message else -signal.SIGKILL
            self._report.close()
            os.close(self._handle)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """As `subprocess.Popen` does."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        """As `subprocess.Popen` does."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """As `subprocess.Popen` does."""
        self.send_signal(signal.SIGKILL)


class WarmPython:
    """The process that forks, and this side's end of its socket."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm.python", str(theirs.fileno()), _TITLE_ROOM],
                env={**_inherited(), "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        atexit.register(self.end)

    def fork(
        self, module: str, arguments: list[str], environment: Mapping[str, str], stdio: list[int]
    ) -> ForkedDaemon:
        """``python -m module arguments`` with those standard input, output and error."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        report, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, its_end:
            order = ForkOrder(module, dict(environment)).packed()
            fds = (theirs.fileno(), _STDERR, its_end.fileno())
            socket.send_fds(self._control, [order], fds)
            socket.send_fds(ours, [json.dumps([module, *arguments]).encode()], stdio)
        return ForkedDaemon(report)

    def end(self) -> None:
        """End it, and with it whatever it has forked."""
        atexit.unregister(self.end)
        self._control.close()
        self._process.wait(START_LIMIT_S)


class _Shared:
    python: WarmPython | None = None
    starting = threading.Lock()


class WarmNode(LocalNode):
    """A daemon that is forked, unless something in its environment changes what is imported."""

    def launch(
        self, command: list[str], environment: dict[str, str], tether: int, log: int
    ) -> subprocess.Popen[bytes]:
        """See `LocalNode`."""
        inherited = _inherited()
        own = {k: v for k, v in environment.items() if not k.startswith(ENV_PREFIX)}
        if sys.platform != "linux" or own != inherited:
            return super().launch(command, environment, tether, log)
        _, _, _, module, *arguments = command
        daemon = _shared().fork(module, arguments, environment, [tether, log, log])
        return cast("subprocess.Popen[bytes]", daemon)


def command(
    *arguments: str,
    stdin: str = "",
    timeout: float = 120.0,
    environment: Mapping[str, str] = os.environ,
) -> subprocess.CompletedProcess[str]:
    """What ``hearthnet arguments`` says in this environment. For what a command does to a node;
    what the command itself is, from its start to Ctrl-C, is tested on a process of its own."""
    program = ["-m", "mesh.cli.main", *arguments]
    if sys.platform != "linux":
        return subprocess.run(
            [sys.executable, *program], input=stdin, capture_output=True, text=True,
            errors="surrogateescape", env=environment, timeout=timeout, check=False,
        )  # fmt: skip
    with _text_file() as given, _text_file() as out, _text_file() as err:
        given.write(stdin)
        given.seek(0)
        stdio = [each.fileno() for each in (given, out, err)]
        forked = _shared().fork("mesh.cli.main", [*arguments], environment, stdio)
        try:
            status = forked.wait(timeout)
        finally:
            forked.kill()
            forked.wait(START_LIMIT_S)
        for each in (out, err):
            each.seek(0)
        return subprocess.CompletedProcess(program, status, out.read(), err.read())


def _text_file() -> IO[str]:
    return TemporaryFile("w+", errors="surrogateescape", newline="")


def _shared() -> WarmPython:
    with _Shared.starting:
        if _Shared.python is None:
            _Shared.python = WarmPython()
        return _Shared.python


def _inherited() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
