"""The flags that several verbs share, and how a client verb finds its daemon."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from mesh.cli.entry import INTERRUPTED
from mesh.cli.output import note, print_json
from mesh.errors import BadRequest

if TYPE_CHECKING:
    from mesh.client import Client
    from mesh.paths import StatePaths
    from mesh.runtime import DaemonRecord

_T = TypeVar("_T")

StateDir = Annotated[
    Path | None,
    typer.Option("--state-dir", metavar="DIR", help="The node's state directory."),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The TOML file to read.")
]
Host = Annotated[
    str | None,
    typer.Option("--host", metavar="URL", help="Ask the daemon at this URL (HEARTHNET_HOST)."),
]
ApiPort = Annotated[
    int | None,
    typer.Option(
        "--api-port", metavar="N", min=1, max=65535, help="Ask the daemon on this local port."
    ),
]
Plain = Annotated[bool, typer.Option("--plain", help="Show the answer as it is, no Markdown.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Say where the time went.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


_FLAGS = {"state_dir": StateDir, "host": Host, "api_port": ApiPort, "json": Json}


@dataclass(frozen=True, slots=True)
class AskedDaemon:
    """The daemon that a verb's flags name, and how the verb prints what it says."""

    state_dir: Path | None = None
    host: str | None = None
    api_port: int | None = None
    json: bool = False

    def client(self) -> Client:
        """A client of it, to be closed. Raises as `locate_daemon`."""
        return locate_daemon(self.state_dir, self.host, self.api_port)

    def ask(self, question: Callable[[Client], Awaitable[_T]]) -> _T:
        """Its answer to one question. Raises as `client`, and what it answers with."""
        return ask(self.client(), question)

    def show(self, answer: _T, in_words: Callable[[_T], None]) -> None:
        """Print an answer as JSON where that was asked for, else in words."""
        if self.json:
            print_json(answer)
        else:
            in_words(answer)


def asks(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with --state-dir, --host, --api-port and --json for its parameter `daemon`."""
    signature = inspect.signature(verb, eval_str=True)
    own = [each for each in signature.parameters.values() if each.name != "daemon"]
    flags = [
        Parameter(
            name, Parameter.KEYWORD_ONLY, default=getattr(AskedDaemon(), name), annotation=hint
        )
        for name, hint in _FLAGS.items()
    ]

    def asking(**given: Any) -> None:
        daemon = AskedDaemon(**{name: given.pop(name) for name in _FLAGS})
        verb(daemon=daemon, **given)

    asking.__name__, asking.__doc__ = verb.__name__, verb.__doc__
    return with_parameters(asking, [*own, *flags])


def with_parameters(
    verb: Callable[..., None], parameters: Sequence[Parameter]
) -> Callable[..., None]:
    """The verb, which takes anything by its name, as one that takes these, each with its hint."""
    named = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in parameters]
    verb.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    verb.__annotations__ = {each.name: each.annotation for each in named}
    return verb


def path_from_root(model: str) -> str:
    """A model's path (PATH[=ID]) from the root, where it starts from this directory or from a home:
    the daemon runs elsewhere. A name as it is. Raises BadValue."""
    from mesh.paths import absolute

    if model not in {".", ".."} and not model.startswith(("./", "../", "~")):
        return model
    path, equals, name = model.partition("=")
    return f"{absolute(Path(path))}{equals}{name}"


def prompted(ask: Callable[..., _T], question: str, **how: Any) -> _T:
    """What `typer.confirm` or `typer.prompt` gives; Ctrl-C is an interruption there as anywhere."""
    try:
        return ask(question, err=True, **how)
    except typer.Abort as abort:
        if isinstance(abort.__context__, KeyboardInterrupt):
            note("")
            raise typer.Exit(INTERRUPTED) from None
        raise


def require_yes(question: str) -> None:
    """Ask whoever did not say --yes; a no ends the command. Raises BadRequest if nobody answers."""
    try:
        is_wanted = prompted(typer.confirm, question)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        note("")
        raise BadRequest("Nobody is there to say yes.", fix="Say it with --yes.") from None
    if not is_wanted:
        raise typer.Abort


def finite(number: float | None) -> float | None:
    """A flag's number as it is; nan and the infinities, which `min` lets pass, are refused."""
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"{number:g} is not a finite number.")
    return number


def state_paths(state_dir: Path | None) -> StatePaths:
    """The files of the state directory that is meant. Raises ConfigError."""
    from mesh.config import load_config
    from mesh.paths import StatePaths

    return StatePaths(load_config({"state_dir": state_dir}).config.state_dir)


def running_daemon(paths: StatePaths, otherwise: str) -> DaemonRecord:
    """The daemon that runs with this state directory. Raises NotRunning, with what is to be done
    `otherwise`; FileRefused."""
    from mesh.runtime import required_daemon

    return required_daemon(paths, f"{otherwise}, unless another --state-dir was meant.")


def locate_daemon(state_dir: Path | None, host: str | None, api_port: int | None) -> Client:
    """A client of the daemon that the flags name, else the environment, else the default one.

    Raises NotRunning, FileRefused and ConfigError.
    """
    from mesh.client import locate
    from mesh.config import client_host, load_config
    from mesh.paths import StatePaths
    from mesh.runtime import read_daemon

    config = load_config({"state_dir": state_dir}).config
    if host is None and api_port is not None:
        record = read_daemon(StatePaths(config.state_dir).runtime_file)
        is_own = record is not None and record.api_port == api_port
        host = record.api_url if record and is_own else f"http://127.0.0.1:{api_port}"
    if host is None and state_dir is None:
        host = client_host()
    return locate(host, config.state_dir, config.api_key)


async def patiently(answer: Awaitable[_T], slow_s: float = 2.0) -> _T:
    """The answer to what the daemon signs, with a word on stderr of what it may be waiting for."""
    import asyncio

    task = asyncio.ensure_future(answer)
    if not (await asyncio.wait([task], timeout=slow_s))[0]:
        note("A node that has just started signs nothing before it has heard from another member,")
        note("or has waited half a minute for one; this may take as long.")
    return await task


def ask(client: Client, question: Callable[[Client], Awaitable[_T]]) -> _T:
    """Run one question to the daemon and close the client."""

    import asyncio

    async def run() -> _T:
        async with client:
            return await question(client)

    return asyncio.run(run())
