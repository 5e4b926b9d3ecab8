"""The one place that decides what a device computes next.

Decode steps that wait at the same time become one batch; long chunks are computed in pieces on the
compute thread, taking turns with each other and with decode. A short decode step is computed right
here on the event loop, because handing it to a thread costs a quarter of a millisecond. Knows
sessions only as caches, and links not at all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from mesh.errors import DeviceLost
from mesh.shard.compute import Outcome, PendingStep, Turn, compute
from mesh.shard.failures import lost

T = TypeVar("T")

MAX_BATCH = 64


class DeviceQueue:
    """The compute thread of one device and the steps waiting for it; one per process.

    Every method is called from the event loop's thread.
    """

    def __init__(self, threads: int = 1) -> None:
        self._loop = asyncio.get_running_loop()
        self._compute_thread = _named_thread("shard-compute", threads)
        # Loading takes seconds and touches no session: others keep computing meanwhile.
        self._loading_thread = _named_thread("shard-load", threads)
        torch.set_num_threads(threads)
        self._short: deque[PendingStep] = deque()
        self._long: deque[PendingStep] = deque()
        self._busy = False
        self._pumping = False
        self._scheduled = False
        self._short_had_its_turn = False
        self._visits: deque[tuple[Callable[[], Any], Callable[[Future[Any]], None]]] = deque()
        self._visitor_had_its_turn = False
        self.sessions = 0
        """How many sessions may send steps now; with one there is nothing to collect."""
        self.on_lost: Callable[[DeviceLost], None] = lambda error: None
        """Told when the device does nothing more for this process."""
        self._busy_since = 0.0

    @property
    def busy_s(self) -> float:
        """For how long the compute thread has been at one piece of work; 0 when it is at none."""
        return self._loop.time() - self._busy_since if self._busy else 0.0

    def submit(self, step: PendingStep) -> None:
        """Queue one step; its `done` is called once, unless it is `cancelled` while not `running`.

        With a single session, and a step short enough, that happens before this returns.
        """
        (self._short if step.is_short else self._long).append(step)
        if self._busy or self._pumping or self._scheduled:
            return
        if self.sessions <= 1:
            self._pump()
        else:
            self._schedule()

    def visit(self, work: Callable[[], T], done: Callable[[Future[T]], None]) -> None:
        """Run `work` on the compute thread, in turns with steps; then `done`, on the event loop.

        Work that takes longer than a step should end early and come again.
        """
        self._visits.append((work, done))
        if not (self._busy or self._pumping or self._scheduled):
            self._schedule()

    async def load(self, work: Callable[[], T]) -> T:
        """Run blocking `work` (loading, freeing weights) outside the event loop, in order."""
        try:
            return await self._loop.run_in_executor(self._loading_thread, work)
        except Exception as error:
            self._look_at(error)
            raise

    def close(self) -> None:
        """Drop what waits and let the threads end after what they are doing."""
        self._short.clear()
        self._long.clear()
        self._visits.clear()
        self._compute_thread.shutdown(wait=False, cancel_futures=True)
        self._loading_thread.shutdown(wait=False, cancel_futures=True)

    def _schedule(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._scheduled = False
        if self._busy or self._pumping:
            return
        if self._visits and not self._visitor_had_its_turn:
            self._admit_visitor()
            return
        self._visitor_had_its_turn = False
        turn = self._next_turn()
        if turn is None:
            if self._visits:
                self._admit_visitor()
            return
        if not turn.is_quick:
            self._occupy()
            future = self._compute_thread.submit(compute, turn)
            future.add_done_callback(lambda done: self._hand_over(turn, done))
            return
        # What the answers set off is only queued meanwhile, so calls do not nest.
        self._pumping = True
        try:
            self._deliver(turn, compute(turn))
        finally:
            self._pumping = False
            if self._short or self._long or self._visits:
                # Not at once: the loop first reads what arrived while it computed.
                self._schedule()

    def _hand_over(self, turn: Turn, done: Future[list[Outcome | None]]) -> None:
        if not done.cancelled() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._returned, turn, done)

    def _returned(self, turn: Turn, done: Future[list[Outcome | None]]) -> None:
        self._busy = False
        self._pumping = True
        try:
            self._deliver(turn, done.result())
        finally:
            self._pumping = False
            if not self._scheduled:
                self._schedule()

    def _admit_visitor(self) -> None:
        self._visitor_had_its_turn = True
        self._occupy()
        work, done = self._visits.popleft()
        future = self._compute_thread.submit(work)
        future.add_done_callback(lambda result: self._say_goodbye(result, done))

    def _say_goodbye(self, result: Future[Any], done: Callable[[Future[Any]], None]) -> None:
        if not result.cancelled() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._visited, result, done)

    def _visited(self, result: Future[Any], done: Callable[[Future[Any]], None]) -> None:
        self._busy = False
        self._pumping = True
        try:
            done(result)
        finally:
            self._pumping = False
            if not self._scheduled:
                self._schedule()
            self._look_at(result.exception())

    def _deliver(self, turn: Turn, outcomes: list[Outcome | None]) -> None:
        for step, outcome in zip(turn.steps, outcomes, strict=True):
            step.running = False
            if outcome is None and not step.cancelled:
                self._long.append(step)
            else:
                step.done(outcome or Outcome(None, None, 0, 0))
        for outcome in outcomes:
            if outcome is not None and isinstance(outcome.error, DeviceLost):
                self.on_lost(outcome.error)

    def _occupy(self) -> None:
        self._busy = True
        self._busy_since = self._loop.time()

    def _look_at(self, error: BaseException | None) -> None:
        gone = lost(error) if error is not None else None
        if gone is not None:
            self.on_lost(gone)

    def _next_turn(self) -> Turn | None:
        turn = self._pick()
        for step in turn.steps if turn is not None else ():
            step.running = True
        return turn

    def _pick(self) -> Turn | None:
        _drop_cancelled(self._short)
        _drop_cancelled(self._long)
        if self._long and (not self._short or self._short_had_its_turn):
            self._short_had_its_turn = False
            return Turn([self._long.popleft()])
        if not self._short:
            return None
        self._short_had_its_turn = True
        first = self._short.popleft()
        batch = [first]
        if first.rows == 1 and self._short:
            waiting = deque[PendingStep]()
            for step in self._short:
                fits = step.joins(first) and len(batch) < MAX_BATCH and not step.cancelled
                (batch if fits else waiting).append(step)
            self._short = waiting
        return Turn(batch)


def _drop_cancelled(steps: deque[PendingStep]) -> None:
    while steps and steps[0].cancelled:
        steps.popleft()


def _named_thread(name: str, torch_threads: int) -> ThreadPoolExecutor:
    # Torch keeps the number of OpenMP threads per calling thread.
    return ThreadPoolExecutor(1, name, initializer=torch.set_num_threads, initargs=(torch_threads,))
