"""A daemon for whoever wants to ask one and has none: offered on a terminal, started on a yes."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mesh.cli.options import AskedDaemon, prompted, state_paths
from mesh.cli.output import note
from mesh.errors import MeshError

if TYPE_CHECKING:
    from mesh.client import Client

START_HELP = "Start a daemon where none runs, without asking."
StartDaemon = Annotated[bool, typer.Option("--yes", "-y", help=START_HELP)]

_PATIENCE_S = 120.0
_POLL_S = 0.2


def offer_daemon(daemon: AskedDaemon, *, yes: bool) -> None:
    """Start one where the flags mean this machine's and none runs: with `yes`, or when somebody at
    the terminal says so. Else nothing happens, and whoever asks is told that none runs.

    Returns once it answers, and can answer with a model that it holds. Raises as `hearthnet up`.
    """
    directory = _where_none_runs(daemon)
    if directory is None or (daemon.state_dir is None and _is_service_stopped()):
        return
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return
        question = "No hearthnet runs on this machine. Start one?"
        if not prompted(typer.confirm, question, default=True):
            return
    import asyncio

    _start(directory)
    asyncio.run(_until_it_can_answer(daemon.client()))


def _where_none_runs(daemon: AskedDaemon) -> Path | None:
    """The state directory that the flags mean, unless a daemon runs there or one elsewhere is
    meant."""
    from mesh.config import client_host
    from mesh.runtime import read_daemon

    if daemon.host is not None or daemon.api_port is not None:
        return None
    if daemon.state_dir is None and client_host() is not None:
        return None
    paths = state_paths(daemon.state_dir)
    return paths.root if read_daemon(paths.runtime_file) is None else None


def _is_service_stopped() -> bool:
    """Whether there is a service, which then is what to start; that is said."""
    from mesh.cli.service_managers import installed_manager

    manager = installed_manager()
    if manager is None:
        return False
    note(f"The service is installed and does not run; `{manager.how_to_start()}` starts it.")
    return True


def _start(directory: Path) -> None:
    from mesh.cli.up import arguments_of, leave_running, prepare
    from mesh.config import load_config
    from mesh.paths import StatePaths

    flags = {"state_dir": directory}
    config = load_config(flags).config
    paths = StatePaths(config.state_dir).create()
    with redirect_stdout(sys.stderr):  # stdout is for the answer
        prepare(config, paths)
        leave_running(arguments_of(flags, None), paths)
    note("It runs on: `hearthnet down` stops it.")


async def _until_it_can_answer(client: Client) -> None:
    """Until a model that is held here can be asked; a node that holds none is not waited for."""
    import asyncio

    async with client:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while True:
                    held = [row for row in await client.models() if row["local"]]
                    if not held or any(row["runnable"] for row in held):
                        return
                    await asyncio.sleep(_POLL_S)
        except (TimeoutError, MeshError):  # whoever asks is told what is wrong
            return
