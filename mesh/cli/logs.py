"""`hearthnet logs`: what the daemon printed, also before it was last started."""

from __future__ import annotations

import codecs
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from mesh.cli.options import StateDir, state_paths
from mesh.cli.output import note, print_json_line, say
from mesh.logs import fields_of, log_files

_POLL_S = 0.2


def logs(
    state_dir: StateDir = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=0, help="The last so many.")
    ] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is printed from now on.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each line as a JSON object.")
    ] = False,
) -> None:
    """Show what the daemon printed; what the hearth's nodes have signed is in `log`.

    There is a log of a daemon that was started with `--detach` or as a service.
    """
    path, stream = _opened(state_dir)

    def show(line: str) -> None:
        if as_json:
            print_json_line(fields_of(line))
        else:
            say(line)

    try:
        for line in _last(path, stream, lines):
            show(line)
        text, begun = codecs.getincrementaldecoder("utf-8")("replace"), ""
        while follow:
            was_moved = not _is_at(path, stream)
            if os.fstat(stream.fileno()).st_size < stream.tell():
                stream.seek(0)  # it was emptied, as some rotate logs
            *whole, begun = (begun + text.decode(stream.read())).split("\n")
            for line in whole:
                show(line)
            if was_moved:
                stream.close()
                stream = path.open("rb")
            else:
                time.sleep(_POLL_S)
    finally:
        stream.close()


def _opened(state_dir: Path | None) -> tuple[Path, BinaryIO]:
    """Raises NotFound."""
    from mesh.errors import NotFound
    from mesh.runtime import read_daemon

    paths = state_paths(state_dir)
    record = read_daemon(paths.runtime_file)
    if record is not None and not record.log:
        raise NotFound(
            f"The daemon (process {record.pid}) prints where it was started, not to a log.",
            fix="Read it there, or have it run detached from now on: `hearthnet restart`.",
        )
    try:
        stream = paths.daemon_log.open("rb")
    except FileNotFoundError:
        raise NotFound(
            f"There is no {paths.daemon_log}: no daemon ran detached here.",
            fix="`hearthnet up --detach` and `hearthnet service install` start one that has a log.",
        ) from None
    if record is None:
        note("no daemon runs now; this is what the last one printed")
    return paths.daemon_log, stream


def _last(path: Path, newest: BinaryIO, count: int) -> Iterator[str]:
    """The last `count` lines, also of files that were moved aside; reads `newest` to its end."""
    kept = deque(newest.read().splitlines(), maxlen=count)
    for older in log_files(path)[1:]:
        missing = count - len(kept)
        if not missing:
            break
        kept.extendleft(reversed(deque(older.read_bytes().splitlines(), maxlen=missing)))
    for line in kept:
        yield line.decode(errors="replace")


def _is_at(path: Path, stream: BinaryIO) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return True  # its successor is just being made
