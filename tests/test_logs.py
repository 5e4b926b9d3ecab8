"""Logs stay small whatever others cause, and tell of what they leave out."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import mesh
from mesh import logs
from mesh.interventions.channel import ANSWER, HEAD
from mesh.interventions.relay import HopSessions, relay
from mesh.logs import KEPT_FILES, LineRates, LogFile, LogHandler

FLOOD = 20_000
LEFT_OUT = re.compile(r"\[(\d+) like it left out\]$")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Log:
    """A logger of its own and what it wrote."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.stream = io.StringIO()
        self.logger = logging.Logger("mesh.there")  # noqa: LOG001 - not one that others see
        self.logger.addHandler(LogHandler(self.stream, LineRates(self.clock)))

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()

    def tell(self, subject: object) -> None:
        self.logger.info("peer=%s did it", subject)

    def left_out(self) -> int:
        found = (LEFT_OUT.search(line) for line in self.lines)
        return sum(int(each[1]) for each in found if each is not None)


def test_one_who_floods_does_not_hide_others_and_what_is_left_out_is_counted() -> None:
    log = Log()
    for _ in range(FLOOD):
        log.tell("noisy")
    assert 0 < len(log.lines) < 100
    log.tell("quiet")
    assert "peer=quiet did it" in log.lines[-1]
    log.clock.now += 3600
    log.tell("noisy")
    assert len(log.lines) + log.left_out() == FLOOD + 2


def test_whoever_takes_ever_new_names_floods_no_more() -> None:
    log = Log()
    for number in range(FLOOD):
        log.tell(number)
    assert 0 < len(log.lines) < 100
    log.clock.now += 3600
    log.tell("another")
    assert len(log.lines) + log.left_out() == FLOOD + 1


def test_places_are_apart() -> None:
    log = Log()
    for number in range(FLOOD):
        log.tell(number)
    log.logger.error("something else")
    assert log.lines[-1].endswith("something else")


def test_a_flood_for_hours_is_small() -> None:
    log = Log()
    for _ in range(24 * 360):
        log.clock.now += 10.0
        for number in range(30):
            log.tell(number)
    assert len(log.stream.getvalue()) < 16 << 20


def test_what_is_quoted_makes_no_line_of_its_own_and_none_is_endless() -> None:
    log = Log()
    log.tell("x\n2026-01-01 ERROR forged \x1b[2J\r\x9b")
    assert len(log.lines) == 1
    assert r"x\x0a2026-01-01 ERROR forged \x1b[2J\x0d\x9b" in log.lines[0]
    log.tell("y" * (1 << 20))
    assert len(log.lines[1]) < 10_000
    assert "characters more]" in log.lines[1]
    try:
        int("a\x1b[2J\n")
    except ValueError:
        log.logger.exception("it failed")
    assert "\x1b" not in log.stream.getvalue()
    assert log.lines[-1].startswith("ValueError: ")


async def test_messages_to_hops_that_do_not_exist_do_not_fill_the_disk() -> None:
    """Each of them is answered with an error, and was a line."""
    log = Log()
    ours, theirs = socket.socketpair()
    relaying = logging.getLogger(relay.__module__)
    level, handler = relaying.level, log.logger.handlers[0]
    relaying.addHandler(handler)
    relaying.setLevel(logging.INFO)
    try:
        serving = asyncio.create_task(relay(ours, HopSessions([])))
        reader, writer = await asyncio.open_connection(sock=theirs)
        for number in range(2000):
            writer.write(HEAD.pack(number % 250, ANSWER, 3) + b"abc")
            _, _, length = HEAD.unpack(await reader.readexactly(HEAD.size))
            await reader.readexactly(length)
        writer.close()
        await serving
    finally:
        relaying.removeHandler(handler)
        relaying.setLevel(level)
    assert 0 < len(log.lines) < 200


CHILD = """
import asyncio, sys
from mesh import logs
from mesh.processes.child import Child
async def main():
    ended = asyncio.Event()
    child = await Child.start("tests.flooding", name="f", on_message=print, on_closed=ended.set)
    await ended.wait()
    sys.exit(await child.wait(10))
logs.MAX_FILE_BYTES = 10_000
logs.log_to_stderr("info", None if sys.argv[1] == "-" else logs.Path(sys.argv[1]))
asyncio.run(main())
"""


def test_a_process_of_the_node_logs_little_however_much_it_has_to_say() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CHILD, "-"], check=True, capture_output=True, timeout=60
    )
    assert ended.stderr.count(b"There is no hop") > 0
    assert len(ended.stderr) < 100_000


def test_a_process_of_the_node_keeps_the_daemon_s_file_small(tmp_path: Path) -> None:
    file = tmp_path / "daemon.log"
    file.write_bytes(b"x" * 2 * logs.MAX_FILE_BYTES)
    with file.open("ab") as output:
        command = [sys.executable, "-c", CHILD, str(file)]
        subprocess.run(command, check=True, stderr=output, timeout=60)
    assert "There is no hop" in file.read_text()
    assert file.stat().st_size < 100_000
    assert (tmp_path / "daemon.log.1").stat().st_size == 2 * logs.MAX_FILE_BYTES


def test_logging_is_set_up_in_one_place() -> None:
    package = Path(mesh.__file__).parent
    found = [
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if "basicConfig" in file.read_text(encoding="utf-8")
    ]
    assert found == ["logs.py"]


def test_libraries_that_tell_too_much_are_quiet_also_where_logging_was_set_up_before() -> None:
    written = subprocess.run(
        [sys.executable, "-c", CHATTY], capture_output=True, text=True, check=True, timeout=60
    )
    lines = written.stderr.splitlines()
    assert len(lines) == 2, lines
    assert lines[0].endswith("httpx:it failed")
    assert lines[1].endswith("mesh.fetcher:fetched")


CHATTY = """
import logging
logging.basicConfig(level="DEBUG")
from mesh.logs import log_to_stderr
log_to_stderr("DEBUG")
logging.getLogger("aiosqlite").debug("executing INSERT INTO events")
logging.getLogger("httpx").info("GET /signed?token=1")
logging.getLogger("httpx").warning("it failed")
logging.getLogger("mesh.fetcher").info("fetched")
"""


# The file that a detached daemon and its children share

LINES, WRITERS, SIZE = 400, 4, 20_000
WRITING = f"""
import logging, sys, time
from mesh import logs
logs.MAX_FILE_BYTES, logs.KEPT_FILES = {SIZE}, int(sys.argv[2])
logs.PLACE_BURST = logs.SUBJECT_BURST = 1e9
logs.log_to_stderr("info", logs.Path(sys.argv[3]))
for number in range({LINES}):
    logging.getLogger("mesh.there").info("writer %s line %d", sys.argv[1], number)
    time.sleep(0.001)
print("a last word", file=sys.stderr)
"""


def _written_together(file: Path, kept: int) -> None:
    with file.open("ab") as output:
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITING, str(number), str(kept), str(file)],
                stderr=output,
            )
            for number in range(WRITERS)
        ]
    assert [writer.wait() for writer in writers] == [0] * WRITERS


def test_processes_that_share_a_file_move_it_aside_and_lose_no_line(tmp_path: Path) -> None:
    _written_together(tmp_path / "daemon.log", kept=100)
    files = list(tmp_path.iterdir())
    assert len(files) > 3
    assert all(file.stat().st_size < 2 * SIZE for file in files)
    said = sorted(re.findall(r"writer \d line \d+", "".join(f.read_text() for f in files)))
    assert said == sorted(f"writer {w} line {n}" for w in range(WRITERS) for n in range(LINES))
    assert sum(file.read_text().count("a last word") for file in files) == WRITERS


def test_who_finds_that_another_has_moved_it_goes_over_to_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "daemon.log"
    path.write_bytes(b"x" * (logs.MAX_FILE_BYTES + 1))
    with path.open("a") as stream:
        path.rename(tmp_path / "daemon.log.1")
        path.write_text("first\n")
        LogFile(path, stream.fileno()).tend()
        stream.write("second\n")
    assert path.read_text() == "first\nsecond\n"
    assert len(list(tmp_path.iterdir())) == 2


def test_only_some_files_are_kept(tmp_path: Path) -> None:
    _written_together(tmp_path / "daemon.log", kept=KEPT_FILES)
    aside = {f"daemon.log.{number}" for number in range(1, KEPT_FILES + 1)}
    names = {file.name for file in tmp_path.iterdir()}
    assert {"daemon.log", "daemon.log.1"} <= names <= {"daemon.log", *aside}


@pytest.mark.parametrize("to", ["pipe", "another file"])
def test_a_stream_that_is_not_the_file_is_left_alone(to: str, tmp_path: Path) -> None:
    named = tmp_path / "daemon.log"
    named.write_bytes(b"x" * 2 * SIZE)
    run: Callable[..., subprocess.CompletedProcess[bytes]] = subprocess.run
    command = [sys.executable, "-c", WRITING, "0", "3", str(named)]
    if to == "pipe":
        said = run(command, check=True, capture_output=True).stderr
    else:
        with (tmp_path / "other").open("wb") as other:
            run(command, check=True, stderr=other)
        said = (tmp_path / "other").read_bytes()
    assert said.count(b"line") == LINES
    assert named.stat().st_size == 2 * SIZE
    assert not (tmp_path / "daemon.log.1").exists()


def test_a_directory_that_is_gone_costs_no_line(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "logs"
    directory.mkdir()
    kept = tmp_path / "kept"
    with (directory / "daemon.log").open("a") as stream:
        os.link(directory / "daemon.log", kept)
        handler = LogHandler(
            stream, LineRates(), LogFile(directory / "daemon.log", stream.fileno(), max_bytes=100)
        )
        logger = logging.Logger("mesh.there")  # noqa: LOG001
        logger.addHandler(handler)
        (directory / "daemon.log").unlink()
        directory.rmdir()
        for number in range(9):
            logger.info("line %d", number)
    assert kept.read_text().count("line") == 9


def test_what_takes_no_line_holds_nobody_up_and_is_told_how_many_were_lost() -> None:
    """As a terminal that was stopped by Ctrl-S, or a disk that hangs: whose whole node stood still.
    The pipe has room, which poll(2) says, but less than the first line takes."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    filled = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filled += os.write(writing, b"." * 4096)
    os.set_blocking(writing, True)
    filled -= len(os.read(reading, 4096))
    logger = logging.Logger("mesh.there")  # noqa: LOG001 - not one that others see
    later = itertools.count(step=1e6)  # no rate leaves anything out
    total = logs.MAX_WAITING_LINES + 9
    with os.fdopen(writing, "w", encoding="utf-8") as stream, os.fdopen(reading, "rb") as reader:
        logger.addHandler(LogHandler(stream, LineRates(later.__next__)))

        def tell() -> None:
            for number in range(total):
                logger.info("line %d %s", number, "x" * (0 if number else 6000))

        telling = threading.Thread(target=tell, daemon=True)
        telling.start()
        telling.join(5)
        assert not telling.is_alive()
        assert reader.read(filled) == b"." * filled
        lines = [reader.readline().decode() for _ in range(logs.MAX_WAITING_LINES)]
        logger.info("the last")
        assert reader.readline().endswith(b"the last [9 before it could not be written]\n")
    assert [line.split()[5] for line in lines] == [str(n) for n in range(len(lines))]
