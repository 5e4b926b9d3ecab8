"""What the asker's process does with its commands; its engine is real, its hops are toys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mesh.channel import ChannelMessage
from mesh.errors import PipelineStalled
from mesh.pipeline import engine_process
from mesh.pipeline.engine_process import (
    CONSUMER_TIMEOUT_S,
    FRAME_CREDITS,
    LOCAL_LOAD_TIMEOUT_S,
    EngineProcess,
)
from mesh.pipeline.frames import encode_request
from mesh.pipeline.order import HarvestOrder
from tests.health.watched import watched
from tests.pipeline.toy_mesh import ToyNetwork, ToyShard, toy_request
from tests.simulation.virtual_loop import run_virtually

ORDER = HarvestOrder("0" * 16, 0, "layers.", "layers.*", ("a text",), 8)
COMMANDS: dict[str, dict[str, Any]] = {
    "generate": {"request": encode_request(toy_request([1, 2], 5))},
    "harvest": {"order": ORDER.to_fields()},
}


@pytest.mark.parametrize("kind", sorted(COMMANDS))
async def test_what_is_cancelled_before_it_began_leaves_nothing_behind(kind: str) -> None:
    process = EngineProcess()
    with watched(ToyNetwork()) as mesh:
        process._engine = mesh.engine
        process._command({"op": kind, "id": "r", **COMMANDS[kind]})
        process._command({"op": "cancel", "id": "r"})  # as when both come in one read
        assert process._readers
        await asyncio.gather(*process._background, return_exceptions=True)
        await asyncio.sleep(0)
        assert not process._readers
        await mesh.engine.close()


async def test_a_harvest_that_fails_in_a_way_nobody_foresaw_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(order: HarvestOrder) -> dict[str, Any]:
        raise RuntimeError(f"{order.texts} is no text")

    process = EngineProcess()
    said: list[ChannelMessage] = []
    monkeypatch.setattr(process, "_send", said.append)
    with watched(ToyNetwork()) as mesh:
        monkeypatch.setattr(mesh.engine, "harvest", fail)
        process._engine = mesh.engine
        process._command({"op": "harvest", "id": "r", **COMMANDS["harvest"]})
        await asyncio.gather(*process._background, return_exceptions=True)
        await mesh.engine.close()
    (answer,) = said
    assert (answer["op"], answer["id"]) == ("error", "r")
    assert "is no text" in answer["error"]["message"]


async def test_what_did_not_load_in_time_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = EngineProcess()
    said: list[ChannelMessage] = []
    monkeypatch.setattr(process, "_send", said.append)
    monkeypatch.setattr(engine_process, "LOCAL_LOAD_TIMEOUT_S", 0.01)
    with pytest.raises(PipelineStalled):
        await process._local_model()
    monkeypatch.setattr(engine_process, "LOCAL_LOAD_TIMEOUT_S", 5.0)
    again = asyncio.ensure_future(process._local_model())
    await asyncio.sleep(0)
    assert said == [{"op": "local", "layers": None}] * 2
    process._command({"op": "local", "layers": None, "hops": []})
    assert await again == ()


def test_who_waited_in_vain_leaves_alone_what_others_asked_later() -> None:
    async def main() -> None:
        process = EngineProcess()
        first = asyncio.create_task(process._local_model())
        await asyncio.sleep(LOCAL_LOAD_TIMEOUT_S / 2)
        second = asyncio.create_task(process._local_model())
        await asyncio.wait([first])
        third = asyncio.create_task(process._local_model())
        await asyncio.wait([second])
        for waited in (first, second):
            assert isinstance(waited.exception(), PipelineStalled)
        process._command({"op": "local", "layers": None, "hops": []})
        assert await third == ()

    run_virtually(main)


class Listening:
    """A generation in the asker's process that has a hop to run on, and what is said of it."""

    def __init__(self, process: EngineProcess, hop: ToyShard) -> None:
        self.said: list[ChannelMessage] = []
        self.hop = hop
        self._process = process

    def credit(self, frames: int) -> None:
        self._process._command({"op": "credit", "id": "r", "frames": frames})

    async def heard(self, wait_s: float) -> tuple[int, int]:
        """After so many seconds: the frames that came so far, and the steps that the hop ran."""
        await asyncio.sleep(wait_s)
        return sum(message["op"] == "frame" for message in self.said), len(self.hop.steps)

    def endings(self) -> list[ChannelMessage]:
        return [message for message in self.said if message["op"] in {"end", "error"}]


@asynccontextmanager
async def listening(tokens: int) -> AsyncIterator[Listening]:
    """The process was just told to generate so many tokens."""
    network, process = ToyNetwork(), EngineProcess()
    case = Listening(process, network.add("0-7"))
    with watched(network) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_send", case.said.append)
        process._engine = mesh.engine
        request = encode_request(toy_request([1, 2], tokens))
        process._command({"op": "generate", "id": "r", "request": request})
        yield case
        await asyncio.gather(*process._background, return_exceptions=True)
        await mesh.engine.close()


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
            assert case.endings() == [{"op": "end", "id": "r"}]

    run_virtually(main)


def test_a_generation_that_nobody_reads_frees_its_hops() -> None:
    async def main() -> None:
        async with listening(3 * FRAME_CREDITS) as case:
            await case.heard(CONSUMER_TIMEOUT_S - 1)
            assert case.hop.sessions
            assert not case.endings()
            await case.heard(2)
            (ending,) = case.endings()
            assert ending["error"]["code"] == PipelineStalled.code
            assert not case.hop.sessions

    run_virtually(main)
