"""`hearthnet service`: a node that is there whenever its machine is."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mesh.cli.groups import VerbGroup
from mesh.cli.options import Json, with_parameters
from mesh.cli.output import note, print_json, say
from mesh.cli.up import announce, arguments_of, prepare, up

if TYPE_CHECKING:
    from mesh.cli.service_managers import ServiceManager
    from mesh.config import Config

app = typer.Typer(
    cls=VerbGroup, help="Start this machine's node as you log in.", no_args_is_help=True
)


@app.callback()
def group() -> None:
    """Start this machine's node as you log in, and again should it fail.

    By systemd's user manager or launchd; nothing of the system itself is touched.
    """


def install(**flags: Any) -> None:
    """Have this machine's node run from now on: takes the flags of `hearthnet up`.

    What its variables mean here is kept as well; both are written down for the service.
    """
    from mesh.cli.detached import await_daemon, log_end
    from mesh.cli.service_managers import service_manager
    from mesh.config import heeded_variables, load_config
    from mesh.errors import AlreadyRunning
    from mesh.paths import StatePaths
    from mesh.runtime import sole_use

    file = flags.pop("config")
    config = load_config(flags, file=file).config
    paths = StatePaths(config.state_dir).create()
    manager = service_manager()
    if manager.file.exists():
        raise AlreadyRunning(
            f"The service is installed already, as {manager.file} says.",
            fix="`hearthnet service uninstall` first, or use it: `hearthnet service status`.",
        )
    manager.require()
    with sole_use(paths):
        pass
    prepare(config, paths)
    flags["state_dir"] = config.state_dir
    variables = heeded_variables()
    begin = log_end(paths)
    try:
        manager.install(_service(config, arguments_of(flags, file), variables))
        record = await_daemon(manager.pid, paths, begin)
    except BaseException:
        manager.uninstall()
        raise
    if record is None:
        manager.uninstall()
        note("it ended as it started, so nothing was installed")
        raise typer.Exit(1)
    announce(record)
    kept = f"; kept of this shell: {', '.join(sorted(variables))}" if variables else ""
    say(f"written: {manager.file}{kept}")
    say(f"{manager.name} starts it {manager.starts_when()}")


app.command()(
    with_parameters(
        install,
        [each for each in inspect.signature(up, eval_str=True).parameters.values()
         if each.name not in {"detach", "look_only"}],
    )
)  # fmt: skip


@app.command()
def uninstall() -> None:
    """Stop the node and remove its service; running answers move to other nodes first."""
    manager = _installed()
    manager.uninstall()
    note(f"removed: {manager.file}")
    note("what the node keeps stays: its key, its hearth, its models")


@app.command()
def status(as_json: Json = False) -> None:
    """Say whether the service is installed, whether it runs, and what starts it."""
    from mesh.cli.service_managers import service_manager

    manager = service_manager()
    is_installed = manager.file.exists()
    pid = manager.pid() if is_installed else None
    if as_json:
        starts = manager.starts_when() if is_installed else None
        print_json({
            "installed": is_installed, "manager": manager.name, "file": str(manager.file),
            "pid": pid, "starts": starts,
        })  # fmt: skip
    elif not is_installed:
        say("not installed; `hearthnet service install` has this machine's node run from now on")
    else:
        say(f"installed: {manager.file}")
        say(f"running: process {pid}" if pid else f"not running: `{manager.how_to_start()}`")
        say(f"{manager.name} starts it {manager.starts_when()}; `hearthnet logs` shows its words")


def _installed() -> ServiceManager:
    from mesh.cli.service_managers import installed_manager, service_manager
    from mesh.errors import NotFound

    manager = installed_manager()
    if manager is None:
        raise NotFound(
            f"No service is installed: there is no {service_manager().file}.",
            fix="`hearthnet service install` makes it.",
        )
    return manager


def _service(config: Config, arguments: list[str], variables: dict[str, str]) -> Any:
    from mesh.cli.detached import up_command
    from mesh.cli.down import ENDING_S
    from mesh.cli.service_managers import Service
    from mesh.paths import StatePaths

    return Service(
        command=tuple(up_command(arguments)),
        environment=variables,
        directory=Path.cwd(),
        log=StatePaths(config.state_dir).daemon_log.absolute(),
        stop_s=2 * config.distributed.host.drain_seconds + ENDING_S,
    )
