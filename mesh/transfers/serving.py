"""The answering end: gives trusted members the bytes of what lies on this node's shelf.

Reads in threads, sends no faster than the pace allows and no more than the link takes. Who may link
is decided before (`process`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from mesh.errors import (
    BadRequest,
    Busy,
    InternalError,
    LinkLost,
    MeshError,
    PipelineStalled,
    as_mesh_error,
)
from mesh.processes.tasks import spawn, unheard
from mesh.transfers.pacing import Pace
from mesh.transfers.rereading import Rereading
from mesh.transfers.shelf import Shelf
from mesh.wire.limits import WEIGHTS_LIMITS
from mesh.wire.link import Link
from mesh.wire.messages import Blob, BlobKind, Failure, Message, Part, WeightsAsk

logger = logging.getLogger(__name__)

MAX_WAITING = 64
"""Questions of one link that wait; more are refused."""
_CHUNK_BYTES = WEIGHTS_LIMITS.chunk_bytes
_READ_BYTES = 4 * _CHUNK_BYTES
_PATIENCE_S = 30.0
"""How long a peer may take nothing."""


@dataclass(frozen=True, slots=True)
class _Question:
    """What is asked, and the look at it that has to end before it is answered."""

    ask: WeightsAsk
    looking: asyncio.Task[None] | None

    def end(self) -> None:
        """It is answered, or nobody waits for that."""
        if self.looking is not None:
            self.looking.cancel()
            self.looking.add_done_callback(unheard)


class WeightsServer:
    """A `LinkHandler`: answers the questions of one link, one after the other.

    `on_sent` hears how many bytes of tensors went out.
    """

    def __init__(
        self,
        link: Link,
        shelf: Shelf,
        rereading: Rereading,
        pace: Pace,
        on_sent: Callable[[int], None],
    ) -> None:
        self._link = link
        self._shelf = shelf
        self._rereading = rereading
        self._pace = pace
        self._on_sent = on_sent
        self._waiting: deque[_Question] = deque()
        self._task: asyncio.Task[None] | None = None

    def message(self, message: Message) -> None:
        """A question."""
        if not isinstance(message, WeightsAsk):
            return
        if len(self._waiting) >= MAX_WAITING:
            self._fail(message, Busy("Too many questions at once.", fix="Ask fewer at a time."))
            return
        self._waiting.append(_Question(message, self._begun(message)))
        if self._task is None or self._task.done():
            self._task = spawn(self._answer_all(), "send weights")

    def closed(self, error: MeshError | None) -> None:
        """Nobody waits for answers any more."""
        for question in self._waiting:
            question.end()
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    def _begun(self, ask: WeightsAsk) -> asyncio.Task[None] | None:
        """The look at what it asks for, while others are answered."""
        if ask.part is not Part.TENSOR:
            return None
        looking = self._rereading.before_giving(ask.weights_sha256, ask.name)
        return asyncio.create_task(looking, name=f"read {ask.name}")

    async def _answer_all(self) -> None:
        while self._waiting:
            question = self._waiting.popleft()
            ask = question.ask
            try:
                await as_mesh_error(self._answer(question), "sending weights", _unforeseen)
            except (LinkLost, PipelineStalled) as error:
                logger.info("peer=%s weights not sent: %s", self._link.peer.node_name, error)
                self._link.close("it takes nothing")
                return
            except MeshError as error:
                self._fail(ask, error)
            finally:
                question.end()

    async def _answer(self, question: _Question) -> None:
        ask = question.ask
        if ask.start > ask.stop:
            raise BadRequest("A part cannot end before it begins.", fix="Update hearthnet.")
        if question.looking is not None:
            await question.looking
        part = await asyncio.to_thread(self._shelf.part, ask.weights_sha256, ask.part, ask.name)
        start, stop = min(ask.start, part.size), min(ask.stop, part.size)
        if start == stop:
            self._link.send(Blob(ask.session, BlobKind.ANSWER, 0, 0))
        for place in range(start, stop, _READ_BYTES):
            end = min(place + _READ_BYTES, stop)
            data = memoryview(await asyncio.to_thread(part.read, place, end))
            for offset in range(0, len(data), _CHUNK_BYTES):
                chunk = data[offset : offset + _CHUNK_BYTES]
                await self._pace.take(len(chunk))
                await self._link.drain(_PATIENCE_S)
                at = place - start + offset
                self._link.send(Blob(ask.session, BlobKind.ANSWER, stop - start, at, chunk))
                if ask.part is Part.TENSOR:
                    self._on_sent(len(chunk))

    def _fail(self, ask: WeightsAsk, error: MeshError) -> None:
        with suppress(LinkLost):
            self._link.send(Failure(error.to_dict(), ask.session))


def _unforeseen(error: Exception) -> MeshError:
    return InternalError(f"The weights cannot be read: {error}.", fix="See the log of that node.")
