"""Publish, look up, wait for ready."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.config import Config
from mesh.coordination.coordinator import Coordinator
from mesh.coordination.layered import LayeredRecords
from mesh.coordination.opening import open_coordinator
from mesh.coordination.ready import READY_LIMIT_S, ReadyFlags, ReadySignal
from mesh.coordination.records import ModelRecord, ModelRef, WorkerKind
from mesh.errors import NotReady
from mesh.types import LayerRange, ModelId
from tests.coordination.holders import MODEL, OTHER, Told, until, worker
from tests.health.clock import ManualClock

READY = ReadySignal(ready=True, stability_verified=True)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def coordinator(clock: ManualClock) -> Coordinator:
    flags = ReadyFlags(clock)
    return Coordinator(LayeredRecords(None, flags, Told()), flags)


async def wait_ready(
    coordinator: Coordinator, timeout_s: float, layers: str | None = None
) -> ModelRecord:
    """Wait for all workers of `MODEL`, or for these layers of it."""
    asked = None if layers is None else LayerRange.parse(layers)
    return await coordinator.wait_ready(
        MODEL.name,
        timeout_s=timeout_s,
        weights_sha256=MODEL.weights_sha256,
        layers=lambda _: asked,
    )


async def test_who_waits_goes_on_when_the_last_worker_is_ready(coordinator: Coordinator) -> None:
    await coordinator.publish(MODEL, [worker(1, "0-3"), worker(2, "4-7")])
    await coordinator.publish(OTHER, [worker(3)])
    await coordinator.mark_ready(MODEL, 1, READY)
    waiting = asyncio.create_task(wait_ready(coordinator, 30))
    some = await wait_ready(coordinator, 30, "1-2")
    assert [each.worker_rank for each in some.workers] == [1]
    for half in (replace(READY, stability_verified=False), replace(READY, ready=False)):
        await coordinator.mark_ready(MODEL, 2, half)
        await asyncio.sleep(0.03)
        assert not waiting.done()
    await coordinator.mark_ready(MODEL, 2, READY)
    async with asyncio.timeout(0.5):  # less than he looks again after by himself
        assert [each.worker_rank for each in (await waiting).workers] == [1, 2]


async def test_who_waits_in_vain_is_told_for_what(coordinator: Coordinator) -> None:
    with pytest.raises(NotReady, match="every worker of deepseek"):
        await wait_ready(coordinator, 0.01)
    await coordinator.publish(MODEL, [worker(1, "0-3"), worker(2, "4-7")])
    await coordinator.mark_ready(MODEL, 1, READY)
    with pytest.raises(NotReady, match=r"Not ready in time: worker 2 of deepseek"):
        await wait_ready(coordinator, 0.01)
    await coordinator.publish(MODEL, [worker(3, "4-7")])
    with pytest.raises(NotReady, match="workers 2, 3 of"):
        await wait_ready(coordinator, 0.01)
    with pytest.raises(NotReady, match="layers 4, 5, 6, 7, 8, 9, 10, 11 and 4 more"):
        await wait_ready(coordinator, 0.01, "0-15")


async def test_who_knows_only_a_name_waits_for_the_first_checkpoint_of_it_that_is_ready(
    coordinator: Coordinator,
) -> None:
    def all_of(model: ModelRef) -> LayerRange | None:
        return LayerRange(0, 8) if model == MODEL else None

    async def wait(timeout_s: float, digest: str | None = None) -> ModelRecord:
        return await coordinator.wait_ready(
            MODEL.name, timeout_s=timeout_s, weights_sha256=digest, layers=all_of
        )

    coordinator.hear({replace(MODEL, name=ModelId("another")): [worker(1)]})
    with pytest.raises(NotReady, match="every worker of deepseek"):
        await wait(0.0)
    waiting = asyncio.create_task(wait(30))  # before anybody has published it
    await asyncio.sleep(0)
    await coordinator.publish(MODEL, [worker(1, "0-3"), worker(2, "4-7")])
    await coordinator.mark_ready(MODEL, 1, READY)
    with pytest.raises(NotReady, match="layers 4, 5, 6, 7 of"):
        await wait(0.05)
    await coordinator.publish(OTHER, [worker(3)])
    await coordinator.mark_ready(OTHER, 3, READY)
    assert (await waiting).model == OTHER
    with pytest.raises(NotReady):
        await wait(0.05, MODEL.weights_sha256)
    await coordinator.mark_ready(MODEL, 2, READY)
    ready = await wait(0.0, MODEL.weights_sha256)
    assert (ready.model, [each.worker_rank for each in ready.workers]) == (MODEL, [1, 2])


async def test_readiness_ends_after_four_hours_with_the_run_and_with_the_worker(
    coordinator: Coordinator, clock: ManualClock
) -> None:
    async def is_ready() -> bool:
        record = await coordinator.lookup(MODEL)
        return record is not None and bool(coordinator.ready(record).workers)

    await coordinator.publish(MODEL, [worker(1)])
    await coordinator.mark_ready(MODEL, 1, READY)
    assert READY_LIMIT_S == 4 * 3600
    clock.time += READY_LIMIT_S - 1
    assert await is_ready()
    clock.time += 1
    assert not await is_ready()
    await coordinator.mark_ready(MODEL, 1, READY)
    assert await is_ready()
    await coordinator.publish(MODEL, [worker(1)])  # another run of it
    assert not await is_ready()
    await coordinator.mark_ready(MODEL, 1, READY)
    record = await coordinator.lookup(MODEL)
    assert record is not None
    await coordinator.withdraw(MODEL, [1])
    assert coordinator.ready(record).workers == ()
    assert await coordinator.lookup(MODEL) is None


async def test_files_on_a_disk_are_not_waited_for(coordinator: Coordinator) -> None:
    place = replace(worker(5).place, kind=WorkerKind.CHECKPOINT)
    files = replace(worker(5), place=place)
    await coordinator.publish(MODEL, [files])
    with pytest.raises(NotReady, match="every worker of deepseek"):
        await wait_ready(coordinator, 0.01)
    await coordinator.publish(MODEL, [worker(1)])
    await coordinator.mark_ready(MODEL, 1, READY)
    ready = await wait_ready(coordinator, 1)
    assert ready.workers == (worker(1),)
    record = await coordinator.lookup(MODEL)
    assert record is not None
    assert record.workers == (worker(1), files)


async def test_what_neighbours_offer_is_ready_as_long_as_they_do(coordinator: Coordinator) -> None:
    await coordinator.publish(MODEL, [worker(1)])
    heard = worker(9, count=0)
    coordinator.hear({MODEL: [worker(2, "4-7", holder="study")], OTHER: [heard]})
    assert await coordinator.models() == sorted([MODEL, OTHER], key=lambda model: model.key)
    ready = await wait_ready(coordinator, 1, "4-7")
    assert ready.workers == (worker(2, "4-7", holder="study"),)
    view = await coordinator.view()
    rows = {row["weights_sha256"]: row["workers"] for row in view["models"]}
    assert [(each["worker_rank"], each["ready"]) for each in rows[MODEL.weights_sha256]] == [
        (1, False),
        (2, True),
    ]
    assert [each["tensor_count"] for each in rows[MODEL.weights_sha256]] == [2, 2]
    assert rows[OTHER.weights_sha256][0]["tensor_count"] is None, "it did not say"
    coordinator.hear({})
    assert await coordinator.models() == [MODEL]
    with pytest.raises(NotReady):
        await wait_ready(coordinator, 0.01, "4-7")


async def _is_written(coordinator: Coordinator) -> bool:
    return bool(coordinator.state()["reachable"]) and not coordinator.state()["unwritten"]


async def test_readiness_is_not_there_after_a_restart(tmp_path: Path, clock: ManualClock) -> None:
    config = await asyncio.to_thread(Config, state_dir=tmp_path)
    file = tmp_path / "records.db"
    one = open_coordinator(config.coordination, file, clock, Told())
    one.start()
    await one.publish(MODEL, [worker(1)])
    await one.mark_ready(MODEL, 1, READY)
    await wait_ready(one, 1)
    await until(lambda: _is_written(one))
    await one.stop()
    two = open_coordinator(config.coordination, file, clock, Told())
    two.start()
    with pytest.raises(NotReady, match="worker 1 of"):
        await wait_ready(two, 1)
    assert (await two.view())["store"] == "sqlite"
    await two.stop()
