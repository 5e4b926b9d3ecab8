"""Readers of the event stream that come late or come back, also to a daemon that began anew."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from datetime import UTC, datetime, timedelta

import pytest

from mesh.clock import SteadyClock, SystemClock
from mesh.health.eventstream import HISTORY, EventFeed


async def _read(stream: EventFeed, after: int | None, count: int) -> list[int]:
    ids: list[int] = []
    batches = stream.batches(after, pace_s=0.0, idle_s=5.0)
    async with aclosing(batches), asyncio.timeout(5):
        while len(ids) < count:
            ids += [event["id"] for event in await anext(batches)]
    return ids


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


async def test_batches_are_apart_whole_and_stirred() -> None:
    stream = EventFeed(SystemClock())
    loop = asyncio.get_running_loop()
    for _ in range(3):
        stream.emit("peer_up")
    async with aclosing(stream.batches(1, pace_s=0.05, idle_s=60)) as batches, asyncio.timeout(5):
        begun = loop.time()
        assert [event["id"] for event in await anext(batches)] == [2, 3]
        stream.emit("peer_up")
        stream.emit("peer_up")
        assert [event["id"] for event in await anext(batches)] == [4, 5]
        assert loop.time() - begun >= 0.05
        stream.stir()
        assert await anext(batches) == []


async def test_an_empty_batch_comes_when_all_is_quiet() -> None:
    stream = EventFeed(SystemClock())
    async with aclosing(stream.batches(None, pace_s=0.0, idle_s=0.01)) as batches:
        async with asyncio.timeout(5):
            assert [await anext(batches) for _ in range(3)] == [[], [], []]


async def test_what_is_over_by_itself_is_not_among_the_warnings() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    stream = EventFeed(SteadyClock(now))
    stream.emit("warning", code="clock_skew", until=(now - timedelta(hours=1)).isoformat())
    stream.emit("warning", code="clock_skew", until=(now + timedelta(hours=1)).isoformat())
    stream.emit("warning", code="revoked", until=None)
    stream.emit("warning", code="coordination")
    assert [event["id"] for event in stream.warnings(9)] == [2, 3, 4]


async def test_no_other_events_push_a_warning_out() -> None:
    stream = EventFeed(SystemClock())
    stream.emit("warning", code="weights_damaged")
    for _ in range(HISTORY):
        stream.emit("job_ended")
    assert [event["code"] for event in stream.warnings(9)] == ["weights_damaged"]
    stream.over("weights_damaged")
    assert stream.warnings(9) == []
