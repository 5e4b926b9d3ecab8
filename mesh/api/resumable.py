"""Streams that outlive their reader's connection, for a while.

A stream that was asked for with ``resumable`` is produced by a task of its own, whoever reads. Its
events are numbered; a reader that lost its connection comes back with the last number it saw
(``Last-Event-ID``) and gets the rest. Bounded: in number, in age, and by what a model's context
holds. A stream belongs to the account that asked for it; for others there is none of that name,
and they cannot have it forgotten either while they keep as many themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

from mesh.api.sse import FailureEvents, plain_failure
from mesh.errors import Busy, InternalError, MeshError, NotFound
from mesh.processes.tasks import end
from mesh.types import Principal

logger = logging.getLogger(__name__)

KEEP_S = 120.0


@dataclass(slots=True)
class _Kept:
    events: list[bytes] = field(default_factory=list)
    ended: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class KeptEvents(AsyncIterator[bytes]):
    """What one reader is still to get of a stream, each event as soon as it is there."""

    def __init__(self, kept: _Kept, position: int) -> None:
        self._kept = kept
        self._position = position

    async def __anext__(self) -> bytes:
        """The next event; waits for it while the stream goes on."""
        kept = self._kept
        while self._position >= len(kept.events):
            if kept.ended:
                raise StopAsyncIteration
            kept.news.clear()
            await kept.news.wait()
        self._position += 1
        return kept.events[self._position - 1]

    async def aclose(self) -> None:
        """The reader has left; the stream goes on for whoever comes back."""


class KeptStreams:
    """Owns the tasks that produce resumable streams. `close` ends them.

    An owner is a principal's account. Where callers are unknown, what keeps them apart is that a
    stream's id is random and shown to nobody else.
    """

    def __init__(self, *, keep_s: float = KEEP_S, most: int = 32) -> None:
        """`most` streams are kept at the same time, half of them for one owner."""
        self._most = most
        self._each = max(1, most // 2)
        self._keep_s = keep_s
        self._kept: dict[tuple[Principal, str], _Kept] = {}

    def keep(
        self,
        owner: Principal,
        stream_id: str,
        chunks: AsyncGenerator[bytes, None],
        *,
        failure: FailureEvents = plain_failure,
    ) -> None:
        """Produce `chunks` to their end, read or not; what they raise ends them with the events
        that `failure` makes of it. Raises Busy when too many are under way."""
        self._make_room(owner)
        key = (owner, stream_id)
        kept = self._kept[key] = _Kept()
        kept.task = asyncio.create_task(
            self._produce(key, kept, chunks, failure), name=f"stream {stream_id}"
        )

    def follow(self, owner: Principal, stream_id: str, after: int) -> KeptEvents:
        """The events after number `after` (-1: all), to the end. Raises NotFound."""
        kept = self._kept.get((owner, stream_id))
        if kept is None:
            raise NotFound(
                f"There is no stream {stream_id!r}, or its {self._keep_s:g} s are over.",
                fix="Ask again; only streams asked for with `resumable` are kept.",
            )
        return KeptEvents(kept, after + 1)

    async def close(self) -> None:
        """End every stream."""
        await end(kept.task for kept in self._kept.values())
        self._kept.clear()

    def _make_room(self, owner: Principal) -> None:
        """Forget what ended first, the owner's own before that of whoever keeps more. Raises
        Busy."""
        held = Counter(whose for whose, _ in self._kept)
        mine = held[owner]
        if mine < self._each and len(self._kept) < self._most:
            return
        ended = [key for key, kept in self._kept.items() if kept.ended]
        own = [key for key in ended if key[0] == owner]
        others = [key for key in ended if held[key[0]] > mine] if mine < self._each else []
        gone = own[0] if own else max(others, key=lambda key: held[key[0]], default=None)
        if gone is None:
            raise Busy(
                f"{mine} resumable streams of yours and {len(self._kept) - mine} of others are"
                f" kept; there is room for {self._most}, half of it for one.",
                fix="Wait for one to end, or ask without `resumable`.",
            )
        del self._kept[gone]

    async def _produce(
        self,
        key: tuple[Principal, str],
        kept: _Kept,
        chunks: AsyncGenerator[bytes, None],
        failure: FailureEvents,
    ) -> None:
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    self._add(kept, chunk)
        except MeshError as error:
            self._add(kept, *failure(error))
        except Exception:
            logger.exception("stream=%s failed", key[1])
            self._add(kept, *failure(InternalError("The stream failed.", fix="See the log.")))
            raise
        finally:
            kept.ended = True
            kept.news.set()
            loop = asyncio.get_running_loop()
            loop.call_later(self._keep_s, self._forget, key, kept)

    def _forget(self, key: tuple[Principal, str], kept: _Kept) -> None:
        if self._kept.get(key) is kept:
            del self._kept[key]

    @staticmethod
    def _add(kept: _Kept, *chunks: bytes) -> None:
        for chunk in chunks:
            kept.events.append(b"id: %d\n" % len(kept.events) + chunk)
        kept.news.set()
