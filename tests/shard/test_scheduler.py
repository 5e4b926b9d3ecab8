"""What the device computes next, with layers that only add one: no device, no links, no budgets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from collections.abc import Sequence as Sequenced
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import torch

from mesh.errors import BadRequest, Busy, DeviceFailed, DeviceLost, MeshError
from mesh.shard.kv import SessionCache
from mesh.shard.runtime import StepInput
from mesh.shard.scheduler import (
    MAX_BATCH,
    MAX_WAITING_STEPS,
    SHORT_ROWS,
    Scheduler,
    Sequence,
    Task,
    compute,
    run,
)
from mesh.shard.settings import ShardSettings
from mesh.types import LayerRange, WireDtype
from mesh.wire.activations import to_torch, to_wire
from mesh.wire.messages import Blob, Failure, Result, Step
from tests.shard.asker import settled

WHOLE = LayerRange(0, 4)
POISON = 7.0


class Adds:
    """Layers that add one to everything, and keep what was computed together."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, *, batch_rows: int = 1, error: Exception | None = None) -> None:
        self.batch_rows = batch_rows
        self.error = error or RuntimeError("broken")
        self.visits: list[list[tuple[int, int]]] = []
        self.gate = threading.Event()
        self.gate.set()

    def forward(self, steps: Sequenced[StepInput], layers: LayerRange) -> list[torch.Tensor]:
        assert len(steps) == 1 or all(s.hidden.shape[1] <= self.batch_rows for s in steps)
        assert self.gate.wait(10)
        self.visits.append([(s.position, s.hidden.shape[1]) for s in steps])
        if any(bool((step.hidden == POISON).any()) for step in steps):
            raise self.error
        for step in steps:
            if step.position > step.cache.length:
                raise BadRequest("a hole", fix="Replay.")
            step.cache.cut(step.position)
            step.cache.commit(step.hidden.shape[1])
        return [step.hidden + 1 for step in steps]


class Stream:
    """A session as the scheduler sees it."""

    def __init__(
        self, scheduler: Scheduler, runtime: Adds, layers: LayerRange = WHOLE, **settings: Any
    ) -> None:
        self.scheduler = scheduler
        self.results: list[Result | MeshError | None] = []
        self.replies: list[Result | Failure | Blob] = []
        self.sequence = Sequence(
            cast("Any", runtime), layers, SessionCache(0, 1 << 20), WireDtype.FP32,
            ShardSettings(**settings), self.finished,
        )  # fmt: skip

    def finished(self, result: Result | MeshError | None) -> None:
        self.results.append(result)
        if isinstance(result, Result):
            self.scheduler.advance(self.sequence, result)
        else:
            self.scheduler.withdraw(self.sequence)

    def send(self, number: int, position: int, count: int, fill: float = 0.0) -> None:
        hidden = torch.full((1, count, 2), fill)
        step = Step(1, number, position, to_wire(hidden, WireDtype.FP32))
        self.scheduler.submit(self.sequence, step, self.replies.append)

    @property
    def answered(self) -> list[int]:
        return [each.step for each in self.replies if isinstance(each, Result)]


@asynccontextmanager
async def scheduling(streams: int = 2) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler()
    scheduler.streams = streams
    yield scheduler
    scheduler.close()


async def learnt(scheduler: Scheduler, runtime: Adds, *layers: LayerRange) -> None:
    """Let it see that single rows, alone and in company, are quick."""
    for each in layers or (WHOLE,):
        for count in (1, 2, 4, 8):
            company = [Stream(scheduler, runtime, each) for _ in range(count)]
            for stream in company:
                stream.send(0, 0, 1)
            await settled(lambda company=company: all(s.results for s in company))  # type: ignore[misc]
    runtime.visits.clear()


async def test_a_quick_step_of_a_single_stream_is_answered_before_submit_returns() -> None:
    async with scheduling(1) as scheduler:
        runtime = Adds()
        stream = Stream(scheduler, runtime)
        stream.send(0, 0, 1)
        assert not stream.results, "what was never run takes a thread"
        await settled(lambda: bool(stream.results))
        stream.send(1, 1, 1, fill=3.0)
        result = stream.replies[1]
        assert isinstance(result, Result)
        assert torch.equal(to_torch(result.tensor), torch.full((1, 1, 2), 4.0))
        assert result.compute_us >= 0
        assert result.queue_us >= 0
        for position in (2, 2 + 2 * SHORT_ROWS):
            stream.send(position, position, 2 * SHORT_ROWS)
            assert position not in stream.answered, "a long one takes a thread, however quick"
            await settled(lambda at=position: at in stream.answered)  # type: ignore[misc]


async def test_a_slow_step_takes_the_thread() -> None:
    async with scheduling(1) as scheduler:
        stream = Stream(scheduler, Adds(), inline_ms=0.0)
        for number in range(2):
            stream.send(number, number, 1)
            assert len(stream.results) == number
            await settled(lambda count=number: len(stream.results) == count + 1)  # type: ignore[misc]


async def test_rows_that_wait_together_are_one_batch_of_their_layers_and_weights() -> None:
    async with scheduling(6) as scheduler:
        runtime, other = Adds(), Adds()
        company = [Stream(scheduler, runtime) for _ in range(4)]
        apart = [Stream(scheduler, runtime, LayerRange(0, 2)), Stream(scheduler, other)]
        for stream in (*company[:2], *apart, *company[2:]):
            stream.send(0, 0, 1)
        await settled(lambda: all(s.results for s in (*company, *apart)))
        assert sorted(map(len, runtime.visits)) == [1, 4]
        assert list(map(len, other.visits)) == [1]
        assert company[0].sequence.joins(company[1].sequence)
        assert not company[0].sequence.joins(apart[0].sequence)
        assert not company[0].sequence.joins(apart[1].sequence)


async def test_a_batch_is_bounded() -> None:
    async with scheduling(MAX_BATCH + 3) as scheduler:
        runtime = Adds()
        streams = [Stream(scheduler, runtime) for _ in range(MAX_BATCH + 3)]
        for stream in streams:
            stream.send(0, 0, 1)
        await settled(lambda: all(s.results for s in streams))
        assert list(map(len, runtime.visits)) == [MAX_BATCH, 3]


async def test_rows_are_computed_alone_where_batches_would_change_them() -> None:
    async with scheduling() as scheduler:
        runtime = Adds(batch_rows=0)
        streams = [Stream(scheduler, runtime) for _ in range(3)]
        for stream in streams:
            stream.send(0, 0, 1)
        await settled(lambda: all(s.results for s in streams))
        assert runtime.visits == [[(0, 1)]] * 3
    inputs = [StepInput(SessionCache(0, 9), 0, torch.zeros(1, n, 2)) for n in (1, 2)]
    mixed = run(cast("Any", Adds()), inputs, WHOLE)
    assert [out.shape[1] for out in mixed] == [1, 2]


async def test_long_steps_go_in_pieces_and_take_turns_with_each_other_and_with_short_ones() -> None:
    async with scheduling() as scheduler:
        runtime = Adds()
        first, second = (Stream(scheduler, runtime, prefill_rows=100) for _ in range(2))
        short = Stream(scheduler, runtime)
        runtime.gate.clear()
        first.send(0, 0, 250)
        second.send(0, 0, 150)
        for number in range(3):
            short.send(number, number, 1)
        runtime.gate.set()
        await settled(lambda: bool(first.results and second.results) and len(short.results) == 3)
        pieces = [visit[0] for visit in runtime.visits if visit[0][1] > 1]
        assert pieces == [(0, 100), (0, 100), (100, 100), (100, 50), (200, 50)]
        kinds = [visit[0][1] > 1 for visit in runtime.visits]
        assert kinds[:6] == [False, True] * 3, "one of each by turns"
        result = first.replies[0]
        assert isinstance(result, Result)
        assert result.tensor.shape == (1, 250, 2)


async def test_whatever_waits_shares_a_visit_where_the_runtime_takes_it_together() -> None:
    async with scheduling() as scheduler:
        runtime = Adds(batch_rows=100)
        prompt = Stream(scheduler, runtime, prefill_rows=100)
        large = Stream(scheduler, runtime, prefill_rows=101)
        draft, row = (Stream(scheduler, runtime) for _ in range(2))
        runtime.gate.clear()
        large.send(0, 0, 120)
        prompt.send(0, 0, 250)
        for number in range(2):
            draft.send(number, 9 * number, 9)
            row.send(number, number, 1, fill=3.0)
        runtime.gate.set()
        streams = (large, prompt, draft, row)
        await settled(lambda: sum(len(each.results) for each in streams) == 6)
        together = [sorted(rows for _, rows in visit) for visit in runtime.visits]
        assert [1, 9, 100] in together, "rows, a verified draft and a piece of a prompt"
        assert [101] in together, "too long a piece goes alone"
        result, whole = row.replies[1], prompt.replies[0]
        assert isinstance(result, Result)
        assert isinstance(whole, Result)
        assert torch.equal(to_torch(result.tensor), torch.full((1, 1, 2), 4.0))
        assert whole.tensor.shape == (1, 250, 2)
        assert result.compute_us <= whole.compute_us // 10, "it is not blamed for the piece"


async def test_verified_drafts_are_short_and_not_batched_with_rows_that_they_would_change() -> None:
    async with scheduling() as scheduler:
        runtime = Adds()
        draft, row = Stream(scheduler, runtime), Stream(scheduler, runtime)
        draft.send(0, 0, SHORT_ROWS)
        row.send(0, 0, 1)
        await settled(lambda: bool(draft.results and row.results))
        assert runtime.visits == [[(0, SHORT_ROWS)], [(0, 1)]]
        assert Task(draft.sequence, Step(1, 0, 0, to_wire(torch.zeros(1, 17, 2), WireDtype.FP32)),
                    draft.replies.append).is_short is False  # fmt: skip


async def test_steps_of_a_session_are_answered_in_order_and_bounded() -> None:
    async with scheduling() as scheduler:
        stream = Stream(scheduler, Adds())
        for number in range(MAX_WAITING_STEPS):
            stream.send(number, 20 * number, 20 if number % 2 else 1 if number > 2 else 20)
        with pytest.raises(Busy):
            scheduler.require_room(stream.sequence)
        with pytest.raises(Busy):
            stream.send(99, 0, 1)
        await settled(lambda: not stream.sequence.waiting)
        computed = [each.step for each in stream.results if isinstance(each, Result)]
        assert stream.answered == computed == sorted(computed)
        scheduler.require_room(stream.sequence)


async def test_what_is_withdrawn_is_not_computed_and_what_is_computed_ends_afterwards() -> None:
    async with scheduling() as scheduler:
        runtime = Adds()
        runtime.gate.clear()
        running, waiting, stays, behind = (Stream(scheduler, runtime) for _ in range(4))
        running.send(0, 0, 100)
        running.send(1, 100, 1)
        await asyncio.sleep(0)  # it is on the thread
        waiting.send(0, 0, 1)
        stays.send(0, 0, 1)
        behind.send(0, 0, 1)
        first, second = scheduler.withdraw(running.sequence)
        assert (first.is_running, second.is_running) == (True, False)
        assert not running.results
        for stream in (waiting, behind):
            (dropped,) = scheduler.withdraw(stream.sequence)
            assert not dropped.is_running
        runtime.gate.set()
        await settled(lambda: bool(stays.results))
        assert running.results == [None]
        assert (running.replies, waiting.results, behind.results) == ([], [], [])
        assert runtime.visits == [[(0, 100)], [(0, 1)]]
        stays.send(1, 1, 1)  # and the sequences are as before
        waiting.send(1, 0, 1)
        await settled(lambda: stays.answered == [0, 1] and waiting.answered == [1])


async def test_one_step_s_error_is_its_own_and_leaves_its_cache_as_it_was() -> None:
    lost: list[DeviceLost] = []
    async with scheduling() as scheduler:
        scheduler.on_lost = lost.append
        runtime = Adds()
        good, bad = Stream(scheduler, runtime), Stream(scheduler, runtime)
        for stream in (good, bad):
            stream.send(0, 0, 4)
        await settled(lambda: bool(good.results and bad.results))
        good.send(1, 4, 1)
        bad.send(1, 4, 1, fill=POISON)
        await settled(lambda: len(good.results) == len(bad.results) == 2)
        assert good.answered == [0, 1]
        assert isinstance(bad.results[1], DeviceFailed)
        assert "could not compute this step (RuntimeError)" in bad.results[1].message
        assert not lost, "the device itself is well"
        assert bad.sequence.cache.length == 4
        # Also where rows of it were computed already.
        bad.sequence.settings = ShardSettings(prefill_rows=64)
        rows = torch.zeros(1, 100, 2)
        rows[:, -1] = POISON
        step = Step(1, 2, 4, to_wire(rows, WireDtype.FP32))
        scheduler.submit(bad.sequence, step, bad.replies.append)
        await settled(lambda: len(bad.results) == 3)
        assert isinstance(bad.results[2], DeviceFailed)
        assert runtime.visits[-2:] == [[(4, 64)], [(68, 36)]]
        assert bad.sequence.cache.length == 4


class CannotSay:
    """Ends that have nothing to say of what was computed."""

    takes_ids = False

    def given(self, step: Step, hidden: torch.Tensor) -> None:
        raise BadRequest("no row is due", fix="Ask for one.")


async def test_ends_that_cannot_say_a_step_s_rows_leave_others_of_its_batch_theirs() -> None:
    async with scheduling() as scheduler:
        runtime = Adds(batch_rows=100)
        good, bad = Stream(scheduler, runtime), Stream(scheduler, runtime)
        bad.sequence.ends = cast("Any", CannotSay())
        good.send(0, 0, 2, fill=3.0)
        bad.send(0, 0, 2)
        await settled(lambda: bool(good.results and bad.results))
        assert runtime.visits[0] == [(0, 2), (0, 2)]
        assert isinstance(bad.results[0], BadRequest)
        assert bad.sequence.cache.length == 0
        (result,) = good.replies
        assert isinstance(result, Result)
        assert torch.equal(to_torch(result.tensor), torch.full((1, 2, 2), 4.0))


async def test_a_long_step_that_is_begun_again_for_another_s_error_has_its_rows_once() -> None:
    async with scheduling() as scheduler:
        runtime = Adds(batch_rows=100)
        good, bad = Stream(scheduler, runtime, prefill_rows=64), Stream(scheduler, runtime)
        runtime.gate.clear()
        good.send(0, 0, 100)
        await asyncio.sleep(0)  # its first piece is on the thread
        bad.send(0, 0, 1, fill=POISON)
        runtime.gate.set()
        await settled(lambda: bool(good.results and bad.results))
        assert runtime.visits[:2] == [[(0, 64)], [(64, 36), (0, 1)]]
        assert isinstance(bad.results[0], DeviceFailed)
        (whole,) = good.replies
        assert isinstance(whole, Result)
        assert whole.tensor.shape == (1, 100, 2)


async def test_a_device_that_is_gone_is_told_of_once_and_batches_are_not_tried_again() -> None:
    lost: list[DeviceLost] = []
    async with scheduling() as scheduler:
        scheduler.on_lost = lost.append
        runtime = Adds(error=torch.AcceleratorError("CUDA error: misaligned address"))
        streams = [Stream(scheduler, runtime) for _ in range(2)]
        for stream in streams:
            stream.send(0, 0, 1, fill=POISON)
        await settled(lambda: all(s.results for s in streams))
        assert len(runtime.visits) == 1
        assert all(isinstance(s.results[0], DeviceLost) for s in streams)
        assert lost

        def dies() -> None:
            raise runtime.error

        lost.clear()
        with pytest.raises(torch.AcceleratorError):
            await scheduler.load(dies)
        scheduler.visit(dies, lambda done: None)
        await settled(lambda: len(lost) == 2)


async def test_jobs_take_turns_with_steps() -> None:
    async with scheduling() as scheduler:
        runtime = Adds()
        stream = Stream(scheduler, runtime, prefill_rows=10)
        order: list[str] = []
        lost: list[DeviceLost] = []
        scheduler.on_lost = lost.append
        runtime.gate.clear()
        stream.send(0, 0, 30)
        await asyncio.sleep(0)
        for name in "ab":
            scheduler.visit(lambda name=name: order.append(f"{name}{len(runtime.visits)}"),  # type: ignore[misc]
                            lambda done: None)  # fmt: skip
        runtime.gate.set()
        await settled(lambda: bool(stream.results) and len(order) == 2)
        assert order == ["a1", "b2"], "one piece of the prefill between them"
        assert not lost


async def test_a_long_step_is_at_rest_between_its_pieces_and_can_be_withdrawn_there() -> None:
    async with scheduling() as scheduler:
        runtime = Adds()
        stream, rest = Stream(scheduler, runtime, prefill_rows=10), threading.Event()
        runtime.gate.clear()
        stream.send(0, 0, 30)
        await asyncio.sleep(0)  # its first piece is on the thread
        (task,) = stream.sequence.waiting
        assert task.is_running
        scheduler.visit(lambda: rest.wait(10), lambda done: None)
        runtime.gate.set()
        await settled(lambda: not task.is_running)
        assert scheduler.withdraw(stream.sequence) == [task]
        other = Stream(scheduler, runtime)
        other.send(0, 0, 20)
        rest.set()
        await settled(lambda: bool(other.results))
        assert runtime.visits == [[(0, 10)], [(0, 20)]]
        assert not stream.results


async def test_busy_says_for_how_long_the_thread_has_been_at_one_thing() -> None:
    async with scheduling() as scheduler:
        assert scheduler.busy_s == 0
        gate, done = threading.Event(), asyncio.Event()
        scheduler.visit(lambda: gate.wait(10), lambda _: done.set())
        await settled(lambda: scheduler.busy_s > 0)
        gate.set()
        await done.wait()
        assert scheduler.busy_s == 0
        assert await scheduler.load(lambda: 5) == 5


def test_a_step_without_enough_past_is_refused_in_its_visit() -> None:
    runtime = Adds()
    sequence = Sequence(
        cast("Any", runtime), WHOLE, SessionCache(0, 9), WireDtype.FP32, ShardSettings(),
        lambda _: None,
    )  # fmt: skip
    step = Step(1, 0, 5, to_wire(torch.zeros(1, 1, 2), WireDtype.FP32))
    (result,) = compute([Task(sequence, step, lambda _: None)])
    assert isinstance(result, BadRequest)


class Slow(Adds):
    """Layers that take their time."""

    def forward(self, steps: Sequenced[StepInput], layers: LayerRange) -> list[torch.Tensor]:
        time.sleep(0.02)
        return super().forward(steps, layers)


async def slow_streams(scheduler: Scheduler, count: int) -> tuple[Slow, list[Stream]]:
    """Layers that are known to take long, and streams that wait while a thread computes."""
    runtime = Slow()
    streams = [Stream(scheduler, runtime, inline_ms=0.0) for _ in range(count + 1)]
    streams[0].send(0, 0, 1)
    await settled(lambda: bool(streams[0].results))
    runtime.visits.clear()
    scheduler.streams = 4
    return runtime, streams[1:]


async def test_a_row_waits_a_little_for_others_to_share_a_pass_with() -> None:
    async with scheduling(1) as scheduler:
        runtime, (first, second, alone) = await slow_streams(scheduler, 3)
        first.send(0, 0, 1)
        await asyncio.sleep(0.005)
        second.send(0, 0, 1)
        await settled(lambda: bool(first.results and second.results))
        assert runtime.visits == [[(0, 1), (0, 1)]]
        alone.send(0, 0, 1)
        await settled(lambda: bool(alone.results))
        assert len(runtime.visits) == 2, "not for ever"


async def test_several_rows_of_a_step_wait_for_no_others() -> None:
    async with scheduling(1) as scheduler:
        _, (drafts,) = await slow_streams(scheduler, 1)
        drafts.send(0, 0, 2)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert scheduler.busy_s > 0.0, "it is being computed"
        await settled(lambda: bool(drafts.results))
