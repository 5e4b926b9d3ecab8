"""`hearthnet pause` and `hearthnet resume`: step aside for a while, as before a sleep."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from mesh.cli.options import StateDir
from mesh.cli.output import note


def pause(state_dir: StateDir = None) -> None:
    """Serve nobody for now: running answers move to other nodes. For sleep hooks."""
    _signal(state_dir, signal.SIGUSR1)
    note("paused; `hearthnet resume` serves again")


def resume(state_dir: StateDir = None) -> None:
    """Serve again after `pause`."""
    _signal(state_dir, signal.SIGUSR2)
    note("serving again")


def _signal(state_dir: Path | None, number: signal.Signals) -> None:
    from mesh.client import not_running
    from mesh.config import load_config
    from mesh.paths import StatePaths
    from mesh.runtime import read_daemon

    directory = load_config({"state_dir": state_dir}).config.state_dir
    record = read_daemon(StatePaths(directory).runtime_file)
    if record is None:
        raise not_running(f"No hearthnet daemon runs with the state directory {directory}.")
    os.kill(record.pid, number)
