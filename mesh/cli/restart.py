"""`hearthnet restart`: the daemon anew, as it was started, after an upgrade for instance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mesh.cli.down import NOTHING_TO_STOP, StopTimeout, end_daemon
from mesh.cli.options import StateDir, running_daemon, state_paths

if TYPE_CHECKING:
    from mesh.cli.service_managers import ServiceManager
    from mesh.paths import StatePaths
    from mesh.runtime import DaemonRecord


def restart(state_dir: StateDir = None, timeout: StopTimeout = None) -> None:
    """Stop the daemon as `down` does, and start it again with the flags that it had.

    Where it ran in a terminal, the new one runs detached.
    """
    from mesh.cli.service_managers import manager_of

    paths = state_paths(state_dir)
    record = running_daemon(paths, NOTHING_TO_STOP)
    manager = manager_of(record.pid)
    if manager is None:
        _restart_detached(record, paths, timeout)
    else:
        _restart_service(record, paths, manager, timeout)


def _restart_detached(record: DaemonRecord, paths: StatePaths, timeout: float | None) -> None:
    import psutil

    from mesh.cli.detached import log_end
    from mesh.cli.up import leave_running

    process = psutil.Process(record.pid)
    arguments = _arguments(process.cmdline())
    environment, here = process.environ(), Path(process.cwd())
    if not here.is_dir():  # removed since; what the flags name in it is gone as well
        here = paths.root
    log_end(paths)  # one that cannot be written is better found out while the old one runs
    end_daemon(record, timeout)
    leave_running(arguments, paths, environment=environment, directory=here)


def _restart_service(
    record: DaemonRecord, paths: StatePaths, manager: ServiceManager, timeout: float | None
) -> None:
    from mesh.cli.detached import await_daemon, log_end
    from mesh.cli.up import announce

    end_daemon(record, timeout)
    begin = log_end(paths)
    manager.restart()
    started = await_daemon(manager.pid, paths, begin)
    if started is None:
        raise typer.Exit(1)
    announce(started)


def _arguments(command: Sequence[str]) -> list[str]:
    """Those of the ``up`` by which a daemon was started. Raises NotRunning where it was not."""
    from mesh.errors import NotRunning

    if "up" not in command:
        raise NotRunning(
            "The daemon was not started by `hearthnet up`, so its flags are not known.",
            fix="`hearthnet down`, then start it as it was.",
        )
    return [each for each in command[command.index("up") + 1 :] if each != "--detach"]
