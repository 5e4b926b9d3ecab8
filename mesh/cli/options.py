"""The flags that several verbs share, and how a client verb finds its daemon."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from mesh.client import Client

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


def finite(number: float | None) -> float | None:
    """A flag's number as it is; nan and the infinities, which `min` lets pass, are refused."""
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"{number:g} is not a finite number.")
    return number


def locate_daemon(state_dir: Path | None, host: str | None, api_port: int | None) -> Client:
    """A client of the daemon that the flags name, else the environment, else the default one.

    Raises NotRunning and ConfigError.
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
    return locate(host=host, state_dir=config.state_dir, api_key=config.api_key)


def ask(client: Client, question: Callable[[Client], Awaitable[_T]]) -> _T:
    """Run one question to the daemon and close the client."""

    import asyncio

    async def run() -> _T:
        async with client:
            return await question(client)

    return asyncio.run(run())
