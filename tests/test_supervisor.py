"""One rule for every process of the daemon: heard or replaced, whatever holds it up."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from mesh import supervisor
from mesh.channel import ChannelMessage
from mesh.charge import Ending, ProcessState, SilenceLimits
from mesh.errors import DeviceLost, MeshError
from mesh.supervisor import Supervisor

TIMEOUT_S = 60.0
SUSPECT_S = 2.0


class Charge:
    """The owner of a process of `tests.lively`."""

    def __init__(self, replace_s: float = 4.0) -> None:
        limits = SilenceLimits(start_s=30.0, suspect_s=SUSPECT_S, replace_s=replace_s)
        self.process = Supervisor("the process", "tests.lively", self, limits)
        self.endings: list[Ending] = []
        self.states: list[ProcessState] = []
        self._happened = asyncio.Event()

    def process_started(self) -> None:
        self._happened.set()

    def process_said(self, message: ChannelMessage) -> None:
        assert message == {"op": "ready"}, "what is said for the supervisor reaches nobody else"
        self.process.ready()

    def process_ended(self, ending: Ending) -> None:
        self.endings.append(ending)
        self._happened.set()

    def why_not_start(self, free_mb: int) -> MeshError | None:
        return None

    def process_changed(self) -> None:
        self.states.append(self.process.state)
        self._happened.set()

    async def sees(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                self._happened.clear()
                await self._happened.wait()

    async def up(self) -> int:
        """The process id of the one that is up."""
        async with asyncio.timeout(TIMEOUT_S):
            await self.process.wait_up()
        assert self.process.state is ProcessState.UP
        assert self.process.trouble is None
        assert self.process.pid is not None
        return self.process.pid


@pytest_asyncio.fixture
async def charge(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Charge]:
    monkeypatch.setattr(supervisor, "RESTART_DELAYS_S", (0.1,))
    charge = Charge()
    charge.process.start()
    yield charge
    await charge.process.stop()
    assert charge.process.state is ProcessState.STOPPED


async def test_one_that_stands_still_is_out_of_order_first_and_then_replaced(
    charge: Charge,
) -> None:
    first = await charge.up()
    os.kill(first, signal.SIGSTOP)
    await charge.sees(lambda: not charge.process.is_up)
    assert charge.states == [ProcessState.SILENT]
    assert "said nothing for 2 s" in str(charge.process.trouble)
    assert not charge.endings, "it may come back"
    await charge.sees(lambda: bool(charge.endings))
    (ending,) = charge.endings
    assert ending == Ending(-signal.SIGKILL, hung=True)
    assert not ending.was_killed, "not by anybody else"
    assert charge.process.state is ProcessState.ENDED
    assert "stopped answering" in str(charge.process.trouble)
    assert await charge.up() != first


async def test_one_that_is_heard_again_in_time_is_left_alone() -> None:
    charge = Charge(replace_s=600.0)
    charge.process.start()
    try:
        first = await charge.up()
        os.kill(first, signal.SIGSTOP)
        await charge.sees(lambda: not charge.process.is_up)
        os.kill(first, signal.SIGCONT)
        assert await charge.up() == first
        assert charge.states == [ProcessState.SILENT, ProcessState.UP]
        assert not charge.endings
    finally:
        await charge.process.stop()


async def test_work_beside_the_loop_is_no_silence(charge: Charge) -> None:
    first = await charge.up()
    assert charge.process.tell({"op": "work beside the loop", "s": 60.0})
    await asyncio.sleep(3 * SUSPECT_S)  # there is no event for what does not happen
    assert await charge.up() == first
    assert not charge.states


async def test_a_daemon_that_stood_still_itself_blames_nobody(charge: Charge) -> None:
    first = await charge.up()
    os.kill(first, signal.SIGSTOP)
    time.sleep(3 * SUSPECT_S)  # noqa: ASYNC251 - as when the machine sleeps, and all on it
    os.kill(first, signal.SIGCONT)
    await asyncio.sleep(2 * supervisor.TICK_S)
    assert await charge.up() == first
    assert not charge.states


async def test_one_that_can_do_nothing_any_more_says_why_and_is_replaced(charge: Charge) -> None:
    first = await charge.up()
    assert charge.process.tell({"op": "fail for good"})
    await charge.sees(lambda: bool(charge.endings))
    (ending,) = charge.endings
    assert isinstance(ending.said, DeviceLost)
    assert not ending.hung
    assert "fell off the bus" in str(charge.process.trouble)
    assert await charge.up() != first


async def test_who_was_killed_is_told_from_who_was_hung(charge: Charge) -> None:
    os.kill(await charge.up(), signal.SIGKILL)
    await charge.sees(lambda: bool(charge.endings))
    assert charge.endings[0].was_killed
    assert "SIGKILL" in str(charge.process.trouble)


async def test_a_start_that_fails_is_tried_again(
    charge: Charge, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = await charge.up()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nonexistent")
        os.kill(first, signal.SIGKILL)
        await charge.sees(lambda: len(charge.endings) == 3)
    assert "nonexistent" in caplog.text
    assert charge.endings[1:] == [Ending(None), Ending(None)]
    assert await charge.up() != first


async def test_nobody_is_told_when_nobody_is_there(charge: Charge) -> None:
    await charge.up()
    await charge.process.stop()
    assert not charge.process.tell({"op": "anything"})
    charge.process.start()
    assert charge.process.pid is None, "what was stopped stays stopped"
