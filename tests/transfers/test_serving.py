"""What the answering end of a link for weights does with more questions than it answers."""

from __future__ import annotations

import asyncio

from mesh.errors import BadRequest, Busy, ModelNotFound
from mesh.transfers.pacing import Pace
from mesh.transfers.rereading import Rereading
from mesh.transfers.serving import MAX_WAITING, WeightsServer
from mesh.transfers.shelf import Shelf
from mesh.wire.messages import Failure, Message, Part, WeightsAsk
from tests.waiting import until


class Taken:
    """A link whose other end takes everything."""

    def __init__(self) -> None:
        self.failures: list[tuple[int | None, str]] = []

    def send(self, message: Message) -> None:
        assert isinstance(message, Failure)
        self.failures.append((message.session, message.error["code"]))

    async def drain(self, timeout_s: float) -> None:
        """There is room."""


def ask(number: int, part: Part = Part.DOCUMENT, *, start: int = 0) -> WeightsAsk:
    return WeightsAsk(number, "ab" * 32, part, "a", start, 10)


def serving(link: Taken) -> WeightsServer:
    shelf = Shelf()
    rereading = Rereading(shelf, lambda damaged: None)
    return WeightsServer(link, shelf, rereading, Pace(), lambda count: None)  # type: ignore[arg-type]


async def test_so_many_questions_wait_and_more_are_refused_at_once() -> None:
    link = Taken()
    server = serving(link)
    for number in range(MAX_WAITING + 3):
        server.message(ask(number))
    refused = [(number, Busy.code) for number in range(MAX_WAITING, MAX_WAITING + 3)]
    assert link.failures == refused
    await until(lambda: len(link.failures) == MAX_WAITING + 3)
    assert link.failures[3:] == [(number, ModelNotFound.code) for number in range(MAX_WAITING)]
    server.message(ask(1000, start=11))
    await until(lambda: (1000, BadRequest.code) in link.failures)


async def test_nothing_is_looked_up_or_said_once_the_link_is_closed() -> None:
    before, link = asyncio.all_tasks(), Taken()
    server = serving(link)
    for number in range(8):
        server.message(ask(number, Part.TENSOR if number % 2 else Part.DOCUMENT))
    await asyncio.sleep(0)
    server.closed(None)
    await until(lambda: asyncio.all_tasks() == before)
    assert link.failures == []
