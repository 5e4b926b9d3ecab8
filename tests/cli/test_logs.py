"""`hearthnet logs`: the last lines wherever they lie, and what follows them."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
from datetime import datetime
from pathlib import Path

import pytest

from mesh.logs import REQUEST, LineRates, LogHandler, move_aside
from mesh.paths import StatePaths
from tests.api.conftest import Served
from tests.cli.conftest import COMMAND, Run


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    return StatePaths(tmp_path / "state").create()


@pytest.fixture
def three_files(paths: StatePaths) -> StatePaths:
    for text in ("1\n2\n", "3\n4\n", "5\n\x1b[31m6\n"):
        if paths.daemon_log.exists():
            move_aside(paths.daemon_log)
        paths.daemon_log.write_text(text)
    return paths


async def test_lines_are_those_of_older_files_as_well(
    hearthnet: Run, three_files: StatePaths
) -> None:
    state = ("--state-dir", str(three_files.root))
    last = await hearthnet("logs", "-n", "5", *state)
    assert last.out == "2\n3\n4\n5\n[31m6\n"
    assert "no daemon runs now" in last.err
    assert (await hearthnet("logs", "-n", "0", *state)).out == ""


async def test_each_line_is_an_object_where_one_asks_for_json(
    hearthnet: Run, paths: StatePaths
) -> None:
    record = logging.LogRecord("mesh.node", logging.WARNING, "", 1, "attic (%s) left", ("a",), None)
    token = REQUEST.set("chat-1")
    written = LogHandler(io.StringIO(), LineRates()).format(record)
    REQUEST.reset(token)
    paths.daemon_log.write_text(f"{written}\nTraceback (most recent call last):\n")
    out = (await hearthnet("logs", "--json", "--state-dir", str(paths.root))).out
    first, second = map(json.loads, out.splitlines())
    at = datetime.fromisoformat(first.pop("time"))
    assert abs(at.timestamp() - record.created) < 0.001
    assert first == {
        "level": "WARNING", "logger": "mesh.node", "message": "attic (a) left", "request": "chat-1",
    }  # fmt: skip
    assert second == {"message": "Traceback (most recent call last):"}


async def test_who_has_no_log_is_told_why(hearthnet: Run, tmp_path: Path, daemon: Served) -> None:
    in_a_terminal = await hearthnet("logs")
    assert in_a_terminal.code == 4
    assert "prints where it was started" in in_a_terminal.err
    never = await hearthnet("logs", "--state-dir", str(tmp_path / "fresh"))
    assert never.code == 4
    assert "hearthnet up --detach" in never.err


async def test_a_log_that_may_not_be_read_is_named(hearthnet: Run, paths: StatePaths) -> None:
    await asyncio.to_thread(paths.daemon_log.mkdir)
    told = await hearthnet("logs", "--state-dir", str(paths.root))
    assert told.code == 1
    assert f"error: {paths.daemon_log} cannot be used: Is a directory. [file_refused]" in told.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
async def test_a_full_disk_is_no_matter_of_whose_it_is(environment: dict[str, str]) -> None:
    environment.pop("PYTHONUNBUFFERED", None)  # then nothing is left to be written at the end
    with await asyncio.to_thread(open, "/dev/full", "wb") as full:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "--version", stdout=full, stderr=asyncio.subprocess.PIPE, env=environment
        )
        _, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 1
    assert err.decode().splitlines()[1:] == ["fix:   Free some room on that disk."]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
async def test_an_error_that_cannot_be_printed_is_one(environment: dict[str, str]) -> None:
    environment.pop("PYTHONUNBUFFERED", None)
    with await asyncio.to_thread(open, "/dev/full", "wb") as full:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "config", "set", "none", "1", stderr=full, env=environment
        )
        assert await asyncio.wait_for(process.wait(), 20) == 1


def test_what_follows_is_shown_also_when_the_file_is_moved_aside(
    environment: dict[str, str], paths: StatePaths
) -> None:
    log = paths.daemon_log
    log.write_text("first\n")
    with subprocess.Popen(
        [*COMMAND, "logs", "-f", "--state-dir", str(paths.root)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for text in ("second\n", "third é\n"):
                assert process.stdout.readline() == log.read_text()
                with log.open("a") as stream:
                    stream.write("its last\n")
                move_aside(log)
                log.write_text(text)
                assert process.stdout.readline() == "its last\n"
            assert process.stdout.readline() == "third é\n"
            log.write_text("4\n")  # emptied, and written to again
            assert process.stdout.readline() == "4\n"
        finally:
            process.terminate()
