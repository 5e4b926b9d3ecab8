"""All askers of a node behind one door: who is let in, which of them is asked, what is counted.

The HTTP API's `mesh.api.services.Generations`. Computes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from mesh.errors import ExperimentalDisabled, nobody_asks
from mesh.logs import REQUEST
from mesh.pipeline.entrance import Entrance
from mesh.pipeline.live import LiveCounts
from mesh.pipeline.supervisor import AskerSupervisor
from mesh.types import BringingUp, Done, GenerationRequest, ModelId, Queued, StreamFrame

BringUp = Callable[[GenerationRequest], AsyncGenerator[BringingUp, None]]


@dataclass(slots=True)
class _Visit:
    """A request from its coming in to its leaving."""

    request: GenerationRequest


class Askers:
    """All askers of a node: the HTTP API's `mesh.api.services.Generations`."""

    def __init__(
        self,
        askers: dict[ModelId, AskerSupervisor],
        *,
        entrance: Entrance,
        why_disabled: Callable[[ModelId], str | None],
        prepared: Callable[[GenerationRequest], Awaitable[GenerationRequest]],
        on_frame: Callable[[StreamFrame], None],
        counts: LiveCounts,
        bring_up: BringUp,
    ) -> None:
        """`prepared` looks up what a request names only, such as edits; it may raise. Every frame
        goes through `on_frame`, and is counted on `counts`. `bring_up` waits for a model that is
        not up; it may raise."""
        self._askers = askers
        self._entrance = entrance
        self._why_disabled = why_disabled
        self._prepared = prepared
        self._on_frame = on_frame
        self._counts = counts
        self._bring_up = bring_up

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[StreamFrame, None]:
        """Frames of a generation, `Done` last.

        Raises:
            ModelNotFound: this node has no ends of the model.
            Busy: `max_concurrent_pipelines` generations run already, and waiting did not help.
            ExperimentalDisabled: distributed inference is switched off here.
        """
        with self._visit(request) as visit:
            async with aclosing(self._come_in(visit)) as steps:
                async for step in steps:
                    yield step
            asker = self._asker_of(visit.request)
            with self._counts.counting(visit.request) as seen:
                async with aclosing(asker.generate(visit.request)) as frames:
                    async for frame in frames:
                        if not isinstance(frame, Done):  # the end keeps nobody else waiting
                            await self._entrance.turn(request.request_id)
                        self._on_frame(frame)
                        seen(frame)
                        yield frame

    async def load(self, request: GenerationRequest) -> None:
        """Wait until the request's model can be asked; raises as `generate` does."""
        await _end_of(self._bring_up(request))
        await self._asker_of(request).wait_ready()

    async def count(self, request: GenerationRequest) -> int:
        """How many tokens the request's prompt has; raises as `generate` does."""
        await self.load(request)
        return await self._asker_of(request).count(request)

    async def lens(self, request: GenerationRequest, top: int) -> dict[str, Any]:
        """See `mesh.pipeline.lens`; raises as `generate` does."""
        with self._visit(request) as visit:
            await _end_of(self._come_in(visit))
            return await self._asker_of(visit.request).lens(visit.request, top)

    # Private

    @contextmanager
    def _visit(self, request: GenerationRequest) -> Iterator[_Visit]:
        """It leaves at the end, whether it came in or not."""
        try:
            yield _Visit(request)
        finally:
            self._entrance.leave(request.request_id)

    async def _come_in(self, visit: _Visit) -> AsyncGenerator[BringingUp | Queued, None]:
        """What is told until the model is up and the visit is in, its request as it is to be asked.

        While it stood in line its model may have got another asker, or none: only what is looked up
        afterwards can be asked. Raises as `generate` does.
        """
        async with aclosing(self._bring_up(visit.request)) as steps:
            async for step in steps:
                yield step
        request = await self._prepared(visit.request)
        visit.request = request = replace(request, trace_id=REQUEST.get())
        self._asker_of(request)  # what nobody can ask does not stand in line
        entering = self._entrance.enter(request.request_id, request.principal)
        with self._counts.entering(request.model):
            async with aclosing(entering):
                async for queued in entering:
                    yield queued

    def _asker_of(self, request: GenerationRequest) -> AskerSupervisor:
        asker = self._askers.get(request.model)
        if asker is None:
            raise nobody_asks(request.model, self._askers)
        disabled = self._why_disabled(request.model)
        if disabled is not None:
            raise ExperimentalDisabled(disabled, fix="Set research.distributed_inference.enabled.")
        return asker


async def _end_of(steps: AsyncGenerator[BringingUp | Queued, None]) -> None:
    async with aclosing(steps):
        async for _ in steps:
            pass
