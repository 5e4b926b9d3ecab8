"""The one place that decides what a device computes next.

A session's accepted steps are computed in order. Short steps of different sessions that wait at the
same time become one batch, as far as the runtime takes their rows together, and join the next piece
of a long chunk; otherwise those take turns. Pieces are computed on the compute thread, in turns
with the work of jobs. A short step is computed right here on the event loop, because handing it to
a thread costs a quarter of a millisecond. Knows neither links nor who may have what.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Sequenced
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from mesh.errors import Busy, DeviceFailed, DeviceLost, MeshError
from mesh.processes.heap import give_back
from mesh.shard.device import is_lost
from mesh.shard.failures import lost
from mesh.shard.gathering import Gathering, enough_rows
from mesh.shard.memory import empty_caches, is_out_of_memory
from mesh.shard.runtime import StepInput, may_batch
from mesh.shard.settings import ShardSettings
from mesh.types import LayerRange, WireDtype
from mesh.wire.activations import to_torch, to_wire
from mesh.wire.messages import Blob, Failure, Result, Step, WireTensor

if TYPE_CHECKING:
    from mesh.shard.ends import SessionEnds
    from mesh.shard.hooks import Hook
    from mesh.shard.runtime import KeyValueCache, Runtime

logger = logging.getLogger(__name__)

T = TypeVar("T")

Reply = Callable[[Result | Failure | Blob], None]

SHORT_ROWS = 16
"""Steps of up to this many rows (decode, verifying drafted tokens) do not wait for long ones."""

MAX_BATCH = 64

MAX_WAITING_STEPS = 8
"""Steps a session may have under way: chunks of a prefill follow each other without waiting."""


@dataclass(slots=True, eq=False)
class Sequence:
    """What one session computes with, and its accepted steps; the first is the one under way.

    `finished` is called on the event loop with what became of that one: its result, an error, or
    None when it was withdrawn while it was computed. The next is begun by `Scheduler.advance`.
    """

    runtime: Runtime
    layers: LayerRange
    cache: KeyValueCache
    wire_dtype: WireDtype
    settings: ShardSettings
    finished: Callable[[Result | MeshError | None], None]
    hooks: tuple[Hook, ...] = ()
    ends: SessionEnds | None = None
    waiting: deque[Task] = field(default_factory=deque)

    def joins(self, other: Sequence) -> bool:
        """Whether steps of both can run as one batch, if they are short enough."""
        return self.runtime is other.runtime and self.layers == other.layers


@dataclass(slots=True, eq=False)
class Task:
    """One step of a sequence on its way through the device."""

    sequence: Sequence
    step: Step
    reply: Reply
    """Who is answered: by `Scheduler.advance`, or by whoever withdraws the step."""
    begun_at: float = 0.0
    compute_s: float = 0.0
    inputs: torch.Tensor | None = None
    outputs: list[torch.Tensor] = field(default_factory=list)
    rows_done: int = 0
    is_running: bool = False
    is_cancelled: bool = False

    @property
    def rows(self) -> int:
        """How many positions the step covers."""
        return self.step.tensor.shape[1]

    @property
    def is_short(self) -> bool:
        """Whether it goes before the pieces of long steps."""
        return self.rows <= SHORT_ROWS

    @property
    def piece_rows(self) -> int:
        """How many of them the next visit to the device computes."""
        return min(self.sequence.settings.prefill_rows, self.rows - self.rows_done)

    def next_piece(self) -> StepInput:
        """The input of the next visit. Raises BadRequest when the tensor cannot be read."""
        sequence = self.sequence
        if self.inputs is None:
            runtime = sequence.runtime
            ends = sequence.ends
            if ends is not None and ends.takes_ids:
                hidden = ends.taken(self.step)
            else:
                hidden = to_torch(self.step.tensor)
            self.inputs = hidden.to(runtime.device, runtime.dtype)
        first, rows = self.rows_done, self.piece_rows
        piece = self.inputs if rows == self.rows else self.inputs[:, first : first + rows]
        return StepInput(sequence.cache, self.step.position + first, piece, sequence.hooks)

    def joins(self, other: Task) -> bool:
        """Whether the next visits of both can be one."""
        most = self.sequence.runtime.batch_rows
        fits = max(self.piece_rows, other.piece_rows) <= most
        return fits and self.sequence.joins(other.sequence)

    def advance(self, output: torch.Tensor) -> WireTensor | None:
        """Take what a visit computed, (1, rows, hidden): all rows, or None while some are left."""
        self.rows_done += output.shape[1]
        if self.rows_done < self.rows:
            self.outputs.append(output)
            return None
        whole = torch.cat([*self.outputs, output], dim=1) if self.outputs else output
        ends = self.sequence.ends
        if ends is None:
            tensor = to_wire(whole, self.sequence.wire_dtype)
        else:
            tensor = ends.given(self.step, whole)
        if not self.is_short:
            self.inputs, self.outputs = None, []
            give_back()  # the scratch memory of a chunk is many times that of a decode step
        return tensor

    def result(self, tensor: WireTensor | None, took_s: float) -> Result | None:
        """The step's answer after a visit of `took_s`; None while rows are left."""
        self.compute_s += took_s
        if tensor is None:
            return None
        compute_us = int(self.compute_s * 1e6)
        queue_us = int((time.perf_counter() - self.begun_at) * 1e6) - compute_us
        return Result(self.step.session, self.step.step, tensor, compute_us, max(0, queue_us))

    def restart(self) -> None:
        """As before its first visit."""
        self.rows_done = 0
        self.outputs.clear()


def compute(tasks: list[Task]) -> list[Result | MeshError | None]:
    """One visit to the device: steps of one batch, or a piece of one step.

    None for a step that needs another visit. A step's error is its own; one that fails leaves its
    session as long as it was before the step.
    """
    started = time.perf_counter()
    try:
        first, rows = tasks[0].sequence, [task.piece_rows for task in tasks]
        inputs = [task.next_piece() for task in tasks]
        tensors = [*map(Task.advance, tasks, run(first.runtime, inputs, first.layers))]
        took_s = time.perf_counter() - started
        return [*map(Task.result, tasks, tensors, _times(took_s, rows))]
    except Exception as error:  # noqa: BLE001 - whatever a device raises is that session's failure
        if len(tasks) > 1 and not is_lost(error):
            # One of them may be at fault: find out which, the others go on.
            for task in tasks:
                task.restart()
            return [compute([task])[0] for task in tasks]
        for task in tasks:
            task.sequence.cache.cut(task.step.position)
        return [_as_mesh_error(error, task) for task in tasks]


def _times(took_s: float, rows: Sequenced[int]) -> list[float]:
    """What of a visit counts as computing for each step with so many rows in it: all of it, but
    for the few rows that accompanied a piece, and would have been done long before, their part."""
    if max(rows) <= SHORT_ROWS:
        return [took_s] * len(rows)
    return [took_s if each > SHORT_ROWS else took_s * each / sum(rows) for each in rows]


def run(runtime: Runtime, inputs: list[StepInput], layers: LayerRange) -> list[torch.Tensor]:
    """What `inputs` become, (1, rows, hidden) each: in one forward where that is possible."""
    if may_batch(runtime, inputs):
        return runtime.forward(inputs, layers)
    return [runtime.forward([each], layers)[0] for each in inputs]


class Scheduler:
    """The compute thread of one device and what waits for it; one per process.

    Every method is called from the event loop's thread.
    """

    def __init__(self, threads: int = 1) -> None:
        self._loop = asyncio.get_running_loop()
        self._compute_thread = _named_thread("shard-compute", threads)
        # Loading takes seconds and touches no session: others keep computing meanwhile.
        self._loading_thread = _named_thread("shard-load", threads)
        torch.set_num_threads(threads)
        self._short: deque[Task] = deque()
        self._long: deque[Task] = deque()
        self._visits: deque[tuple[Callable[[], Any], Callable[[Future[Any]], None]]] = deque()
        self._short_had_its_turn = False
        self._visitor_had_its_turn = False
        self._took_ms: WeakKeyDictionary[Runtime, dict[tuple[LayerRange, int], float]] = (
            WeakKeyDictionary()
        )
        self._gathering = Gathering()
        self._gathered: asyncio.TimerHandle | None = None
        self._busy = False
        self._busy_since = 0.0
        self._delivering = False
        self._scheduled = False
        self.streams = 0
        """How many sessions may send steps now; with one there is nothing to collect."""
        self.on_lost: Callable[[DeviceLost], None] = lambda error: None
        """Told when the device does nothing more for this process."""

    @property
    def busy_s(self) -> float:
        """For how long the compute thread has been at one piece of work; 0 when it is at none."""
        return self._loop.time() - self._busy_since if self._busy else 0.0

    def require_room(self, sequence: Sequence) -> None:
        """Raise Busy when too many steps of the session wait already."""
        if len(sequence.waiting) >= MAX_WAITING_STEPS:
            raise Busy(
                f"{len(sequence.waiting)} steps of this session are under way.",
                fix="Wait for a result before sending more.",
            )

    def submit(self, sequence: Sequence, step: Step, reply: Reply) -> None:
        """Compute `step` after the sequence's earlier ones. Raises Busy as `require_room` does.

        With a single stream, and a step short enough, it has `finished` before this returns.
        """
        self.require_room(sequence)
        task = Task(sequence, step, reply)
        sequence.waiting.append(task)
        if len(sequence.waiting) == 1:
            self._begin(task)

    def advance(self, sequence: Sequence, result: Result) -> None:
        """Answer the first step with its result, and go on with the next, if one waits."""
        sequence.waiting.popleft().reply(result)
        if sequence.waiting and not sequence.waiting[0].begun_at:
            self._begin(sequence.waiting[0])

    def withdraw(self, sequence: Sequence) -> list[Task]:
        """Take back all accepted steps. One that is being computed is `finished` afterwards."""
        dropped = [*sequence.waiting]
        sequence.waiting.clear()
        for task in dropped:
            task.is_cancelled = True
        return dropped

    def visit(self, work: Callable[[], T], done: Callable[[Future[T]], None]) -> None:
        """Run `work` on the compute thread, in turns with steps; then `done`, on the event loop.

        Work that takes longer than a step should end early and come again.
        """
        self._visits.append((work, done))
        if not self._is_under_way:
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
        if self._gathered is not None:
            self._gathered.cancel()
        self._compute_thread.shutdown(wait=False, cancel_futures=True)
        self._loading_thread.shutdown(wait=False, cancel_futures=True)

    # What is next

    @property
    def _is_under_way(self) -> bool:
        return self._busy or self._delivering or self._scheduled

    def _begin(self, task: Task) -> None:
        task.begun_at = time.perf_counter()
        (self._short if task.is_short else self._long).append(task)
        if self._is_under_way:
            return
        if self.streams <= 1:
            self._run_next()
        else:
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run_scheduled)

    def _run_scheduled(self) -> None:
        self._scheduled = False
        if self._gathered is not None:
            self._gathered.cancel()
            self._gathered = None
        if self._busy or self._delivering:
            return
        wait_s = self._gather_s()
        if wait_s > 0:
            self._gathered = self._loop.call_later(wait_s, self._schedule)
        else:
            self._run_next()

    def _gather_s(self) -> float:
        """For how long what waits should go on waiting for others to be one batch with."""
        if self._long or self._visits or not self._short:
            return 0.0
        first = self._short[0].sequence
        together = [task.rows == 1 and task.sequence.joins(first) for task in self._short]
        if not (first.runtime.batch_rows and all(together)):
            return 0.0
        known = self._took_ms.get(first.runtime, {})
        ms = known.get((first.layers, 1))
        alone_s = None if ms is None else ms / 1000
        enough = enough_rows(lambda rows: known.get((first.layers, rows.bit_length())))
        rows, now = len(together), self._loop.time()
        return self._gathering.wait_s(rows, self.streams, alone_s, now, enough)

    def _run_next(self) -> None:
        tasks: list[Task] = []
        if not self._visits or self._visitor_had_its_turn:
            self._visitor_had_its_turn = False
            tasks = self._pick()
        if not tasks:
            if self._visits:
                self._visitor_had_its_turn = True
                work, done = self._visits.popleft()
                self._run_on_thread(work, partial(self._visited, done))
            return
        for task in tasks:
            task.is_running = True
        if not self._is_quick(tasks):
            self._run_on_thread(partial(self._compute, tasks), partial(self._computed, tasks))
            return
        self._deliver(lambda: self._finish(tasks, self._compute(tasks)))

    def _pick(self) -> list[Task]:
        _drop_cancelled(self._short)
        _drop_cancelled(self._long)
        if not (self._short or self._long):
            return []
        turn = not self._short or self._short_had_its_turn
        is_long = bool(self._long) and (turn or self._long[0].joins(self._short[0]))
        self._short_had_its_turn = not is_long
        first = (self._long if is_long else self._short).popleft()
        batch, waiting = [first], deque[Task]()
        for task in self._short:
            fits = len(batch) < MAX_BATCH and not task.is_cancelled and task.joins(first)
            (batch if fits else waiting).append(task)
        self._short = waiting
        return batch

    def _is_quick(self, tasks: list[Task]) -> bool:
        """Whether the event loop can afford it: what was never run, or is long, takes a thread."""
        first = tasks[0].sequence
        if not all(task.is_short for task in tasks):
            return False
        took_ms = self._took_ms.get(first.runtime, {}).get((first.layers, _size(tasks)))
        return took_ms is not None and took_ms < first.settings.inline_ms

    # Running it

    def _compute(self, tasks: list[Task]) -> list[Result | MeshError | None]:
        first = tasks[0].sequence
        key = first.layers, _size(tasks)
        started = time.perf_counter()
        results = compute(tasks)
        ms = (time.perf_counter() - started) * 1000
        known = self._took_ms.setdefault(first.runtime, {})
        before = known.get(key, ms)
        known[key] = before + 0.2 * (ms - before)
        return results

    def _run_on_thread(
        self, work: Callable[[], Any], returned: Callable[[Future[Any]], None]
    ) -> None:
        self._busy, self._busy_since = True, self._loop.time()

        def hand_over(done: Future[Any]) -> None:
            if not done.cancelled() and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._returned, returned, done)

        self._compute_thread.submit(work).add_done_callback(hand_over)

    def _returned(self, returned: Callable[[Future[Any]], None], done: Future[Any]) -> None:
        self._busy = False
        self._deliver(lambda: returned(done))

    def _deliver(self, work: Callable[[], None]) -> None:
        # What answers set off is only queued meanwhile, so calls do not nest.
        self._delivering = True
        try:
            work()
        finally:
            self._delivering = False
            if self._short or self._long or self._visits:
                # Not at once: the loop first reads what arrived while it computed.
                self._schedule()

    def _computed(self, tasks: list[Task], done: Future[list[Result | MeshError | None]]) -> None:
        self._finish(tasks, done.result())

    def _visited(self, done: Callable[[Future[Any]], None], result: Future[Any]) -> None:
        try:
            done(result)
        finally:
            self._look_at(result.exception())

    def _finish(self, tasks: list[Task], results: list[Result | MeshError | None]) -> None:
        for task, result in zip(tasks, results, strict=True):
            task.is_running = False
            if result is None and not task.is_cancelled:
                self._long.append(task)
            else:
                task.sequence.finished(None if task.is_cancelled else result)
        for result in results:
            if isinstance(result, DeviceLost):
                self.on_lost(result)

    def _look_at(self, error: BaseException | None) -> None:
        gone = lost(error) if error is not None else None
        if gone is not None:
            self.on_lost(gone)


def _size(tasks: list[Task]) -> int:
    """Rows of a visit as an order of magnitude: what takes about as long."""
    return sum(task.piece_rows for task in tasks).bit_length()


def _drop_cancelled(tasks: deque[Task]) -> None:
    while tasks and tasks[0].is_cancelled:
        tasks.popleft()


def _named_thread(name: str, torch_threads: int) -> ThreadPoolExecutor:
    # Torch keeps the number of OpenMP threads per calling thread.
    return ThreadPoolExecutor(1, name, initializer=torch.set_num_threads, initargs=(torch_threads,))


def _as_mesh_error(error: Exception, task: Task) -> MeshError:
    if isinstance(error, MeshError):
        return error
    if (gone := lost(error)) is not None:
        return gone
    if is_out_of_memory(error):
        empty_caches()
        return DeviceFailed(
            f"The device has no memory left for {task.rows} rows at position {task.step.position}.",
            fix="Use another shard, or lower kv_tokens or max_concurrent_streams here.",
        )
    logger.error("step failed layers=%s rows=%d", task.sequence.layers, task.rows, exc_info=error)
    return DeviceFailed(
        f"The shard could not compute this step ({type(error).__name__}).",
        fix="Use another shard; the details are in this node's log.",
    )
