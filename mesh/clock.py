"""Time as the rest of hearthnet sees it: one monotonic clock, one wall clock, both replaceable."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, Protocol

AWAKE_TICK_S = 0.25
"""Where time counts only while this machine runs, it is counted in these."""


class Clock(Protocol):
    """Where time comes from. Durations use `monotonic` only; `now` is for people to read."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""

    def now(self) -> datetime:
        """The wall clock, in UTC."""


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        """Seconds since the machine started, as its kernel counts them."""
        return time.monotonic()

    def now(self) -> datetime:
        """The machine's wall clock, in UTC."""
        return datetime.now(UTC)


class SteadyClock(SystemClock):
    """Shows `start` when it is made and runs on evenly, whatever is done to the wall clock."""

    def __init__(self, start: datetime) -> None:
        self._start = start
        self._began = self.monotonic()

    def now(self) -> datetime:
        """`start` and the monotonic seconds since."""
        return self._start + timedelta(seconds=self.monotonic() - self._began)


def claimed(wall_ms: int) -> datetime:
    """The moment that somebody's clock said, in Unix milliseconds. One may claim any; no calendar
    goes beyond the year 9999."""
    return datetime.fromtimestamp(min(max(wall_ms, 0), 253_402_300_799_000) / 1e3, UTC)


def backoff_s(failures: int, first_s: float, longest_s: float) -> float:
    """For how long something is left alone that failed so often in a row, once at least: twice as
    long each time."""
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 32))


def jittered_s(seconds: float, randomness: Random) -> float:
    """Between a half and all of it, so that those who wait for one thing do not come in step."""
    return seconds * randomness.uniform(0.5, 1.0)


def loop_time() -> float:
    """The running event loop's own time, in seconds: virtual where a test has it so."""
    return asyncio.get_running_loop().time()


def next_tick(every_s: float) -> float:
    """When by the running loop's clock the next `every_s` begin. They begin at the same moment for
    all, in every process of a machine: what is done now and then wakes it once, not one by one."""
    return (loop_time() // every_s + 1) * every_s


async def tick(every_s: float) -> float:
    """Wait until the next `every_s` begin; when that was."""
    due_s = next_tick(every_s)
    await set_by(asyncio.Event(), due_s)
    return due_s


async def set_by(event: asyncio.Event, moment_s: float) -> bool:
    """Whether the event is set by that moment of the running loop's clock, waiting for either."""
    # Not `wait_for`: before Python 3.12 it loses a cancellation that comes with the event.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(moment_s):
            return await event.wait()
    return False


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event is set within so many seconds, waiting for either."""
    return await set_by(event, loop_time() + seconds)


def unless_done(future: asyncio.Future[Any], awake_s: float, act: Callable[[], None]) -> None:
    """Call `act` once, where the future is not done by so many seconds in which this machine ran.

    While it stands still nobody does anything: a tick then is one tick.
    """
    if future.done():
        return
    if awake_s <= 0:
        act()
        return
    left_s = awake_s - AWAKE_TICK_S
    asyncio.get_running_loop().call_later(AWAKE_TICK_S, unless_done, future, left_s, act)


class LoopClock(SystemClock):
    """The running event loop's clock: what a simulation's loop says the time is, is the time."""

    def monotonic(self) -> float:
        """Seconds by the running loop's own clock."""
        return asyncio.get_running_loop().time()
