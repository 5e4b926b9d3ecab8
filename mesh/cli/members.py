"""`hearthnet members`: who is in this hearth, and changing that."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mesh.cli.options import ApiPort, Host, Json, StateDir, ask, locate_daemon
from mesh.cli.output import print_json, print_table, say

_FORKED = (
    "{name} has signed two histories and decides nothing until that is settled: `hearthnet members"
    " readmit {name}` if its log was restored from a backup, `hearthnet members revoke {name}` if"
    " its key was copied."
)

app = typer.Typer(help="Who is in this hearth, and at which trust level.", no_args_is_help=False)

Member = Annotated[str, typer.Argument(help="A name, or an id.")]
Level = Annotated[str | None, typer.Option("--to", help="member, trusted or anchor.")]


@app.callback(invoke_without_command=True)
def members(
    context: typer.Context,
    *,
    state_dir: StateDir = None,
    host: Host = None,
    api_port: ApiPort = None,
    json: Json = False,
) -> None:
    """Show who is in this hearth, at which trust level, and which decisions wait for a vote."""
    if context.invoked_subcommand is not None:
        return
    hearth = ask(locate_daemon(state_dir, host, api_port), lambda client: client.hearth())
    if json:
        print_json(hearth)
    else:
        show(hearth)


def show(hearth: dict[str, Any]) -> None:
    """Print what `GET /mesh/v1/hearth` returned."""
    say(f"{hearth['name']}  ({hearth['id']})")
    rows = [
        [m["name"] + (" (this node)" if m["self"] else ""), m["level"], m["fingerprint"]]
        for m in hearth["members"]
    ]
    print_table(["name", "level", "fingerprint"], rows)
    for vote in hearth["pending"]:
        say(
            f"waits for {vote['needed'] - len(vote['voters'])} more anchor(s): {vote['action']}"
            f" {vote['name']}, wished by {', '.join(vote['voters'])}"
        )
    for gone in hearth["out"]:
        say(f"{gone['why']}: {gone['name']}")
    for member in hearth["members"]:
        if member["forked"]:
            say(_FORKED.format(**member))


@app.command()
def promote(
    member: Member,
    *,
    to: Level = None,
    state_dir: StateDir = None,
    host: Host = None,
    api_port: ApiPort = None,
    json: Json = False,
) -> None:
    """Raise a member's trust level, by one unless --to says which."""
    client = locate_daemon(state_dir, host, api_port)
    _tell(ask(client, lambda client: client.change_member("promote", member, level=to)), json)


@app.command()
def demote(
    member: Member,
    *,
    to: Level = None,
    state_dir: StateDir = None,
    host: Host = None,
    api_port: ApiPort = None,
    json: Json = False,
) -> None:
    """Lower a member's trust level, by one unless --to says which."""
    client = locate_daemon(state_dir, host, api_port)
    _tell(ask(client, lambda client: client.change_member("demote", member, level=to)), json)


@app.command()
def revoke(
    member: Member,
    *,
    reason: Annotated[str, typer.Option(help="Why, for the record.")] = "",
    state_dir: StateDir = None,
    host: Host = None,
    api_port: ApiPort = None,
    json: Json = False,
) -> None:
    """Put a member out for good: its links are cut everywhere, its key never comes back."""
    client = locate_daemon(state_dir, host, api_port)
    _tell(ask(client, lambda client: client.change_member("revoke", member, reason=reason)), json)


@app.command()
def readmit(
    member: Member,
    *,
    state_dir: StateDir = None,
    host: Host = None,
    api_port: ApiPort = None,
    json: Json = False,
) -> None:
    """Let a member decide again that signed two histories because its log was restored."""
    client = locate_daemon(state_dir, host, api_port)
    _tell(ask(client, lambda client: client.change_member("readmit", member)), json)


@app.command()
def recover(
    code: Annotated[
        str | None, typer.Argument(help="The recovery code; asked for when it is left out.")
    ] = None,
    *,
    state_dir: StateDir = None,
    host: Host = None,
    api_port: ApiPort = None,
    json: Json = False,
) -> None:
    """Make this machine the only anchor, with the code that was printed at the founding.

    For a hearth whose anchors are lost, stolen, or at odds. Members stay members.
    """
    client = locate_daemon(state_dir, host, api_port)
    # Left out of the command line, it is in no shell's history.
    secret = code if code is not None else typer.prompt("Recovery code", err=True)
    outcome = ask(client, lambda client: client.recover(secret))
    if json:
        print_json(outcome)
        return
    say(f"{outcome['anchor']['name']} is the only anchor now.")
    if outcome["demoted"]:
        say(f"No anchors any more, but still members: {', '.join(outcome['demoted'])}.")


def _tell(outcome: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(outcome)
        return
    name, action = outcome["member"]["name"], outcome["action"]
    if not outcome["done"]:
        say(f"Your vote counts; {outcome['votes_missing']} more anchor(s) have to do the same.")
    elif action == "revoke":
        say(f"{name} is out.")
    elif action == "readmit":
        say(f"{name} decides again.")
    else:
        say(f"{name} is {action} now.")
