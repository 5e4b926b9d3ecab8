"""The asking end of a link for weights, over a link of this test's: who is given up, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from mesh.errors import PipelineStalled
from mesh.transfers.asking import WeightsLink
from mesh.types import NodeId
from mesh.wire.messages import Blob, BlobKind, Message, Part, WeightsAsk


class ScriptedLink:
    """What is sent over it goes to `answer`."""

    is_closed = False

    def __init__(self, answer: Callable[[WeightsAsk], None]) -> None:
        self._answer = answer

    def send(self, message: Message) -> None:
        assert isinstance(message, WeightsAsk)
        self._answer(message)

    def close(self, reason: str = "") -> None:
        self.is_closed = True


def blob(number: int, data: bytes, *, offset: int = 0, length: int = 0) -> Blob:
    return Blob(number, BlobKind.ANSWER, length or len(data), offset, data)


async def asked(answer: Callable[[WeightsLink, WeightsAsk], None]) -> None:
    """A question for 1,000 bytes, answered so."""
    link = WeightsLink(NodeId("liar"), silence_s=0.4, least_bytes_s=1000)
    link.attach(ScriptedLink(lambda ask: answer(link, ask)))  # type: ignore[arg-type]
    async with asyncio.timeout(20):
        await link.ask("0" * 64, Part.TENSOR, "tensor", 0, 1000)


def often(say: Callable[[int], None]) -> asyncio.Task[None]:
    async def run() -> None:
        for count in range(100):
            say(count)
            await asyncio.sleep(0.1)

    return asyncio.create_task(run())


async def test_answers_that_nobody_asked_for_do_not_keep_a_question_open() -> None:
    talking: list[asyncio.Task[None]] = []

    def answer(link: WeightsLink, ask: WeightsAsk) -> None:
        talking.append(often(lambda _: link.message(blob(ask.session + 7, b"x"))))

    with pytest.raises(PipelineStalled, match="Nothing came"):
        await asked(answer)
    talking[0].cancel()


async def test_drops_do_not_keep_a_question_open() -> None:
    talking: list[asyncio.Task[None]] = []

    def answer(link: WeightsLink, ask: WeightsAsk) -> None:
        def drop(count: int) -> None:
            link.message(blob(ask.session, b"x", offset=count, length=1000))

        talking.append(often(drop))

    with pytest.raises(PipelineStalled, match="slower than"):
        await asked(answer)
    talking[0].cancel()
