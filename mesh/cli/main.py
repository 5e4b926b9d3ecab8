"""The `hearthnet` command: registers the verbs and turns what they raise into exit codes.

Imports nothing heavy: `--help` must stay quick, so every verb imports what it needs when it runs.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from mesh import __version__
from mesh.cli import (
    bench,
    chat,
    config,
    deploy,
    doctor,
    down,
    evict,
    harvest,
    info,
    invite,
    jobs,
    join,
    keys,
    log,
    logs,
    members,
    model_files,
    pause,
    pull,
    restart,
    run,
    scale,
    service,
    status,
    steer,
    top,
    up,
)
from mesh.cli.glance import NO_DAEMON, three_lines
from mesh.cli.groups import VerbGroup
from mesh.cli.options import ask, locate_daemon
from mesh.cli.output import EXIT_CODES_HELP, FAILURE, report, say
from mesh.errors import NotRunning

# httpx's own command line, which imports as much again as httpx itself, and which it does without.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]


@dataclass
class _Flags:
    debug: bool = False


_ELSEWHERE = {"serve": "up", "start": "up", "stop": "down", "ps": "status"}
"""What Ollama, Docker and services call some verbs; verbs that look like them do something else."""


class _Verbs(VerbGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As typer does; one of another program, or typed without its group, is told its name."""
        typed = args[0]
        if typed not in self.commands:
            meant = [_ELSEWHERE[typed]] if typed in _ELSEWHERE else []
            for name, verb in self.commands.items():
                meant += [f"{name} {typed}"] if typed in getattr(verb, "commands", ()) else []
            if meant:
                ctx.fail(f"No such command {typed!r}. Did you mean {', '.join(map(repr, meant))}?")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="hearthnet",
    cls=_Verbs,
    help="Run one language model over the machines of a household.",
    epilog=EXIT_CODES_HELP,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing what draws boxes takes longer than all else of `--help`
)
app.command()(up.up)
app.command()(down.down)
app.command()(restart.restart)
app.command()(pause.pause)
app.command()(pause.resume)
app.command()(status.status)
app.command()(chat.chat)
app.command()(run.run)
app.command()(bench.bench)
app.command()(top.top)
app.command()(status.peers)
app.command()(status.models)
app.command()(pull.pull)
app.command("list")(model_files.list_models)
app.command()(model_files.show)
app.command()(model_files.rm)
app.command()(deploy.deploy)
app.command()(scale.scale)
app.command()(evict.evict)
app.command()(harvest.harvest)
app.command()(jobs.queue)
app.command()(jobs.kill)
app.command()(logs.logs)
app.command()(log.log)
app.command()(invite.invite)
app.command()(join.join)
app.add_typer(members.app, name="members")
app.add_typer(keys.app, name="keys")
app.add_typer(steer.app, name="steer")
app.add_typer(config.app, name="config")
app.add_typer(doctor.app, name="doctor")
app.command()(info.info)
app.add_typer(service.app, name="service")


@app.command()
def demo() -> None:
    """Show three nodes finding each other and answering together."""
    from mesh.cli.demo import main as play

    raise typer.Exit(play())


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"hearthnet {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def hearthnet(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Run one language model over the machines of a household."""
    context.obj.debug = debug
    if context.invoked_subcommand is None:
        try:
            say(three_lines(ask(locate_daemon(None, None, None), lambda client: client.status())))
        except NotRunning:
            say(NO_DAEMON)


def main() -> NoReturn:
    """The command's entry point."""
    _open_what_is_closed()
    for stream, errors in (
        (sys.stdout, "replace"),
        (sys.stderr, "replace"),
        (sys.stdin, "surrogateescape"),  # as in arguments; `mesh.client` refuses what is no text
    ):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)
    flags = _Flags()
    try:
        app(obj=flags)
    except Exception as error:  # noqa: BLE001 - the outermost edge: everything becomes an exit code
        code = FAILURE
        with suppress(OSError):  # where not even that can be printed
            code = report(error, debug=flags.debug)
        _leave_unprinted()
        sys.exit(code)
    sys.exit(0)


def _open_what_is_closed() -> None:
    """Python has None for a standard stream that whoever started this has closed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - to the end
            setattr(sys, name, stream)


def _leave_unprinted() -> None:
    """Python writes what is left once more as it ends, and where that fails as well it says so in
    its own words and exits with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


if __name__ == "__main__":
    main()
