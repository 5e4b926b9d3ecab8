"""`run` and `chat` where no daemon runs: one is offered on a terminal, never started unasked."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import Run
from tests.cli.terminal import Terminal

QUESTION = "Start one?"


async def test_without_a_terminal_the_error_is_said_and_nothing_starts(hearthnet: Run) -> None:
    for verb in (["run", "builtin", "Hi"], ["chat"]):
        finished = await hearthnet(*verb)
        assert (finished.code, finished.out) == (3, "")
        assert "[not_running]" in finished.err
        assert QUESTION not in finished.err
    away = await hearthnet("run", "builtin", "Hi", "--yes", "--host", "http://127.0.0.1:9")
    assert away.code != 0, "what runs elsewhere is not started here"
    assert (await hearthnet("down")).code == 3


async def test_a_no_is_a_no(hearthnet: Run, environment: dict[str, str]) -> None:
    async with Terminal(environment, "run", "builtin", "Hi") as terminal:
        await terminal.until(QUESTION)
        terminal.type("n\n")
        await terminal.until("[not_running]")
        assert await terminal.process.wait() == 3
    assert (await hearthnet("down")).code == 3


async def test_ctrl_c_at_the_question_is_an_interruption(
    hearthnet: Run, environment: dict[str, str]
) -> None:
    async with Terminal(environment, "chat") as terminal:
        await terminal.until(QUESTION)
        await _reads(terminal.process.pid)
        terminal.type("\x03")
        assert await asyncio.wait_for(terminal.process.wait(), 20) == 130
    assert (await hearthnet("down")).code == 3


async def test_ctrl_c_while_it_starts_leaves_none_behind(
    environment: dict[str, str], tmp_path: Path
) -> None:
    own = {"HEARTHNET_PORT": "0", "HEARTHNET_API_PORT": "0", "HEARTHNET_INTERFACE": "lo"}
    async with Terminal(environment | own, "up", "--detach", "--layers", "none") as terminal:
        await terminal.until("recovery code")
        (started,) = await _children(terminal.process.pid)
        terminal.type("\x03")
        await terminal.until("is stopped")
        assert await asyncio.wait_for(terminal.process.wait(), 20) == 130
    await asyncio.to_thread(psutil.wait_procs, [started], timeout=20)
    assert not started.is_running()
    assert not (tmp_path / ".local/state/hearthnet/daemon.json").exists()


async def _reads(pid: int) -> None:
    """Until a process waits for a key: a Ctrl-C that comes just before waits for the next one."""
    if sys.platform != "linux":  # where one that waits is said to be running
        await asyncio.sleep(0.3)
        return
    async with asyncio.timeout(20):
        while psutil.Process(pid).status() != psutil.STATUS_SLEEPING:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def _children(pid: int) -> list[psutil.Process]:
    """Those of a process that is just about to have some."""
    async with asyncio.timeout(20):
        while not (found := psutil.Process(pid).children()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_yes_starts_one_that_answers_and_runs_on(
    hearthnet: Run, environment: dict[str, str]
) -> None:
    own = {"HEARTHNET_PORT": "0", "HEARTHNET_API_PORT": "0", "HEARTHNET_INTERFACE": "lo"}
    try:
        async with Terminal(environment | own, "run", "builtin", "Hi", "--plain") as terminal:
            await terminal.until(QUESTION)
            terminal.type("y\n")
            async with asyncio.timeout(120):
                assert await terminal.process.wait() == 0
            assert "tok/s" in terminal.everything
        assert "It runs on: `hearthnet down` stops it." in terminal.everything
        again = await hearthnet("run", "builtin", "Hi", "--yes", **own)
        assert again.code == 0
        assert "hearthnet is up" not in again.err, "one that runs is asked"
    finally:
        assert (await hearthnet("down")).code == 0
