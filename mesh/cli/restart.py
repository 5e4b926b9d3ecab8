"""`hearthnet restart`: the daemon anew, as it was started, after an upgrade for instance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mesh.cli.down import StopTimeout, end_daemon
from mesh.cli.options import StateDir, running_daemon, state_paths
from mesh.cli.output import note

if TYPE_CHECKING:
    from mesh.cli.service_managers import ServiceManager
    from mesh.paths import StatePaths
    from mesh.runtime import DaemonRecord


def restart(state_dir: StateDir = None, timeout: StopTimeout = None) -> None:
    """Stop the daemon as `down` does, and start it again with the flags and the environment that
    it had.

    Where it ran in a terminal, the new one runs detached. One that could not start again, for want
    of a model for instance, is not stopped.
    """
    from mesh.cli.service_managers import manager_of

    paths = state_paths(state_dir)
    record = running_daemon(paths, "Start one with `hearthnet up`")
    manager = manager_of(record.pid)
    if manager is None:
        _restart_detached(record, paths, timeout)
    else:
        _restart_service(record, paths, manager, timeout)


def _restart_detached(record: DaemonRecord, paths: StatePaths, timeout: float | None) -> None:
    from mesh.cli.detached import log_end
    from mesh.cli.up import leave_running

    arguments, start = _as_started(record, paths)
    log_end(paths)  # one that cannot be written is better found out while the old one runs
    _require_startable(record, arguments, **start)
    end_daemon(record, timeout)
    leave_running(arguments, paths, **start)


def _restart_service(
    record: DaemonRecord, paths: StatePaths, manager: ServiceManager, timeout: float | None
) -> None:
    from mesh.cli.detached import await_daemon, log_end
    from mesh.cli.up import announce

    arguments, start = _as_started(record, paths)
    _require_startable(record, arguments, **start)
    end_daemon(record, timeout)
    begin = log_end(paths)
    manager.restart()
    started = await_daemon(manager.pid, paths, begin)
    if started is None:
        raise typer.Exit(1)
    announce(started)


def _as_started(record: DaemonRecord, paths: StatePaths) -> tuple[list[str], dict[str, Any]]:
    """With which arguments, and in which `environment` and `directory`."""
    import psutil

    process = psutil.Process(record.pid)
    arguments = _arguments(process.cmdline())
    here = Path(process.cwd())
    if not here.is_dir():  # removed since; what the flags name in it is gone as well
        here = paths.root
    return arguments, {"environment": process.environ(), "directory": here}


def _require_startable(
    record: DaemonRecord, arguments: Sequence[str], *, environment: Mapping[str, str],
    directory: Path,
) -> None:  # fmt: skip
    """Raise Exit, after the reason was shown, where a daemon could not be started so by now."""
    import subprocess

    from mesh.cli.detached import up_command

    command = up_command([*arguments, "--look-only"])
    done = subprocess.run(command, env=environment, cwd=directory, check=False)
    if done.returncode:
        note(f"it could not start again, so it was not stopped: process {record.pid} runs on")
        raise typer.Exit(done.returncode)


def _arguments(command: Sequence[str]) -> list[str]:
    """Those of the ``up`` by which a daemon was started. Raises NotRunning where it was not."""
    from mesh.errors import NotRunning

    if "up" not in command:
        raise NotRunning(
            "The daemon was not started by `hearthnet up`, so its flags are not known.",
            fix="`hearthnet down`, then start it as it was.",
        )
    return [each for each in command[command.index("up") + 1 :] if each != "--detach"]
