"""Printing of the command line: answers on stdout, all else on stderr, plain without a terminal.

Names and texts that come from other machines are stripped of control characters first. Also the
only place that turns errors into exit codes.
"""

from __future__ import annotations

import errno
import json
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any, TextIO

from mesh.errors import ConfigError, FileRefused, MeshError
from mesh.terminal_text import printable

FAILURE = 1
EXIT_CODES_HELP = (
    "Exit codes: 0 ok, 1 failure, 2 usage, 3 no daemon runs, 4 not found, 5 no memory, no route"
    " or not ready in time, 6 refused, 130 interrupted."
)
_USAGE = 2
_EXIT_CODES = {
    "bad_request": _USAGE,
    "not_running": 3,
    "model_not_found": 4,
    "not_found": 4,
    "shard_unavailable": 5,
    "cache_full": 5,
    "not_enough_memory": 5,
    "not_ready": 5,
    "unauthorized": 6,
    "forbidden": 6,
    "experimental_disabled": 6,
    "pairing_rejected": 6,
    "untrusted_peer": 6,
    "peer_refused": 6,
    "token_rejected": 6,
}
_NAMED = 6
"""So many nodes are named in one place."""
_WHOSE = "See whose it is: what `sudo` made belongs to root."
_ROOM = "Free some room on that disk."
_REFUSALS = {
    errno.EACCES: _WHOSE,
    errno.EPERM: _WHOSE,
    errno.EISDIR: "See what lies there.",
    errno.ENOTDIR: "See what lies there.",
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EROFS: "That file system takes no writes: mount it for writing.",
}
"""What the system refuses a command, and what helps."""
_BREAKS = re.compile(r"[\n\t\u2028\u2029]")


def one_line(value: object) -> str:
    """`value` as one printable line."""
    return _BREAKS.sub(" ", printable(str(value)))


def say(text: str = "", *, end: str = "\n", to: TextIO | None = None) -> None:
    """Print now; stdout unless `to` is given."""
    stream = sys.stdout if to is None else to
    stream.write(printable(text) + end)
    stream.flush()


def note(text: str, *, end: str = "\n") -> None:
    """Print on stderr: whatever is not the answer."""
    say(text, end=end, to=sys.stderr)


def print_json(payload: Any) -> None:
    """One JSON document on stdout; escaped to ASCII, so that no name can act on a terminal."""
    say(json.dumps(payload, indent=2))


def print_json_line(payload: Any) -> None:
    """The same on a single line, for streams of them."""
    say(json.dumps(payload))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout: ruled on a terminal, aligned columns of text otherwise."""
    lines = [[one_line("-" if cell in {None, ""} else cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*columns, box=None, pad_edge=False)
        for line in lines:
            table.add_row(*(Text(cell) for cell in line))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(columns, *lines, strict=True)]
    for line in [list(columns), *lines]:
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def report(error: Exception, *, debug: bool = False) -> int:
    """Print what went wrong and what to do about it; the exit code that says the same."""
    if debug:
        traceback.print_exception(error)
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        error = FileRefused(
            f"{error.filename or 'What is printed'} cannot be used: {error.strerror}.",
            fix=_REFUSALS[error.errno],
        )
    if not isinstance(error, MeshError):
        note(f"error: hearthnet failed: {one_line(error) or type(error).__name__}")
        note("fix:   This is a bug; run again with --debug and report what it prints.")
        return FAILURE
    note(f"error: {one_line(error.message)} [{error.code}]")
    if error.fix:
        note(f"fix:   {one_line(error.fix)}")
    return exit_code(error)


def exit_code(error: MeshError) -> int:
    """See `EXIT_CODES_HELP`."""
    return _USAGE if isinstance(error, ConfigError) else _EXIT_CODES.get(error.code, FAILURE)


def few(names: Sequence[str]) -> str:
    """``attic, study``; of many names the first, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names) if more < 2 else f"{', '.join(names[:_NAMED])} and {more} more"


def route_line(route: Sequence[dict[str, Any]]) -> str:
    """``kitchen 0-11 -> attic 12-23``."""
    return " -> ".join(f"{hop['node']} {hop['layers']}" for hop in route)


def summary_line(extension: dict[str, Any], usage: dict[str, Any]) -> str:
    """Where an answer came from and how fast, from its `hearthnet` object and token counts."""
    timings = extension["timings"]
    parts = [route_line(extension["route"]) or "here"]
    if extension["fallback"]:
        parts.append("local fallback")
    if extension["failovers"]:
        parts.append(f"{extension['failovers']} failover(s)")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    prompt = f"{usage['prompt_tokens']} prompt tokens"
    parts.append(f"{prompt} ({cached} cached)" if cached else prompt)
    parts.append(f"{usage['completion_tokens']} tokens")
    if timings["first_token_ms"] is not None:
        parts.append(f"first token {timings['first_token_ms']:.0f} ms")
    if timings["tokens_per_second"] is not None:
        parts.append(f"{timings['tokens_per_second']:.1f} tok/s")
    return " · ".join(parts)
