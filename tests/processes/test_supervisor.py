"""One rule for every process of the daemon: heard or replaced, whatever holds it up."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import pytest_asyncio
from msgspec import structs

from mesh.clock import next_tick
from mesh.errors import BadRequest, Busy, DeviceLost, InternalError, PortInUse, ProcessLost
from mesh.identity.tls import TlsMaterial
from mesh.processes import supervisor
from mesh.processes.lifecycle import ChildEnding, ProcessState, SilenceLimits
from mesh.processes.messages import Handlers, Start
from mesh.processes.supervisor import Supervisor
from mesh.processes.warm_parent import end_warm_parent
from tests import secure
from tests.lively import NOWHERE, FailForGood, Garble, Repeat, Work

TIMEOUT_S = 60.0
SUSPECT_S = 2.0


class Watched(Supervisor):
    """Of a process of `tests.lively`; remembers what became of it."""

    def __init__(self, replace_s: float = 4.0) -> None:
        limits = SilenceLimits(start_s=30.0, suspect_s=SUSPECT_S, replace_s=replace_s)
        tls = TlsMaterial.of(secure.KEY, [])
        start: Start[None] = Start(hello=secure.HELLO, tls=tls)
        super().__init__("the process", "tests.lively", start, limits)
        self.restart_delays_s = (0.1,)
        self.endings: list[ChildEnding] = []
        self.states: list[ProcessState] = []
        self._happened = asyncio.Event()

    def answers(self) -> Handlers:
        return {}

    def on_started(self) -> None:
        super().on_started()
        self._happened.set()

    def on_ended(self, ending: ChildEnding) -> None:
        self.endings.append(ending)
        self._happened.set()

    def on_changed(self) -> None:
        self.states.append(self.state)
        self._happened.set()

    async def sees(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                self._happened.clear()
                await self._happened.wait()

    async def up(self) -> int:
        """The process id of the one that is up."""
        async with asyncio.timeout(TIMEOUT_S):
            await self.wait_up()
        assert self.state is ProcessState.UP
        assert self.standing.trouble is None
        assert self.pid is not None
        return self.pid


@pytest_asyncio.fixture
async def process() -> AsyncIterator[Watched]:
    process = Watched()
    process.start()
    yield process
    await process.stop()
    assert process.state is ProcessState.STOPPED


async def test_one_that_stands_still_is_out_of_order_first_and_then_replaced(
    process: Watched,
) -> None:
    first = await process.up()
    os.kill(first, signal.SIGSTOP)
    await process.sees(lambda: not process.is_up)
    assert process.states == [ProcessState.SILENT]
    standing = process.standing
    left_s = 4.0 - standing.silent_s
    assert f"said nothing for 2 s; it is replaced in {left_s:.0f} s" in str(standing.trouble)
    assert not process.endings, "it may come back"
    await process.sees(lambda: bool(process.endings))
    (ending,) = process.endings
    assert ending == ChildEnding(-signal.SIGKILL, hung=True)
    assert not ending.was_killed, "not by anybody else"
    assert process.state is ProcessState.ENDED
    assert "stopped answering" in str(process.standing.trouble)
    assert "it starts again in 0.1 s" in str(process.standing.trouble)
    assert await process.up() != first


async def test_one_that_is_heard_again_in_time_is_left_alone() -> None:
    process = Watched(replace_s=600.0)
    process.start()
    try:
        first = await process.up()
        os.kill(first, signal.SIGSTOP)
        await process.sees(lambda: not process.is_up)
        os.kill(first, signal.SIGCONT)
        assert await process.up() == first
        assert process.states == [ProcessState.SILENT, ProcessState.UP]
        assert not process.endings
    finally:
        await process.stop()


async def test_work_beside_the_loop_is_no_silence(process: Watched) -> None:
    first = await process.up()
    assert process.tell(Work(60.0))
    await asyncio.sleep(3 * SUSPECT_S)  # there is no event for what does not happen
    assert await process.up() == first
    assert not process.states


async def test_a_daemon_that_stood_still_itself_blames_nobody(process: Watched) -> None:
    first = await process.up()
    os.kill(first, signal.SIGSTOP)
    time.sleep(3 * SUSPECT_S)  # noqa: ASYNC251 - as when the machine sleeps, and all on it
    await asyncio.sleep(0.01)  # it looks who was heard before anybody can say anything
    os.kill(first, signal.SIGCONT)
    await asyncio.sleep(2 * supervisor.TICK_S)
    assert await process.up() == first
    assert not process.states


async def test_one_that_goes_at_the_very_tick_was_not_silent(
    process: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    await process.up()
    at = next_tick(supervisor.TICK_S) + supervisor.TICK_S  # at the first it was not up yet
    asyncio.get_running_loop().call_at(at, process.replace)
    await process.sees(lambda: bool(process.endings))
    assert "said nothing" not in caplog.text


async def test_one_that_can_do_nothing_any_more_says_why_and_is_replaced(process: Watched) -> None:
    first = await process.up()
    assert process.tell(FailForGood())
    await process.sees(lambda: bool(process.endings))
    (ending,) = process.endings
    assert isinstance(ending.said, DeviceLost)
    assert not ending.hung
    assert "fell off the bus" in str(process.standing.trouble)
    assert await process.up() != first


async def test_one_that_says_what_nobody_understands_is_replaced(process: Watched) -> None:
    first = await process.up()
    assert process.tell(Garble())
    await process.sees(lambda: bool(process.endings))
    (ending,) = process.endings
    assert isinstance(ending.said, BadRequest)
    assert "Garble" in ending.said.message
    assert await process.up() != first


async def test_a_request_has_its_answer_or_why_there_is_none(process: Watched) -> None:
    await process.up()
    slow = process.exchange.ask(Repeat("slow", 0.2))
    assert await process.exchange.ask(Repeat("fast")) == "fast", "nothing waits behind another"
    assert await slow == "slow"
    with pytest.raises(InternalError, match="ValueError: there is nothing to repeat"):
        await process.exchange.ask(Repeat(""))
    assert not process.exchange.asked
    assert not process.endings


async def test_what_is_handled_behind_an_answer_finds_it_taken_note_of(process: Watched) -> None:
    await process.up()
    noted: list[str] = []
    first, second = (
        process.exchange.ask(Repeat(text), lambda answer: noted.append(answer.result()))
        for text in ("a", "b")
    )
    await second
    assert noted == ["a", "b"]
    assert first.done()


async def test_a_request_that_is_given_up_is_not_worked_on_any_more(process: Watched) -> None:
    await process.up()
    asked = process.exchange.ask(Repeat("never", 3600.0))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asked, 0.1)
    assert not process.exchange.asked
    kept = process.exchange.ask(Repeat("never", 3600.0))
    process.exchange.give_up(kept)
    with pytest.raises(InternalError, match="given up"):  # once it is over there
        await kept


async def test_what_is_asked_of_one_that_ends_fails_with_the_reason(process: Watched) -> None:
    first = await process.up()
    asked = process.exchange.ask(Repeat("never", 3600.0))
    os.kill(first, signal.SIGKILL)
    with pytest.raises(ProcessLost, match="SIGKILL"):
        await asked
    with pytest.raises(ProcessLost, match="is gone"):
        await process.exchange.ask(Repeat("nobody hears it"))
    await process.up()


async def test_the_next_one_trusts_whom_the_last_was_told_to(process: Watched) -> None:
    first = await process.up()
    assert process.first_command is not None
    own = process.first_command.tls.certificate
    process.trust([own])
    os.kill(first, signal.SIGKILL)
    await process.sees(lambda: bool(process.endings))
    assert await process.up() != first
    assert process.first_command.tls.members == (own,)


async def test_who_was_killed_is_told_from_who_was_hung(process: Watched) -> None:
    os.kill(await process.up(), signal.SIGKILL)
    await process.sees(lambda: bool(process.endings))
    assert process.endings[0].was_killed
    assert "SIGKILL" in str(process.standing.trouble)


async def test_a_start_that_fails_is_tried_again(
    process: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = await process.up()
    process.restart_delays_s = (0.1, 0.15, 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nonexistent")
        await asyncio.to_thread(end_warm_parent)
        await process.sees(lambda: len(process.endings) == 3)
        assert "nonexistent" in str(process.standing.trouble), (
            "whoever asks for the state is told why"
        )
    assert "nonexistent" in caplog.text
    assert process.endings[1:] == [ChildEnding(None), ChildEnding(None)]
    assert await process.up() != first
    assert process.standing.wait_s == 0.2, "later each time"


async def test_one_that_cannot_do_its_first_command_says_why_and_is_replaced() -> None:
    process = Watched()
    assert process.first_command is not None
    hello = process.first_command.hello
    broken = replace(hello, node_name=NOWHERE)
    process.first_command = structs.replace(process.first_command, hello=broken)
    process.start()
    try:
        await process.sees(lambda: bool(process.endings))
        assert isinstance(process.endings[0].said, PortInUse)
        assert "The port is taken." in str(process.standing.trouble)
        process.first_command = structs.replace(process.first_command, hello=hello)
        await process.up()
    finally:
        await process.stop()


async def test_who_waits_for_one_hears_when_there_will_be_none() -> None:
    process = Watched()
    waiting = asyncio.create_task(process.wait_up())
    await asyncio.sleep(0)
    await process.stop()
    with pytest.raises(Busy):
        await waiting


async def test_nobody_is_told_when_nobody_is_there(process: Watched) -> None:
    await process.up()
    await process.stop()
    assert not process.tell(Work(0.0))
    process.start()
    assert process.pid is None, "what was stopped stays stopped"


async def test_one_that_is_stopped_while_its_start_is_considered_never_starts() -> None:
    process = Watched()
    process.start()
    await asyncio.sleep(0)  # it looks how much memory is free now
    async with asyncio.timeout(10):
        await process.stop()
    assert (process.pid, process.starts) == (None, 0)
