"""Whether a shard's weights are on the device: loaded on demand, freed when nobody needs them.

Knows how to load only as a function it is given; which sessions there are is told to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

from mesh.shard.memory import release_memory
from mesh.shard.scheduler import Scheduler
from mesh.shard.settings import ShardSettings

T = TypeVar("T")

MakeRoom = Callable[[], AbstractAsyncContextManager[None]]
"""The block may load. Raises NotEnoughMemory."""


class ResidentWeights(Generic[T]):
    """The layers of one shard, or its ends, and the timer that frees them."""

    def __init__(
        self,
        load: Callable[[], T],
        settings: ShardSettings,
        scheduler: Scheduler,
        make_room: MakeRoom,
    ) -> None:
        self._load = load
        self._settings = settings
        self._scheduler = scheduler
        self._make_room = make_room
        self._loading: asyncio.Task[T] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._evicting: asyncio.Task[None] | None = None
        self.loaded: T | None = None
        """What computes with them, None while they are not here."""
        self.changed: Callable[[], None] = lambda: None
        self.freed: Callable[[], None] = lambda: None
        """Called once what was loaded takes no memory any more."""
        self.stays = False
        """Whether nobody's disuse frees them."""

    async def acquire(self) -> T:
        """What computes with them, loaded first when it is not here. Raises what loading raises."""
        self.keep()
        if self.loaded is not None:
            return self.loaded
        if self._loading is None:
            self._loading = asyncio.create_task(self._load_now(), name="shard-load")
            self._loading.add_done_callback(_retrieve)
        # Shielded: one opener that gives up must not stop the load for the others.
        return await asyncio.shield(self._loading)

    @property
    def is_loading(self) -> bool:
        """Whether they are on their way; whoever evicts waits for that."""
        return self._loading is not None

    def keep(self) -> None:
        """A session is here: do not free the weights."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def idle(self) -> None:
        """The last session left: free the weights after `eviction_idle_s` unless one comes, or they
        stay."""
        self.keep()
        if self.stays:
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._settings.eviction_idle_s, self._evict_idle)

    async def evict(self) -> None:
        """Free the weights now; a load under way is waited for first.

        A session that still computes keeps them alive until it ends.
        """
        self.keep()
        if self._loading is not None:
            await asyncio.wait([self._loading])
        await asyncio.shield(self._begin_to_free())

    def _evict_idle(self) -> None:
        self._timer = None
        if self._loading is not None:
            self.idle()
            return
        self._begin_to_free()

    def _begin_to_free(self) -> asyncio.Task[None]:
        if self.loaded is None and self._evicting is not None and not self._evicting.done():
            return self._evicting
        # Taken at once: a session that opens right now must not get weights on their way out.
        self._evicting = asyncio.create_task(self._free(self._take()), name="shard-evict")
        return self._evicting

    def _take(self) -> list[T | None]:
        holder = [self.loaded]
        self.loaded = None
        self.changed()
        return holder

    async def _free(self, holder: list[T | None]) -> None:
        if holder[0] is None:  # to look for what can be given back takes a tenth of a second
            return
        # Giving back gigabytes takes a while, so the last reference goes on the loading thread.
        await self._scheduler.load(lambda: _drop(holder))
        self.freed()

    async def _load_now(self) -> T:
        try:
            if self._evicting is not None:  # what it frees is counted until then
                await asyncio.wait([self._evicting])
            async with self._make_room():
                self.loaded = await self._scheduler.load(self._load)
            return self.loaded
        finally:
            self._loading = None
            self.changed()


def _drop(holder: list[T | None]) -> None:
    holder.clear()
    release_memory()


def _retrieve(loading: asyncio.Task[T]) -> None:
    # Every opener may have given up by now; the error was theirs.
    if not loading.cancelled():
        loading.exception()
