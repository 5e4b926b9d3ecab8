"""A daemon that runs on after the command that started it, and its words while it starts."""

from __future__ import annotations

import math
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from mesh.cli.output import note
from mesh.logs import MAX_FILE_BYTES, move_aside
from mesh.paths import StatePaths
from mesh.processes.python import running
from mesh.runtime import DaemonRecord, read_daemon

_PATIENCE_S = 10.0
_POLL_S = 0.1


def up_command(arguments: Sequence[str]) -> list[str]:
    """What runs ``hearthnet up`` with these arguments, whatever the PATH says, and whatever lies
    where it is started."""
    return running("mesh.cli.main", "up", *arguments)


def start_detached(
    arguments: Sequence[str],
    paths: StatePaths,
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> DaemonRecord:
    """Start ``hearthnet up`` in a session of its own; its record once it answers.

    `environment` and `directory` are this process's own where nobody names others. Raises Exit with
    its exit code where it ended instead, after its last words were shown.
    """
    begin = log_end(paths)
    process: subprocess.Popen[bytes] | None = None

    def pid() -> int | None:
        return process.pid if process is not None and process.poll() is None else None

    try:
        with paths.daemon_log.open("ab") as output, _uninterrupted():
            process = subprocess.Popen(
                up_command(arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
                cwd=directory,
            )
        record = await_daemon(pid, paths, begin)
    except KeyboardInterrupt:
        if process is not None:
            process.terminate()
            note("it was still starting, and is stopped")
        raise
    if record is None:
        raise typer.Exit(process.returncode or 1)
    return record


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C in the block counts behind it: a process that is just started is nobody's until then.

    The new process does not inherit this. Only the main thread is interrupted by Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def log_end(paths: StatePaths) -> int:
    """Where what a daemon prints from now on begins in its log, in bytes; one that is full is moved
    aside first. Raises OSError for one that cannot be written."""
    log = paths.daemon_log
    if log.exists() and log.stat().st_size > MAX_FILE_BYTES:
        move_aside(log)
    with log.open("ab") as stream:
        return stream.tell()


def await_daemon(
    pid: Callable[[], int | None], paths: StatePaths, begin: int
) -> DaemonRecord | None:
    """The record of the daemon that is process `pid()`, once it answers; None once there is no such
    process, after what it printed behind byte `begin` of the log was shown."""
    patience = time.monotonic() + _PATIENCE_S
    while (running := pid()) is not None:
        record = read_daemon(paths.runtime_file)
        if record is not None and record.pid == running:
            return record
        # However long it takes: a large checkpoint on a slow disk is hashed for many minutes.
        if time.monotonic() > patience:
            patience = math.inf
            note(f"it is still starting (process {running}); what it does is in {paths.daemon_log}")
        time.sleep(_POLL_S)
    with paths.daemon_log.open("rb") as output:
        output.seek(begin)
        note(output.read().decode(errors="replace"), end="")
    return None
