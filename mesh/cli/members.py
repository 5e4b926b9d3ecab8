"""`hearthnet members`: who is in this hearth, and changing that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from mesh.cli.groups import VerbGroup
from mesh.cli.options import AskedDaemon, Yes, asks, patiently, prompted, require_yes
from mesh.cli.output import note, one_line, print_table, say
from mesh.errors import NotFound

_FORKED = (
    "{name} has signed two histories and decides nothing until that is settled: `hearthnet members"
    " readmit {name}` if its log was restored from a backup, `hearthnet members revoke {name}` if"
    " its key was copied."
)

app = typer.Typer(
    cls=VerbGroup, help="Who is in this hearth, and at which trust level.", no_args_is_help=False
)

Member = Annotated[str, typer.Argument(help="A name, or an id.")]
Level = Annotated[str | None, typer.Option("--to", help="member, trusted or anchor.")]


@app.callback(invoke_without_command=True)
@asks
def members(daemon: AskedDaemon, context: typer.Context) -> None:
    """Show who is in this hearth, at which trust level, and which decisions wait for a vote."""
    if context.invoked_subcommand is None:
        daemon.show(daemon.ask(lambda client: client.hearth()), show)


def require_known(who: str, nodes: Iterable[dict[str, Any]]) -> None:
    """Raise NotFound where none of these has that name, or an id that begins so."""
    from mesh.identity.naming import nodes_meant

    known = [
        (node["node_id"], name)
        for node in nodes
        for name in (node["name"], node.get("let_in_as"))
        if name
    ]
    if not nodes_meant(who, known) and not any(node.startswith(who) for node, _ in known):
        raise NotFound(f"Nobody here is called {who!r}.", fix="See `hearthnet members`.")


def show(hearth: dict[str, Any]) -> None:
    """Print what `GET /mesh/v1/hearth` returned."""
    say(f"{hearth['name']}  ({hearth['id']})")
    rows = [[_shown(m), m["level"], _standing(m), m["fingerprint"]] for m in hearth["members"]]
    print_table(["name", "level", "state", "fingerprint"], rows)
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


def _shown(member: dict[str, Any]) -> str:
    before = member.get("let_in_as")  # not said by earlier daemons
    return f"{member['name']} (let in as {before})" if before else str(member["name"])


def _standing(member: dict[str, Any]) -> str:
    """``up``, ``this node``, ``away for 3 h``."""
    from datetime import UTC, datetime

    from mesh.units import since

    if member["self"]:
        return "this node"
    state, last_seen = member.get("state", ""), member.get("last_seen")
    if last_seen is None:  # nor is either said by earlier daemons
        return str(state)
    return f"{state} for {since(last_seen, datetime.now(UTC))}"


@app.command()
@asks
def promote(daemon: AskedDaemon, member: Member, *, to: Level = None) -> None:
    """Raise a member's trust level, by one unless --to says which."""
    _change(daemon, "promote", member, level=to)


@app.command()
@asks
def demote(daemon: AskedDaemon, member: Member, *, to: Level = None) -> None:
    """Lower a member's trust level, by one unless --to says which."""
    _change(daemon, "demote", member, level=to)


@app.command()
@asks
def revoke(
    daemon: AskedDaemon,
    member: Member,
    *,
    reason: Annotated[str, typer.Option(help="Why, for the record.")] = "",
    yes: Yes = False,
) -> None:
    """Put a member out for good: its links are cut everywhere, its key never comes back."""
    if not yes:
        require_known(member, daemon.ask(lambda client: client.hearth())["members"])
        require_yes(f"Put {one_line(member)} out for good? Its key never comes back.")
    _change(daemon, "revoke", member, reason=reason)


@app.command()
@asks
def leave(daemon: AskedDaemon, *, yes: Yes = False) -> None:
    """Take this node out of the hearth, into a new one of its own; it can `join` another then.

    Its key never comes back into the hearth that it leaves. Models on the disk, settings and API
    keys stay. `hearthnet pause` before has running answers move first. `hearthnet members revoke`
    puts another node out.
    """
    if not yes:
        name = one_line(daemon.ask(lambda client: client.hearth())["name"])
        require_yes(f"Take this node out of {name!r} for good? Its key never comes back there.")
    daemon.show(daemon.ask(lambda client: patiently(client.leave_hearth())), _left)


def _left(outcome: dict[str, Any]) -> None:
    remain, told = [member["name"] for member in outcome["remain"]], outcome["told"]
    say(f"This node is out of {outcome['left']!r}. In it remain: {', '.join(remain) or 'nobody'}.")
    if told:
        say(f"Told before it went: {', '.join(told)}; whoever was not there hears of it from them.")
    elif remain:
        say(
            "None of them was there to hear of it: who does not know it yet lists this node until"
            " an anchor there runs `hearthnet members revoke` for it."
        )
    say(f"It is in {outcome['founded']!r} now, alone; `hearthnet join CODE` takes it elsewhere.")
    note(f"recovery code of the new hearth (shown once; write it down): {outcome['recovery_code']}")


@app.command()
@asks
def readmit(daemon: AskedDaemon, member: Member) -> None:
    """Let a member decide again that signed two histories because its log was restored."""
    _change(daemon, "readmit", member)


@app.command()
@asks
def recover(
    daemon: AskedDaemon,
    code: Annotated[
        str | None, typer.Argument(help="The recovery code; asked for when it is left out.")
    ] = None,
) -> None:
    """Make this machine the only anchor, with the code that was printed at the founding.

    For a hearth whose anchors are lost, stolen, or at odds. Members stay members.
    """
    # Left out of the command line, it is in no shell's history.
    secret = code if code is not None else prompted(typer.prompt, "Recovery code")
    daemon.show(daemon.ask(lambda client: patiently(client.recover(secret))), _recovered)


def _recovered(outcome: dict[str, Any]) -> None:
    say(f"{outcome['anchor']['name']} is the only anchor now.")
    if outcome["demoted"]:
        say(f"No anchors any more, but still members: {', '.join(outcome['demoted'])}.")


def _change(daemon: AskedDaemon, act: str, member: str, **details: Any) -> None:
    outcome = daemon.ask(lambda client: patiently(client.change_member(act, member, **details)))
    daemon.show(outcome, _changed)


def _changed(outcome: dict[str, Any]) -> None:
    name, action = outcome["member"]["name"], outcome["action"]
    if not outcome["done"]:
        say(f"Your vote counts; {outcome['votes_missing']} more anchor(s) have to do the same.")
    elif action == "revoke":
        say(f"{name} is out.")
    elif action == "readmit":
        say(f"{name} decides again.")
    else:
        say(f"{name} is {action} now.")
