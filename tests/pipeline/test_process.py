"""What the asker's process does with its commands; its engine is real, its hops are toys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from mesh.errors import InternalError, PipelineStalled
from mesh.models.harvest import HarvestBatch
from mesh.pipeline.commands import (
    Credit,
    Ended,
    Generate,
    GenerationFrame,
    Harvest,
    HarvestOrder,
    LoadedLocally,
    LoadLocally,
)
from mesh.pipeline.process import (
    CONSUMER_TIMEOUT_S,
    FRAME_CREDITS,
    LOCAL_LOAD_TIMEOUT_S,
    AskerProcess,
)
from mesh.processes.messages import Cancel, ProcessMessage
from tests.health.watched import watched
from tests.pipeline.toy_mesh import ToyNetwork, ToyShard, toy_request
from tests.simulation.virtual_loop import run_virtually


class Daemon:
    """Remembers what a process says."""

    def __init__(self) -> None:
        self.said: list[ProcessMessage] = []

    def send(self, message: ProcessMessage, *, soon: bool = False) -> None:
        self.said.append(message)


ORDER = HarvestOrder(HarvestBatch("0" * 16, 0, 1, "layers.", "layers.*"), ("a text",), 8)
REQUEST = "r"
COMMANDS = {"generate": Generate(toy_request([1, 2], 5)), "harvest": Harvest("r", ORDER)}


@pytest.mark.parametrize("kind", sorted(COMMANDS))
async def test_what_is_cancelled_before_it_began_leaves_nothing_behind(kind: str) -> None:
    command = COMMANDS[kind]
    key = command.request.request_id if isinstance(command, Generate) else command.id
    with watched(ToyNetwork()) as mesh:
        process = AskerProcess(engine=mesh.engine)
        process.take(command)
        process.take(Cancel(key))  # as when both come in one read
        assert process._readers
        await idle()
        assert not process._readers
        await mesh.engine.close()


async def test_a_harvest_that_fails_in_a_way_nobody_foresaw_is_answered() -> None:
    daemon = Daemon()
    with watched(ToyNetwork()) as mesh:
        process = AskerProcess(engine=mesh.engine, daemon=daemon)
        process.take(Harvest("r", replace(ORDER, texts=(5,))))  # type: ignore[arg-type]
        await idle()
        await mesh.engine.close()
    (answer,) = daemon.said
    assert isinstance(answer, Ended)
    assert answer.id == "r"
    assert isinstance(answer.error, InternalError)
    assert "TypeError" in str(answer.error)


async def test_what_did_not_load_in_time_is_asked_for_again() -> None:
    daemon = Daemon()
    process = AskerProcess(daemon=daemon, local_load_s=0.2)
    with pytest.raises(PipelineStalled):
        await process.load_locally(None)
    again = asyncio.ensure_future(process.load_locally(None))
    await asyncio.sleep(0)
    assert daemon.said == [LoadLocally(None)] * 2
    process.take(LoadedLocally(None))
    assert await again == ()


def test_who_waited_in_vain_leaves_alone_what_others_asked_later() -> None:
    async def main() -> None:
        process = AskerProcess()
        first = asyncio.create_task(process.load_locally(None))
        await asyncio.sleep(LOCAL_LOAD_TIMEOUT_S / 2)
        second = asyncio.create_task(process.load_locally(None))
        await asyncio.wait([first])
        third = asyncio.create_task(process.load_locally(None))
        await asyncio.wait([second])
        for waited in (first, second):
            assert isinstance(waited.exception(), PipelineStalled)
        process.take(LoadedLocally(None))
        assert await third == ()

    run_virtually(main)


class Listening:
    """A generation in the asker's process that has a hop to run on, and what is said of it."""

    def __init__(self, process: AskerProcess, daemon: Daemon, hop: ToyShard) -> None:
        self.hop = hop
        self._said = daemon.said
        self._process = process

    def credit(self, frames: int) -> None:
        self._process.take(Credit(REQUEST, frames))

    async def heard(self, wait_s: float) -> tuple[int, int]:
        """After so many seconds: the frames that came so far, and the steps that the hop ran."""
        await asyncio.sleep(wait_s)
        return sum(isinstance(each, GenerationFrame) for each in self._said), len(self.hop.steps)

    def endings(self) -> list[Ended]:
        return [message for message in self._said if isinstance(message, Ended)]


@asynccontextmanager
async def listening(tokens: int) -> AsyncIterator[Listening]:
    """The process was just told to generate so many tokens."""
    network, daemon = ToyNetwork(), Daemon()
    hop = network.add("0-7")
    with watched(network) as mesh:
        process = AskerProcess(engine=mesh.engine, daemon=daemon)
        process.take(Generate(replace(toy_request([1, 2], tokens), request_id=REQUEST)))
        yield Listening(process, daemon, hop)
        await idle()
        await mesh.engine.close()


async def idle() -> None:
    """Until everything that a process was asked for has ended."""
    asked = tuple(f"{kind} " for kind in COMMANDS)
    tasks = [task for task in asyncio.all_tasks() if task.get_name().startswith(asked)]
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)


def test_a_generation_is_only_so_far_ahead_of_its_reader() -> None:
    async def main() -> None:
        async with listening(3 * FRAME_CREDITS) as case:
            soon, ahead = CONSUMER_TIMEOUT_S - 1, FRAME_CREDITS
            assert await case.heard(soon) == (ahead, ahead + 1), "a token waits for its credit"
            for credits in (0, 10, 20):
                case.credit(credits)
                ahead += credits
                assert await case.heard(soon) == (ahead, ahead + 1)
            case.credit(3 * FRAME_CREDITS)
            assert await case.heard(soon) == (3 * FRAME_CREDITS + 1, 3 * FRAME_CREDITS)
            assert case.endings() == [Ended(REQUEST)]

    run_virtually(main)


def test_a_generation_that_nobody_reads_frees_its_hops() -> None:
    async def main() -> None:
        async with listening(3 * FRAME_CREDITS) as case:
            await case.heard(CONSUMER_TIMEOUT_S - 1)
            assert case.hop.sessions
            assert not case.endings()
            await case.heard(2)
            (ending,) = case.endings()
            assert isinstance(ending.error, PipelineStalled)
            assert not case.hop.sessions

    run_virtually(main)
