from __future__ import annotations

import pytest
import torch

from mesh.errors import (
    BadRequest,
    Busy,
    ContextTooLong,
    DeviceFailed,
    MeshError,
    SessionGone,
)
from mesh.shard.runtime import StepInput
from mesh.shard.scheduler import MAX_WAITING_STEPS
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange, WireDtype
from mesh.wire.activations import to_wire
from mesh.wire.messages import Blob, Failure, Open, Result, Step, WireTensor
from tests.shard.asker import Attic, close_to, settled
from tests.shard.spans import HIDDEN, rows, step

REQUEST = Open(1, "toy", "5" * 64, 0, 4, 2048, WireDtype.FP32)


async def test_a_session_computes_what_the_span_computes(
    span: TorchRuntime,
) -> None:
    cache = span.new_cache(128)
    async with Attic() as attic:
        asker = attic.asker()
        await asker.open()
        assert close_to(await asker.step(0, 0, rows(40)), step(span, cache, 0, rows(40)))
        for i in range(5):
            row = rows(1, seed=i)
            assert close_to(await asker.step(i + 1, 40 + i, row), step(span, cache, 40 + i, row))


async def test_sessions_that_wait_together_get_what_they_would_get_alone(
    span: TorchRuntime,
) -> None:
    async with Attic() as attic:
        askers = [attic.asker() for _ in range(4)]
        caches = [span.new_cache(128) for _ in askers]
        for i, asker in enumerate(askers):
            await asker.open()
            await asker.step(0, 0, rows(5 + i, seed=i))
            step(span, caches[i], 0, rows(5 + i, seed=i))
        for turn in range(3):
            for i, asker in enumerate(askers):
                asker.send_step(turn + 1, 5 + i + turn, rows(1, seed=50 + i))
            for i, asker in enumerate(askers):
                expected = step(span, caches[i], 5 + i + turn, rows(1, seed=50 + i))
                assert close_to(await asker.hidden(turn + 1), expected)


async def test_the_wire_dtype_of_results_is_the_session_s() -> None:
    async with Attic() as attic:
        asker = attic.asker()
        await asker.open(wire_dtype=WireDtype.FP16)
        asker.send_step(0, 0, rows(2))
        result = await asker.answer()
        assert isinstance(result, Result)
        assert result.tensor.dtype == "fp16"
        assert result.compute_us > 0
        assert result.queue_us >= 0


async def test_some_layers_of_the_shard_can_be_asked_for(
    span: TorchRuntime,
) -> None:
    async with Attic() as attic:
        asker = attic.asker()
        await asker.open(start=1, stop=3)
        found = await asker.step(0, 0, rows(6))
        whole = StepInput(span.new_cache(64), 0, rows(6))
        assert close_to(found, span.forward([whole], LayerRange(1, 3))[0])


async def test_a_repeated_step_is_answered_from_memory_and_computed_once(
    span: TorchRuntime,
) -> None:
    async with Attic() as attic:
        asker = attic.asker()
        await asker.open()
        first = await asker.step(7, 0, rows(3))
        # Other contents under the same id: the answer is still the first one's.
        assert torch.equal(await asker.step(7, 3, rows(3, seed=9)), first)
        cache = span.new_cache(64)
        step(span, cache, 0, rows(3))
        assert close_to(await asker.step(8, 3, rows(1)), step(span, cache, 3, rows(1)))


async def test_the_last_answer_is_repeated_while_the_next_step_is_under_way() -> None:
    async with Attic(inline_ms=0.0) as attic:
        session = attic.server.admit(REQUEST)
        first, second = (Step(1, n, 40 * n, to_wire(rows(40), WireDtype.FP32)) for n in (0, 1))
        answers: list[Result | Failure | Blob] = []
        session.submit(first, answers.append)
        await settled(lambda: bool(answers))
        session.submit(second, answers.append)
        assert session.waiting, "the second step must be under way"
        session.submit(first, answers.append)
        await settled(lambda: len(answers) == 3)
        assert answers[1] is answers[0]
        assert isinstance(answers[2], Result)
        assert answers[2].step == 1


async def test_a_step_repeated_while_it_is_computed_is_answered_once() -> None:
    async with Attic() as attic:
        session = attic.server.admit(REQUEST)
        step_0 = Step(1, 0, 0, to_wire(rows(60), WireDtype.FP32))
        answers: list[Result | Failure | Blob] = []
        for _ in range(3):
            session.submit(step_0, answers.append)
        await settled(lambda: bool(answers))
        assert not session.waiting
        assert len(answers) == 1


async def test_chunks_may_follow_each_other_without_waiting(
    span: TorchRuntime,
) -> None:
    cache = span.new_cache(128)
    async with Attic() as attic:
        asker = attic.asker()
        await asker.open()
        for i in range(4):
            asker.send_step(i, 20 * i, rows(20, seed=i))
        for i in range(4):
            assert close_to(await asker.hidden(i), step(span, cache, 20 * i, rows(20, seed=i)))


async def test_a_step_at_an_earlier_position_cuts_the_cache_first() -> None:
    async with Attic() as attic:
        cut, fresh = attic.asker(), attic.asker()
        await cut.open()
        await cut.step(0, 0, rows(10))
        await cut.step(1, 10, rows(6, seed=1))
        await fresh.open()
        await fresh.step(0, 0, rows(10))
        found = await cut.step(2, 10, rows(4, seed=2))
        assert close_to(found, await fresh.step(1, 10, rows(4, seed=2)))


async def test_refused_steps_leave_the_session_as_it_was(
    span: TorchRuntime,
) -> None:
    async with Attic(kv_tokens=16) as attic:
        asker = attic.asker()
        await asker.open(max_tokens=16)
        await asker.step(5, 0, rows(4))
        wide = torch.zeros(1, 1, HIDDEN + 1)
        gradient = WireTensor("fp32", (1, 1, HIDDEN), bytes(HIDDEN * 4), gradient=True)
        refused: list[tuple[type[MeshError], Step]] = [
            (BadRequest, Step(1, 4, 4, to_wire(rows(1), WireDtype.FP32))),  # an older step
            (BadRequest, Step(1, 6, 5, to_wire(rows(1), WireDtype.FP32))),  # a hole
            (BadRequest, Step(1, 6, 4, to_wire(wide, WireDtype.FP32))),
            (BadRequest, Step(1, 6, 4, to_wire(rows(1)[0], WireDtype.FP32))),
            (BadRequest, Step(1, 6, 4, to_wire(rows(1)[:, :0], WireDtype.FP32))),
            (BadRequest, Step(1, 6, 4, WireTensor("int8", (1, 1, HIDDEN), bytes(HIDDEN)))),
            (BadRequest, Step(1, 6, 4, gradient)),
            (ContextTooLong, Step(1, 6, 4, to_wire(rows(13), WireDtype.FP32))),
            (SessionGone, Step(99, 0, 0, to_wire(rows(1), WireDtype.FP32))),
        ]
        for expected, message in refused:
            asker.link.send(message)
            failure = await asker.answer()
            assert isinstance(failure, Failure)
            assert (failure.session, failure.step) == (message.session, message.step)
            assert failure.error["code"] == expected.code
        cache = span.new_cache(16)
        step(span, cache, 0, rows(4))
        assert close_to(await asker.step(6, 4, rows(2)), step(span, cache, 4, rows(2)))


async def test_one_session_s_failure_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that fails on one session's rows: the batch's other sessions go on."""
    attend = TorchRuntime._run
    poison = 12345.0

    def failing(self: TorchRuntime, view: object, hidden: torch.Tensor, *rest: object) -> object:
        if bool((hidden == poison).any()):
            raise RuntimeError("CUDA error: misaligned address")
        return attend(self, view, hidden, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(TorchRuntime, "_run", failing)
    async with Attic() as attic:
        good, bad = attic.asker(), attic.asker()
        for asker in (good, bad):
            await asker.open()
            await asker.step(0, 0, rows(4))
        good.send_step(1, 4, rows(1))
        bad.send_step(1, 4, torch.full((1, 1, HIDDEN), poison))
        assert (await good.hidden(1)).shape == (1, 1, HIDDEN)
        with pytest.raises(DeviceFailed):
            await bad.hidden(1)
        # The failed step may be sent again: nothing of it remained.
        found = await bad.step(1, 4, rows(1))
        assert close_to(found, await good.step(2, 4, rows(1)))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 9 GiB, max allowed: 9 GiB)."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
    ids=["CUDA", "Metal", "main memory"],
)
async def test_a_device_without_memory_fails_the_step_with_a_reason(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> object:
        raise error

    async with Attic() as attic:
        asker = attic.asker()
        await asker.open()
        monkeypatch.setattr(TorchRuntime, "_run", failing)
        with pytest.raises(DeviceFailed, match="no memory left"):
            await asker.step(0, 0, rows(1))


async def test_a_prefill_does_not_hold_up_decode_or_the_loop() -> None:
    async with Attic(prefill_rows=64) as attic:
        long, short = attic.asker(), attic.asker()
        await long.open(max_tokens=2048)
        await short.open()
        await short.step(0, 0, rows(4))
        long.send_step(0, 0, rows(2048))
        await settled(lambda: attic.server.queue_depth == 1)
        for i in range(3):
            await short.step(i + 1, 4 + i, rows(1))
        assert long.answers_waiting == 0
        assert (await long.hidden(0)).shape == (1, 2048, HIDDEN)


async def test_two_prefills_take_turns() -> None:
    async with Attic(prefill_rows=32) as attic:
        long, medium = attic.asker(), attic.asker()
        await long.open(max_tokens=2048)
        await medium.open(max_tokens=128)
        long.send_step(0, 0, rows(2048))
        medium.send_step(0, 0, rows(96))
        await medium.hidden(0)
        assert long.answers_waiting == 0
        await long.hidden(0)


async def test_how_a_long_chunk_is_cut_does_not_depend_on_company() -> None:
    async with Attic(prefill_rows=16) as attic:
        alone = attic.asker()
        await alone.open()
        expected = await alone.step(0, 0, rows(100))
        alone.close()
        first, second = attic.asker(), attic.asker()
        for asker in (first, second):
            await asker.open()
            asker.send_step(0, 0, rows(100))
        assert torch.equal(await first.hidden(0), expected)
        assert torch.equal(await second.hidden(0), expected)


async def test_too_many_steps_under_way_are_refused() -> None:
    async with Attic() as attic:
        session = attic.server.admit(REQUEST)
        chunk = to_wire(rows(100), WireDtype.FP32)
        for i in range(MAX_WAITING_STEPS):
            session.submit(Step(1, i, 100 * i, chunk), lambda _: None)
        with pytest.raises(Busy):
            session.submit(Step(1, 99, 800, chunk), lambda _: None)


async def test_health_reports_latency_and_depth() -> None:
    async with Attic() as attic:
        asker = attic.asker()
        await asker.open()
        for i in range(5):
            await asker.step(i, i, rows(1))
        health = await attic.server.health()
        assert 0 < health.p50_latency_ms <= health.p95_latency_ms
        assert (health.queue_depth, health.active_streams) == (0, 1)


async def test_forward_is_submit_awaited() -> None:
    async with Attic() as attic:
        session = attic.server.admit(REQUEST)
        await session.opened()
        result = await attic.server.forward(
            session, Step(1, 0, 0, to_wire(rows(2), WireDtype.FP32))
        )
        assert result.tensor.shape == (1, 2, HIDDEN)
        with pytest.raises(BadRequest):
            await attic.server.forward(session, Step(1, 1, 9, to_wire(rows(2), WireDtype.FP32)))
        session.close()


async def test_an_asker_with_nothing_to_say_can_be_ignored() -> None:
    async with Attic() as attic:
        asker = attic.asker()
        asker.close(17)  # unknown: never answered
        await asker.open()
        assert asker.answers_waiting == 0
