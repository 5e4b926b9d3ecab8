"""A second session over a hop's layers on another host, to see whether it answers the same.

To its host it looks like any session that is being replayed. One question at a time; what fails or
takes too long is closed by its owner and not used again.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from mesh.errors import BadFrame, MeshError, PipelineStalled, from_dict
from mesh.pipeline.lines import Line
from mesh.pipeline.station import is_activations
from mesh.pipeline.terms import SessionTerms
from mesh.types import RouteHop
from mesh.wire.messages import (
    Close,
    Failure,
    Message,
    Opened,
    Park,
    Result,
    Resume,
    Step,
    WireTensor,
)


class Shadow:
    """`length` positions of the hop's inputs are in its cache."""

    def __init__(self, hop: RouteHop, line: Line, terms: SessionTerms, timeout_s: float) -> None:
        self.hop = hop
        self.length = 0
        self._line = line
        self._terms = replace(terms, harvest=None)  # who checks writes nothing down
        self._timeout_s = timeout_s
        self._session = line.register(self)
        self._steps = 0
        self._answer: asyncio.Future[Message] | None = None

    async def open(self) -> None:
        """Ask for the session. Raises what the host answers, LinkLost, PipelineStalled."""
        await self._ask(*self._terms.opening(self._session, self.hop.layers))

    async def resume(self) -> None:
        """Take a stream again after `park`; raises as `open` does."""
        await self._ask(Resume(self._session, max(self._terms.reserve, self.length)))

    def park(self) -> None:
        """Give the stream back until the next check. Raises LinkLost."""
        self._line.send(Park(self._session))

    async def step(self, position: int, tensor: WireTensor) -> WireTensor:
        """The host's answer to the hop's input at `position`; raises as `open`, and BadFrame."""
        self._steps += 1
        answer = await self._ask(Step(self._session, self._steps, position, tensor))
        if not isinstance(answer, Result) or not is_activations(answer.tensor, tensor.shape):
            raise BadFrame("a shadow session answered something else.", fix="It is not used again.")
        self.length = position + tensor.shape[1]
        return answer.tensor

    def close(self) -> None:
        """Free the session, if its host can still be told."""
        self._line.unregister(self._session)
        if not self._line.is_closed:
            self._line.send(Close(self._session))

    # SessionReceiver

    def message(self, message: Message) -> None:
        """An answer of the host."""
        answer = self._answer
        if answer is None or answer.done():
            return
        if isinstance(message, Failure):
            answer.set_exception(from_dict(message.error))
        elif isinstance(message, Opened | Result):
            answer.set_result(message)

    def lost(self, error: MeshError) -> None:
        """The link is gone."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def rest(self, before: float) -> None:
        """Nothing to do: it is parked between questions."""

    async def _ask(self, *question: Message) -> Message:
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answer = answer
        try:
            self._line.ask(question)
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError:
            raise PipelineStalled(
                "a shadow session stalled.", fix="It is not used again."
            ) from None
        finally:
            self._answer = None
