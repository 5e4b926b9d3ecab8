"""Several generations that answer one request: run beside each other, their frames as one stream.

Bounded: a few at a time, which are no further ahead of the reader than a frame or two each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from mesh.api.services import Generations
from mesh.errors import Busy
from mesh.processes.tasks import end
from mesh.types import BringingUp, GenerationRequest, Queued, StreamFrame

AT_ONCE = 4
"""Answers to one request that run at a time: what keeps the hops of most routes busy."""


@dataclass(frozen=True, slots=True)
class Of:
    """A frame of the generation number `index`."""

    index: int
    frame: StreamFrame


Frames = AsyncGenerator[StreamFrame, None] | AsyncGenerator[Of, None]
"""Of one generation; or of several, each frame with its number."""


def frames_of(generations: Generations, requests: Sequence[GenerationRequest]) -> Frames:
    """The frames of one request, or of several `together`."""
    if len(requests) == 1:
        return generations.generate(requests[0])
    return together(generations, requests)


async def heard(frames: Frames, hear: Callable[[StreamFrame], None]) -> AsyncGenerator[Any, None]:
    """The same, each frame told to `hear` first."""
    async with aclosing(frames):
        async for item in frames:
            hear(item.frame if isinstance(item, Of) else item)
            yield item


async def together(
    generations: Generations, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[Of, None]:
    """The frames of all `requests`, those of each in order.

    Where this node has no place for so many at once, it goes on with fewer. Raises what one of them
    raises, and ends the others.
    """
    ready: asyncio.Queue[Of | Exception | None] = asyncio.Queue(maxsize=AT_ONCE)
    line = _Line(generations, requests, ready)
    count = min(AT_ONCE, len(requests))
    name = requests[0].request_id
    tasks = [asyncio.create_task(line.work(), name=f"{name} {n}") for n in range(count)]
    try:
        while count:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                count -= 1
            else:
                yield item
    finally:
        await end(tasks)


class _Line:
    """The requests that were not begun yet, and who works on them."""

    def __init__(
        self,
        generations: Generations,
        requests: Sequence[GenerationRequest],
        ready: asyncio.Queue[Of | Exception | None],
    ) -> None:
        self._generations = generations
        self._waiting = deque(enumerate(requests))
        self._ready = ready
        self._under_way = 0

    async def work(self) -> None:
        """One request after the other. None says that this is over, or an error why."""
        last: Exception | None = None
        try:
            while self._waiting and await self._run(*self._waiting.popleft()):
                pass
        except Exception as error:  # noqa: BLE001 - whoever reads the frames raises it
            last = error
        await self._ready.put(last)

    async def _run(self, index: int, request: GenerationRequest) -> bool:
        """Whether it was run; if not it waits again, for a worker that goes on."""
        has_begun = False
        self._under_way += 1
        try:
            async with aclosing(self._generations.generate(request)) as frames:
                async for frame in frames:
                    has_begun = has_begun or not isinstance(frame, Queued | BringingUp)
                    await self._ready.put(Of(index, frame))
        except Busy:
            if has_begun or self._under_way == 1:
                raise
            self._waiting.appendleft((index, request))
            return False
        finally:
            self._under_way -= 1
        return True
