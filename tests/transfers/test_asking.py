"""The asking end of a link for weights, over a link of this test's: who is given up, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from mesh.errors import PipelineStalled, TransferFailed
from mesh.transfers.asking import MAX_PARTS, Peer, WeightsLink
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


Said = tuple[int, int, int]
"""Of a blob: where it begins, how many bytes it has, and of how many it says it is a part."""


@pytest.mark.parametrize(
    "said",
    [
        [(0, 1001, 1001)], [(0, 10, 1001)], [(1, 10, 1000)], [(0, 0, 1000)],
        [(0, 10, 1000), (10, 10, 999)], [(0, 10, 1000), (0, 10, 1000)],
        [(0, 10, 1000), (20, 10, 1000)],
    ],
)  # fmt: skip
async def test_an_answer_of_another_size_or_order_than_was_asked_for_ends_the_question(
    said: list[Said],
) -> None:
    def answer(link: WeightsLink, ask: WeightsAsk) -> None:
        for offset, size, length in said:
            link.message(blob(ask.session, bytes(size), offset=offset, length=length))

    with pytest.raises(TransferFailed, match="what was not asked"):
        await asked(answer)


async def test_an_answer_in_crumbs_ends_the_question() -> None:
    def answer(link: WeightsLink, ask: WeightsAsk) -> None:
        for count in range(MAX_PARTS + 1):
            link.message(blob(ask.session, b"x", offset=count, length=1000))

    with pytest.raises(TransferFailed, match="in crumbs"):
        await asked(answer)


async def test_less_of_a_tensor_than_was_asked_for_is_an_error() -> None:
    link = WeightsLink(NodeId("liar"))

    def answer(ask: WeightsAsk) -> None:
        link.message(blob(ask.session, bytes(999)))

    link.attach(ScriptedLink(answer))  # type: ignore[arg-type]
    with pytest.raises(TransferFailed, match="gave 999 bytes where 1000 were asked for"):
        await Peer("liar", link, "0" * 64).read("tensor", 0, 1000)
