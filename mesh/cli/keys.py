"""`hearthnet keys`: who may use the HTTP API, for what and how much.

Asks the daemon; where none runs, reads and writes its file.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from mesh.cli.groups import VerbGroup
from mesh.cli.options import AskedDaemon, ask, asks, state_paths
from mesh.cli.output import note, print_table, say
from mesh.errors import BadValue, NotRunning

if TYPE_CHECKING:
    from mesh.client import Client
    from mesh.identity.api_keys import ApiKeys

_T = TypeVar("_T")

app = typer.Typer(
    cls=VerbGroup, help="Keys for the HTTP API: scopes, quotas, revoking.", no_args_is_help=False
)

_QUOTAS = {"requests": "requests_per_minute", "tokens": "tokens_per_day"}


@app.callback(invoke_without_command=True)
@asks
def keys(daemon: AskedDaemon, context: typer.Context) -> None:
    """List the keys; see the verbs below for making and revoking them."""
    if context.invoked_subcommand is None:
        _list(daemon)


@app.command("list")
@asks
def listing(daemon: AskedDaemon) -> None:
    """Show every key's id, name, scopes and quotas; the keys themselves are kept nowhere."""
    _list(daemon)


def _list(daemon: AskedDaemon) -> None:
    from mesh.identity.api_keys import shown

    found = _either(
        daemon,
        lambda client: client.keys(),
        lambda keys: [shown(key) for key in keys.keys],
    )
    rows = [[key["id"], key["name"], _rights(key), _limits(key)] for key in found]
    daemon.show({"keys": found}, lambda _: print_table(["id", "name", "may", "at most"], rows))


@app.command()
@asks
def create(
    daemon: AskedDaemon,
    *,
    name: Annotated[str, typer.Option(help="Whose it is, or for what.")] = "key",
    scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIST",
            help="Of chat (the default), interventions and admin, with commas. Repeatable.",
        ),
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            metavar="requests=N|tokens=N",
            help="Requests per minute; tokens per day, of chat and not of jobs. Repeatable.",
        ),
    ] = None,
    trusted: Annotated[
        bool, typer.Option("--trusted", help="Its jobs may use what others' may not.")
    ] = False,
) -> None:
    """Make a key and show it, this once."""
    from mesh.clock import SystemClock
    from mesh.identity.api_keys import Quota, Scope, shown

    scopes = [part.strip() for each in scope or ["chat"] for part in each.split(",")]
    limits = _parse(quota or [])

    def directly(keys: ApiKeys) -> dict[str, Any]:
        parsed = frozenset(map(Scope.parse, scopes))
        key, text = keys.create(name, parsed, Quota(**limits), SystemClock(), trusted=trusted)
        return {**shown(key), "key": text}

    made = _either(
        daemon,
        lambda client: client.create_key(name, scopes, trusted=trusted, **limits),
        directly,
    )
    daemon.show(made, lambda _: say(made["key"]))
    if not daemon.json:
        note(f"shown once: keep it now; its id is {made['id']}, see `hearthnet keys`")


@app.command()
@asks
def revoke(
    daemon: AskedDaemon,
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `hearthnet keys` shows it.")],
) -> None:
    """Take a key back; its next request is refused."""
    from mesh.identity.api_keys import shown

    gone = _either(
        daemon,
        lambda client: client.revoke_key(key_id),
        lambda keys: shown(keys.revoke(key_id)),
    )
    daemon.show(gone, lambda _: say(f"{gone['name']} ({gone['id']}) is revoked."))


def _either(
    daemon: AskedDaemon,
    asked: Callable[[Client], Awaitable[_T]],
    directly: Callable[[ApiKeys], _T],
) -> _T:
    """Ask the daemon, or use its file when it is this machine's and does not run."""
    try:
        client = daemon.client()
    except NotRunning:
        from mesh.identity.api_keys import ApiKeys

        return directly(ApiKeys.load(state_paths(daemon.state_dir).create().api_keys))
    return ask(client, asked)


def _parse(quotas: list[str]) -> dict[str, int]:
    from mesh.identity.api_keys import MAX_QUOTA

    limits: dict[str, int] = {}
    for text in quotas:
        what, _, number = text.partition("=")
        is_number = number.isdecimal() and len(number) <= len(str(MAX_QUOTA))
        if what not in _QUOTAS or not is_number or not 0 < int(number) <= MAX_QUOTA:
            raise BadValue(
                f"{text!r} is no quota.",
                fix="For example --quota requests=60 --quota tokens=100000.",
                param="quota",
            )
        limits[_QUOTAS[what]] = int(number)
    return limits


def _rights(key: dict[str, Any]) -> str:
    return ", ".join(key["scopes"]) + (" (trusted)" if key["trusted"] else "")


def _limits(key: dict[str, Any]) -> str:
    words = {"requests_per_minute": "requests a minute", "tokens_per_day": "tokens a day"}
    return ", ".join(f"{key[name]} {word}" for name, word in words.items() if key[name])
