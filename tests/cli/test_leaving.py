"""`hearthnet pause` and `hearthnet down`: how long they wait, and what they say."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from mesh.cli import down
from mesh.runtime import DaemonRecord
from tests.api.conftest import Served
from tests.cli.conftest import Run

STUBBORN = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('ready', flush=True)\ntime.sleep(60)"
)


class Sleepy:
    """Gets the signal in the daemon's place; one stream leaves with every look at the status."""

    def __init__(self, daemon: Served, streams: int) -> None:
        self.streams = [streams]
        self.paused = False
        self.leaving = True
        self._status = daemon.view.status
        daemon.view.status = self.status  # type: ignore[method-assign]
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._pause)

    def _pause(self) -> None:
        self.paused = True

    def status(self) -> dict[str, Any]:
        picture = self._status()
        now = self.streams[-1]
        self.streams.append(max(0, now - 1) if self.paused and self.leaving else now)
        node, shards = {**picture["node"], "paused": self.paused}, [{"active_streams": now}]
        return {**picture, "node": node, "shards": shards, "sessions": [{"purpose": "tensors"}]}


async def test_pause_returns_when_the_last_stream_has_left(hearthnet: Run, daemon: Served) -> None:
    sleepy = Sleepy(daemon, 3)
    finished = await hearthnet("pause")
    assert finished.code == 0
    assert sleepy.paused
    assert sleepy.streams[-2:] == [0, 0]
    assert "still running" not in finished.err


async def test_pause_says_what_is_left_when_the_time_is_over(
    hearthnet: Run, daemon: Served
) -> None:
    sleepy = Sleepy(daemon, 2)
    sleepy.leaving = False
    finished = await hearthnet("pause", "--timeout", "0.5")
    assert finished.code == 0
    assert "still running here after 0.5 s: 2 streams of answers" in finished.err


@pytest.fixture
def stubborn() -> Iterator[psutil.Process]:
    """A process that ends for SIGKILL only."""
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


@pytest.mark.parametrize(("drain_s", "waited"), [(0.0, "0.2"), (0.4, "1")])
def test_down_gives_a_daemon_the_time_it_gives_its_answers(
    drain_s: float,
    waited: str,
    stubborn: psutil.Process,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = DaemonRecord(
        stubborn.pid, stubborn.create_time(), "http://127.0.0.1:1", 1, 1, drain_s=drain_s
    )
    down.end_daemon(record, None, ending_s=0.2)
    assert f"did not stop within {waited} s; killing it" in capsys.readouterr().err
    assert not stubborn.is_running() or stubborn.status() == psutil.STATUS_ZOMBIE


def test_who_waits_for_the_end_of_a_daemon_is_told_what_for(
    stubborn: psutil.Process, capsys: pytest.CaptureFixture[str]
) -> None:
    record = DaemonRecord(stubborn.pid, stubborn.create_time(), "http://127.0.0.1:1", 1, 1)
    down.end_daemon(record, 2.2)
    waiting, killed = capsys.readouterr().err.splitlines()
    assert waiting == "stopping; what runs may end or move elsewhere first, for 2.2 s at most"
    assert killed == "The daemon did not stop within 2.2 s; killing it."
