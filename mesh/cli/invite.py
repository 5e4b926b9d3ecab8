"""`hearthnet invite`: open a window for one more machine."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.options import AskedDaemon, asks, patiently
from mesh.cli.output import note, print_json, say
from mesh.errors import BadValue, PairingRejected, from_dict

if TYPE_CHECKING:
    from mesh.client import Client

_ENDINGS = {
    "used": "the code was used",
    "guessed": "somebody tried wrong codes",
    "expired": "its time is over",
    "closed": "another invitation took its place, or it was taken back",
}
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


@asks
def invite(
    daemon: AskedDaemon,
    *,
    level: Annotated[str, typer.Option(help="trusted (uses and serves shards) or member.")] = (
        "trusted"
    ),
    ttl: Annotated[str, typer.Option(metavar="TIME", help="How long it lasts: 90s, 3m, 1h.")] = (
        "3m"
    ),
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until somebody has joined.")
    ] = True,
) -> None:
    """Let one more machine into this hearth: print a code that is good once, and a QR code.

    Waits and says who joined; Ctrl-C takes the code back. With --json it does not wait.
    """
    ttl_s = seconds(ttl)
    if daemon.json:
        print_json(daemon.ask(lambda client: patiently(client.invite(level, ttl_s))))
        return
    daemon.ask(lambda client: _invite(client, level, ttl_s, wait=wait))


async def _invite(client: Client, level: str, ttl_s: float, *, wait: bool) -> None:
    window = await patiently(client.invite(level, ttl_s))
    if sys.stdout.isatty():
        say(window["qr"])
    say(f"On the other machine, within {ttl_s:g} s:")
    say(f"  hearthnet join {window['code']}")
    say("or, where multicast does not reach it:")
    say(f"  hearthnet join {window['code']} --peer {window['host']}:{window['port']}")
    if not wait:
        return
    outcome = await _ended(client, window["port"])
    if outcome["error"] is not None:
        raise from_dict(outcome["error"])
    if outcome["name"] is None:
        raise PairingRejected(
            f"Nobody joined: {_ENDINGS[outcome['ending']]}.",
            fix="Run `hearthnet invite` again.",
            param=outcome["ending"],
        )
    say(_joined(outcome, window["level"]))


def _joined(outcome: dict[str, Any], invited: str) -> str:
    # A daemon that was not started again since an upgrade says no levels.
    name, level, before = outcome["name"], outcome.get("level") or invited, outcome.get("before")
    if before is None:
        return f"{name} joined as {level}."
    if level != before:
        return f"{name} was in already, as {before}; it is {level} now."
    if level == invited:
        return f"{name} was in already, as {level}."
    return f"{name} was in already, and stays {level}: see `hearthnet members`."


async def _ended(client: Client, port: int) -> dict[str, Any]:
    import asyncio

    try:
        while (outcome := await client.invitation(port))["open"]:
            pass
    except asyncio.CancelledError:
        await client.close_invitation()
        note("the code is taken back")
        raise
    return outcome


def seconds(text: str) -> float:
    """``90``, ``90s``, ``3m`` or ``1h`` in seconds. Raises BadValue."""
    match = re.fullmatch(r"([0-9]{1,6})([smh]?)", text)
    if match is None:
        raise BadValue(f"{text!r} is no duration.", fix="For example 90s or 3m.", param="ttl")
    return float(match[1]) * _UNITS[match[2]]
