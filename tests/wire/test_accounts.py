"""What a peer's links hold in memory together is on its account, and bounded, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from mesh.accounts.ledger import Limit, Resource, ResourceLedger, of_peer
from mesh.clock import SystemClock
from mesh.errors import LimitReached
from mesh.wire.connection import WebSocketLink
from mesh.wire.frames import FrameType, pack_frame
from mesh.wire.limits import DEFAULT_LIMITS, MIB, Limits
from mesh.wire.link import LinkHandler
from mesh.wire.messages import Message, Result, Step, WireTensor
from mesh.wire.tensors import pack_header
from mesh.wire.websocket import connect
from tests.waiting import until
from tests.wire.house import House, foreign_client, listening
from tests.wire.support import Recorder, answer, hello, session_pair, tensor

PEER = of_peer("id-client")
EACH, TOTAL = 8 * MIB, 12 * MIB
BYTES = Resource.BYTES_BUFFERED


def counting() -> Limits:
    limits = {Resource.LINKS: Limit(16), BYTES: Limit(EACH, TOTAL)}
    return replace(DEFAULT_LIMITS, accounts=ResourceLedger(SystemClock(), limits))


def accounts(limits: Limits) -> ResourceLedger:
    assert limits.accounts is not None
    return limits.accounts


class Slow(Recorder):
    """Answers nothing until it is told to."""

    def __init__(self, link: WebSocketLink) -> None:
        super().__init__()
        self.link = link
        self.steps: list[Step] = []

    def message(self, message: Message) -> None:
        if isinstance(message, Step):
            self.steps.append(message)
        else:
            super().message(message)


async def stranger(house: House, name: str) -> tuple[WebSocketLink, Recorder]:
    handler = Recorder()
    link = await connect("127.0.0.1", house.server.port, hello=hello(name), handler=handler)
    return link, handler


async def test_steps_that_wait_on_many_links_are_bounded_together() -> None:
    limits = counting()
    slow: list[Slow] = []

    def accept(link: WebSocketLink) -> LinkHandler:
        slow.append(Slow(link))
        return slow[-1]

    async with listening(limits, accept) as house:
        flood = [await stranger(house, "client") for _ in range(6)]
        for link, _ in flood:
            for number in range(3):
                link.send(Step(1, number, 0, tensor("int8", (MIB,))))
        await until(lambda: any(handler.ended.done() for _, handler in flood))
        refused = next(handler for _, handler in flood if handler.ended.done())
        error = await refused.end()
        assert isinstance(error, LimitReached)
        assert "peer:id-client" in error.message
        assert accounts(limits).held(PEER, BYTES) <= EACH
        # Another peer is served all the same, and the flood's memory is given back.
        friend, _ = await stranger(house, "friend")
        friend.send(Step(1, 0, 0, tensor("int8", (MIB,))))
        await until(lambda: bool(slow[-1].steps))
        for link, _ in flood:
            link.close()
        await until(lambda: accounts(limits).held(PEER, BYTES) == 0)
        assert accounts(limits).held(PEER, Resource.LINKS) == 0
        friend.close()


@asynccontextmanager
async def dripping(house: House, name: str, size_bytes: int) -> AsyncIterator[Recorder]:
    """Somebody else's client that sends so much of a tensor and never its end."""
    head = pack_header(WireTensor("int8", (60 * MIB,), b""), 1)
    async with foreign_client(house, name) as websocket:
        for sequence in range(1, 1 + size_bytes // MIB):
            await websocket.send(pack_frame(FrameType.DATA, sequence, 0, head, bytes(MIB)))
        yield house.handlers[-1]


async def test_tensors_that_never_end_are_on_the_account_too() -> None:
    limits = counting()
    async with listening(limits) as house, dripping(house, "client", 6 * MIB) as first:
        await until(lambda: accounts(limits).held(PEER, BYTES) >= 6 * MIB)
        async with dripping(house, "client", 6 * MIB) as second:
            assert isinstance(await second.end(), LimitReached)
            assert accounts(limits).held(PEER, BYTES) <= EACH
        async with dripping(house, "friend", 3 * MIB):
            await until(lambda: accounts(limits).together(BYTES) >= 9 * MIB)
        assert not first.ended.done()


async def test_an_answered_step_is_on_nobodys_account() -> None:
    limits = counting()
    async with listening(limits) as house:
        client = Recorder()
        link = await house.dial(client)
        for number in range(30):
            link.send(Step(1, number, 0, tensor("int8", (MIB,))))
            assert isinstance(await client.next(), Result)
        await until(lambda: accounts(limits).held(PEER, BYTES) == 0)
        link.close()
        await until(lambda: accounts(limits).snapshot() == [])


async def test_answers_that_nobody_reads_are_refused_to_whoever_makes_them() -> None:
    a, b = session_pair(DEFAULT_LIMITS)
    ledger = ResourceLedger(SystemClock(), {BYTES: Limit(2 * MIB)})
    b.count_on(ledger.hold(PEER, BYTES))
    a.send(Step(1, 0, 0, tensor("int8", (MIB,))))
    frame = a.next_frame()
    assert frame is not None
    (step,) = b.receive(frame)
    assert isinstance(step, Step)
    b.send(answer(step))
    held = ledger.held(PEER, BYTES)
    assert MIB < held < 2 * MIB
    with pytest.raises(LimitReached):
        b.send(Result(1, 1, tensor("int8", (MIB,)), 0, 0))
    assert ledger.held(PEER, BYTES) == held
    assert b.next_frame() is not None
    assert ledger.held(PEER, BYTES) == 0
