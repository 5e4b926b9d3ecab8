"""The in-memory pair behaves as a link and delivers in the same order every time."""

from __future__ import annotations

import asyncio

import pytest

from mesh.errors import LinkLost, PipelineStalled, VersionMismatch
from mesh.wire.frames import FrameType, pack_frame
from mesh.wire.messages import Message, Park, Result, Step
from tests.wire.memory import MemoryLink, link_pair
from tests.wire.support import SMALL, Recorder, answer, hello, same, tensor


def pair() -> tuple[MemoryLink, Recorder, MemoryLink, Recorder]:
    a, b = link_pair(hello("a"), hello("b"), limits=SMALL)
    recorder_a, recorder_b = Recorder(), Recorder()
    a.attach(recorder_a)
    b.attach(recorder_b)
    return a, recorder_a, b, recorder_b


async def test_both_ends_are_open_and_know_each_other() -> None:
    a, _, b, _ = pair()
    assert (a.peer, b.peer) == (hello("b"), hello("a"))
    assert not a.is_closed
    assert a.rtt_ms is None


async def test_versions_have_to_agree() -> None:
    with pytest.raises(VersionMismatch, match="b is too old"):
        link_pair(hello("a"), hello("b", version=0))


async def test_messages_and_large_tensors_arrive_in_order() -> None:
    a, got_a, b, got_b = pair()
    wire = tensor("int8", (3000,))
    a.send(Park(1))
    a.send(Step(1, 0, 0, wire))
    assert await got_b.next() == Park(1)
    step = await got_b.next()
    assert isinstance(step, Step)
    b.send(answer(step))
    result = await got_a.next()
    assert isinstance(result, Result)
    assert same(result.tensor, wire)


async def test_the_order_of_deliveries_is_the_same_every_time() -> None:
    async def run() -> list[tuple[str, Message]]:
        a, _, b, _ = pair()
        log: list[tuple[str, Message]] = []
        done = asyncio.Event()

        class Log:
            def __init__(self, name: str) -> None:
                self.name = name

            def message(self, message: Message) -> None:
                log.append((self.name, message))
                if len(log) == 20:
                    done.set()

            def closed(self, error: object) -> None: ...

        a.attach(Log("a"))
        b.attach(Log("b"))
        for number in range(10):
            a.send(Park(number))
            b.send(Park(number))
        await done.wait()
        return log

    assert await run() == await run()


async def test_close_is_a_bye() -> None:
    a, got_a, b, got_b = pair()
    a.send(Park(1))
    a.close("enough")
    a.close("enough")
    assert await got_a.end() is None
    assert await got_b.next() == Park(1)
    assert await got_b.end() is None
    with pytest.raises(LinkLost):
        b.send(Park(1))


async def test_cut_loses_what_is_under_way() -> None:
    a, got_a, _, got_b = pair()
    a.send(Park(1))
    a.cut()
    assert isinstance(await got_a.end(), LinkLost)
    assert isinstance(await got_b.end(), LinkLost)
    assert got_b.messages.empty()
    with pytest.raises(LinkLost):
        await a.drain(1)


async def test_a_refusal_ends_both_sides() -> None:
    a, got_a, b, got_b = pair()
    b.session.receive(pack_frame(FrameType.PING, 1, 0, bytes(8)))  # with the number of a's next
    a.send(Park(1))
    assert "was expected" in str(await got_b.end())
    assert "was expected" in str(await got_a.end())


async def test_drain_waits_for_answers() -> None:
    a, _, b, got_b = pair()
    for number in range(40):
        a.send(Step(1, number, 0, tensor("int8", (60,))))
    with pytest.raises(PipelineStalled):
        await a.drain(0.01)
    waiting = asyncio.create_task(a.drain(10))
    for _ in range(16):
        step = await got_b.next()
        assert isinstance(step, Step)
        b.send(answer(step))
    await waiting
    assert a.session.queued_bytes <= SMALL.high_water_bytes


async def test_ping_measures() -> None:
    a, _, _, _ = pair()
    a.ping()
    async with asyncio.timeout(5):
        while a.rtt_ms is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert a.rtt_ms >= 0
