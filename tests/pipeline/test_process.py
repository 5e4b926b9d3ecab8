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
    Generate,
    GenerationFrame,
    Harvest,
    HarvestOrder,
    LoadLocally,
)
from mesh.pipeline.process import (
    CONSUMER_TIMEOUT_S,
    FRAME_CREDITS,
    LOCAL_LOAD_TIMEOUT_S,
    AskerProcess,
)
from mesh.processes.messages import Answer, Cancel, ProcessMessage
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
COMMANDS: dict[str, ProcessMessage] = {
    "generate": Generate(toy_request([1, 2], 5), number=1),
    "harvest": Harvest(ORDER, number=1),
}


@pytest.mark.parametrize("kind", sorted(COMMANDS))
async def test_what_is_cancelled_before_it_began_leaves_nothing_behind(kind: str) -> None:
    with watched(ToyNetwork()) as mesh:
        process = AskerProcess(engine=mesh.engine)
        process.take(COMMANDS[kind])
        process.take(Cancel(1))  # as when both come in one read
        assert process.exchange.tasks
        await idle(process)
        assert not process.exchange.tasks
        assert not process._readers
        await mesh.engine.close()


async def test_a_harvest_that_fails_in_a_way_nobody_foresaw_is_answered() -> None:
    daemon = Daemon()
    with watched(ToyNetwork()) as mesh:
        process = AskerProcess(engine=mesh.engine, daemon=daemon)
        process.take(Harvest(replace(ORDER, texts=(5,)), number=7))  # type: ignore[arg-type]
        await idle(process)
        await mesh.engine.close()
    (answer,) = daemon.said
    assert isinstance(answer, Answer)
    assert answer.number == 7
    assert isinstance(answer.error, InternalError)
    assert "TypeError" in str(answer.error)


async def test_what_did_not_load_in_time_is_asked_for_again() -> None:
    daemon = Daemon()
    process = AskerProcess(daemon=daemon, local_load_s=0.2)
    with pytest.raises(PipelineStalled):
        await process.load_locally(None)
    again = asyncio.ensure_future(process.load_locally(None))
    await asyncio.sleep(0)
    assert daemon.said == [LoadLocally(None, number=1), LoadLocally(None, number=2)]
    process.take(Answer.to(LoadLocally(None, number=2), ()))
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
        process.take(Answer.to(LoadLocally(None, number=2), ()))
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

    def endings(self) -> list[Answer]:
        return [message for message in self._said if isinstance(message, Answer)]


@asynccontextmanager
async def listening(tokens: int) -> AsyncIterator[Listening]:
    """The process was just told to generate so many tokens."""
    network, daemon = ToyNetwork(), Daemon()
    hop = network.add("0-7")
    with watched(network) as mesh:
        process = AskerProcess(engine=mesh.engine, daemon=daemon)
        request = replace(toy_request([1, 2], tokens), request_id=REQUEST)
        process.take(Generate(request, number=1))
        yield Listening(process, daemon, hop)
        await idle(process)
        await mesh.engine.close()


async def idle(process: AskerProcess) -> None:
    """Until everything that a process was asked for has ended."""
    await asyncio.gather(*process.exchange.tasks, return_exceptions=True)
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
            (ending,) = case.endings()
            assert (ending.number, ending.error) == (1, None)

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
