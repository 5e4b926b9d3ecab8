"""All askers of a node behind one door: who is let in, which of them is asked, what is counted.

The HTTP API's `mesh.api.services.Generations`. Computes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from mesh.errors import ExperimentalDisabled, nobody_asks
from mesh.logs import REQUEST
from mesh.pipeline.entrance import Entrance
from mesh.pipeline.live import LiveCounts
from mesh.pipeline.supervisor import AskerSupervisor
from mesh.types import BringingUp, GenerationRequest, ModelId, StreamFrame

BringUp = Callable[[GenerationRequest], AsyncGenerator[BringingUp, None]]


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
        async with contextlib.aclosing(self._bring_up(request)) as steps:
            async for step in steps:
                yield step
        request = replace(await self._prepared(request), trace_id=REQUEST.get())
        asker = self._asker_of(request)
        entering = self._entrance.enter(request.request_id, request.principal)
        try:
            with self._counts.entering():
                async with contextlib.aclosing(entering):
                    async for queued in entering:
                        yield queued
            with self._counts.counting(request) as seen:
                async with contextlib.aclosing(asker.generate(request)) as frames:
                    async for frame in frames:
                        self._on_frame(frame)
                        seen(frame)
                        yield frame
        finally:
            self._entrance.leave(request.request_id)

    async def load(self, request: GenerationRequest) -> None:
        """Wait until the request's model can be asked; raises as `generate` does."""
        async with contextlib.aclosing(self._bring_up(request)) as steps:
            async for _ in steps:
                pass
        await self._asker_of(request).wait_ready()

    async def count(self, request: GenerationRequest) -> int:
        """How many tokens the request's prompt has; raises as `generate` does."""
        await self.load(request)
        return await self._asker_of(request).count(request)

    async def lens(self, request: GenerationRequest, top: int) -> dict[str, Any]:
        """See `mesh.pipeline.lens`; raises as `generate` does."""
        async with contextlib.aclosing(self._bring_up(request)) as steps:
            async for _ in steps:
                pass
        request = replace(await self._prepared(request), trace_id=REQUEST.get())
        asker = self._asker_of(request)
        entering = self._entrance.enter(request.request_id, request.principal)
        try:
            with self._counts.entering():
                async with contextlib.aclosing(entering):
                    async for _ in entering:
                        pass
            return await asker.lens(request, top)
        finally:
            self._entrance.leave(request.request_id)

    # Private

    def _asker_of(self, request: GenerationRequest) -> AskerSupervisor:
        asker = self._askers.get(request.model)
        if asker is None:
            raise nobody_asks(request.model, self._askers)
        disabled = self._why_disabled(request.model)
        if disabled is not None:
            raise ExperimentalDisabled(disabled, fix="Set research.distributed_inference.enabled.")
        return asker
