"""Readers of the event stream that come late or come back, also to a daemon that began anew."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from mesh.clock import SystemClock
from mesh.health.eventstream import EventFeed


async def _read(stream: EventFeed, after: int | None, count: int) -> list[int]:
    async with aclosing(stream.follow(after)) as events, asyncio.timeout(5):
        return [(await anext(events))["id"] for _ in range(count)]


@pytest.mark.parametrize(
    ("after", "ids"),
    [(0, [1, 2, 3, 4]), (2, [3, 4]), (3, [4]), (None, [4]), (4, [1, 2, 3, 4]), (500, [1, 2, 3, 4])],
)
async def test_reader_gets_what_it_has_not(after: int | None, ids: list[int]) -> None:
    stream = EventFeed(SystemClock())
    for _ in range(3):
        stream.emit("peer_up")
    reader = asyncio.create_task(_read(stream, after, len(ids)), name="reader")
    await asyncio.sleep(0)
    stream.emit("peer_down")
    assert await reader == ids


async def test_reader_from_before_a_restart_gets_what_happens_after_it() -> None:
    stream = EventFeed(SystemClock())
    reader = asyncio.create_task(_read(stream, 500, 20), name="reader")
    await asyncio.sleep(0)
    for _ in range(20):
        stream.emit("peer_up")
    assert await reader == list(range(1, 21))
