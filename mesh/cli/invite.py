"""`hearthnet invite`: open a window for one more machine."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer

from mesh.cli.options import ApiPort, Host, Json, StateDir, ask, locate_daemon
from mesh.cli.output import print_json, say
from mesh.errors import BadValue

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def invite(
    *,
    level: Annotated[str, typer.Option(help="trusted (uses and serves shards) or member.")] = (
        "trusted"
    ),
    ttl: Annotated[str, typer.Option(metavar="TIME", help="How long it lasts: 90s, 3m, 1h.")] = (
        "3m"
    ),
    state_dir: StateDir = None,
    host: Host = None,
    api_port: ApiPort = None,
    json: Json = False,
) -> None:
    """Let one more machine into this hearth: print a code that is good once, and a QR code."""
    ttl_s = seconds(ttl)
    client = locate_daemon(state_dir, host, api_port)
    window = ask(client, lambda client: client.invite(level, ttl_s))
    if json:
        print_json(window)
        return
    if sys.stdout.isatty():
        say(window["qr"])
    say(f"On the other machine, within {ttl}:")
    say(f"  hearthnet join {window['code']}")
    say("or, where multicast does not reach it:")
    say(f"  hearthnet join {window['code']} --peer {window['host']}:{window['port']}")


def seconds(text: str) -> float:
    """``90``, ``90s``, ``3m`` or ``1h`` in seconds. Raises BadValue."""
    match = re.fullmatch(r"([0-9]{1,6})([smh]?)", text)
    if match is None:
        raise BadValue(f"{text!r} is no duration.", fix="For example 90s or 3m.", param="ttl")
    return float(match[1]) * _UNITS[match[2]]
