"""The asking end of a link over which weights are fetched.

Any number of questions may be under way; they are answered in their order, part by part. Believes
nothing: whoever asks checks what it got. Knows nothing of plans or of disks.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mesh.errors import LinkLost, MeshError, PipelineStalled, TransferFailed, from_peer
from mesh.transfers.documents import MAX_DOCUMENT_BYTES
from mesh.types import NodeId
from mesh.wire.link import Link
from mesh.wire.messages import Blob, BlobKind, Failure, Message, Part, WeightsAsk

Parts = Sequence[bytes | bytearray | memoryview]
"""Bytes, one part after the other: putting them together would copy them once more."""

MAX_PARTS = 256
"""Of one answer: a part of a few bytes takes much more memory than these."""
SILENCE_S = 15.0
"""A source that owes bytes and sends none for so long is given up."""
LEAST_BYTES_S = 16 << 10
"""And so is one that sends them slower than that."""


class Source(Protocol):
    """Somebody who has tensors of one checkpoint."""

    name: str
    """What people call it."""

    async def read(self, tensor: str, start: int, stop: int) -> Parts:
        """These bytes of a tensor, as they came. Raises MeshError."""

    def close(self) -> None:
        """Ask it no more."""


@dataclass(slots=True)
class _Question:
    limit: int
    done: asyncio.Future[Parts]
    parts: list[bytes | bytearray | memoryview] = field(default_factory=list)
    size: int = 0
    length: int | None = None


class WeightsLink:
    """A `LinkHandler` and what is asked over it. `attach` before the first question."""

    def __init__(
        self, host: NodeId, *, silence_s: float = SILENCE_S, least_bytes_s: float = LEAST_BYTES_S
    ) -> None:
        self.host = host
        self._silence_s = silence_s
        self._least_bytes_s = least_bytes_s
        self._link: Link | None = None
        self._numbers = itertools.count(1)
        self._questions: dict[int, _Question] = {}
        self._heard_at = 0.0
        self._error: MeshError | None = None

    def attach(self, link: Link) -> None:
        """Use this link, whose handler this is."""
        self._link = link

    async def ask(
        self, sha256: str, part: Part, name: str = "", start: int = 0, stop: int = 0
    ) -> Parts:
        """The bytes of a part that there are of [start, stop).

        Raises LinkLost, PipelineStalled when nothing comes for `SILENCE_S` or all of it too slowly,
        TransferFailed for an answer of another form, and what the other side refuses with.
        """
        if self._error is not None:
            raise self._error
        if self._link is None:
            raise LinkLost("The link is not open.", fix="Connect again.")
        number = next(self._numbers) & 0xFFFFFFFF
        loop = asyncio.get_running_loop()
        question = self._questions[number] = _Question(stop - start, loop.create_future())
        self._heard_at = loop.time()
        ahead = sum(each.limit for each in self._questions.values())  # it is answered after them
        give_up_at = loop.time() + self._silence_s + ahead / self._least_bytes_s
        try:
            self._link.send(WeightsAsk(number, sha256, part, name, start, stop))
            while not question.done.done():
                await asyncio.wait([question.done], timeout=self._silence_s)
                if question.done.done():
                    break
                if loop.time() - self._heard_at >= self._silence_s:
                    raise PipelineStalled(
                        f"Nothing came for {self._silence_s:g} s.",
                        fix="It is asked of another node.",
                    )
                if loop.time() >= give_up_at:
                    raise PipelineStalled(
                        f"It came slower than {self._least_bytes_s / 1024:g} KiB/s.",
                        fix="It is asked of another node.",
                    )
            return question.done.result()
        finally:
            question.done.cancel()
            self._questions.pop(number, None)

    async def document(self, sha256: str) -> bytes:
        """What it says of this checkpoint, as `documents.decode` reads it. Raises as `ask`."""
        return b"".join(await self.ask(sha256, Part.DOCUMENT, stop=MAX_DOCUMENT_BYTES))

    def close(self, reason: str = "") -> None:
        """Close the link."""
        if self._link is not None:
            self._link.close(reason)

    # LinkHandler

    def message(self, message: Message) -> None:
        """A part of an answer, or why there is none."""
        if isinstance(message, Failure):
            error = from_peer(message.error)
            if message.session is None:
                self._fail_all(error)
            elif (question := self._questions.get(message.session)) is not None:
                _fail(question, error)
        elif isinstance(message, Blob) and message.kind is BlobKind.ANSWER:
            question = self._questions.get(message.session)
            if question is not None and not question.done.done():
                if message.data:  # what nobody has asked for proves nothing
                    self._heard_at = asyncio.get_running_loop().time()
                self._take(question, message)

    def closed(self, error: MeshError | None) -> None:
        """Nothing will come any more."""
        self._fail_all(error or LinkLost("The other node closed the link.", fix="Ask another."))

    def _take(self, question: _Question, blob: Blob) -> None:
        fits = question.length in (None, blob.length) and blob.offset == question.size
        if len(question.parts) == MAX_PARTS:
            _fail(question, TransferFailed("It answered in crumbs.", fix="Ask another."))
            return
        if not fits or blob.length > question.limit or (not blob.data and blob.length > 0):
            _fail(question, TransferFailed("It answered what was not asked.", fix="Ask another."))
            return
        question.length = blob.length
        question.parts.append(blob.data)
        question.size += len(blob.data)
        if question.size == blob.length:
            question.done.set_result(question.parts)

    def _fail_all(self, error: MeshError) -> None:
        self._error = error
        for question in self._questions.values():
            _fail(question, error)


class Peer(Source):
    """Another node as a source of one checkpoint."""

    def __init__(self, name: str, link: WeightsLink, sha256: str) -> None:
        self.name = name
        self.link = link
        self._sha256 = sha256

    async def read(self, tensor: str, start: int, stop: int) -> Parts:
        """See `Source`; fewer bytes than were asked for are an error."""
        parts = await self.link.ask(self._sha256, Part.TENSOR, tensor, start, stop)
        if (size := sum(map(len, parts))) != stop - start:
            raise TransferFailed(
                f"{self.name} gave {size} bytes where {stop - start} were asked for.",
                fix="It is asked of another node.",
            )
        return parts

    def close(self) -> None:
        self.link.close("the fetch has ended")


def _fail(question: _Question, error: MeshError) -> None:
    if not question.done.done():
        question.done.set_exception(error)
        question.done.exception()  # who asked may be gone
