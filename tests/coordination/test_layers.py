"""Memory in front of a store: written through, read back, never waiting, going on without it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from redis.asyncio import Redis

from mesh.clock import SystemClock
from mesh.config.sections import CoordinationSection
from mesh.coordination.coordinator import Coordinator
from mesh.coordination.custom_resource import resource_name
from mesh.coordination.direct import DirectRecords
from mesh.coordination.kubernetes import KubernetesStore
from mesh.coordination.layered import LayeredRecords, StoreTimes
from mesh.coordination.opening import open_coordinator
from mesh.coordination.ready import ReadyFlags, ReadySignal
from mesh.coordination.records import ModelRef
from mesh.coordination.redis import RedisStore, record_key
from mesh.coordination.sqlite import SqliteStore
from mesh.coordination.store import RecordStore
from mesh.errors import RankTaken, RecordsFull, StoreUnavailable
from mesh.types import ModelId
from tests.coordination.api_server import ApiServer, api_server
from tests.coordination.holders import (
    MODEL,
    OTHER,
    Told,
    redis_server,
    sqlite_threads,
    until,
    worker,
)
from tests.health.clock import ManualClock

PACE = StoreTimes(visit_s=5.0, refresh_s=0.1, first_retry_s=0.05, last_retry_s=0.2, stop_s=5.0)


@dataclass
class SharedStore:
    """A server of records that several nodes share; `settings` lead there."""

    settings: dict[str, Any]
    open: Callable[[], RecordStore]
    """A store on it, not connected."""
    stop: Callable[[], Awaitable[None]]
    start: Callable[[], Awaitable[None]]
    spoil: Callable[[ModelRef], Awaitable[None]]
    """Make a model's record one that cannot be read."""


@asynccontextmanager
async def shared_store(kind: str, directory: Path) -> AsyncIterator[SharedStore]:
    """A real Redis, or a stand-in API server that refuses every request while it is stopped."""
    async with _redis(directory) if kind == "redis" else _kubernetes(directory) as found:
        yield found


@asynccontextmanager
async def _redis(directory: Path) -> AsyncIterator[SharedStore]:
    async with redis_server(directory) as server:

        async def start() -> None:
            await asyncio.to_thread(server.start)
            await server.wait_up()

        async def spoil(model: ModelRef) -> None:
            async with Redis.from_url(server.url) as somebody:
                await somebody.set(record_key(model), "{}")

        yield SharedStore(
            {"redis_url": server.url},
            lambda: RedisStore(server.url),
            lambda: asyncio.to_thread(server.stop),
            start,
            spoil,
        )


@asynccontextmanager
async def _kubernetes(directory: Path) -> AsyncIterator[SharedStore]:
    server = ApiServer()
    async with api_server(directory, server) as kubeconfig:

        async def turn(*, unavailable: bool) -> None:
            server.unavailable = unavailable

        async def spoil(model: ModelRef) -> None:
            workers = server.resources[resource_name(model)]["status"]["workers"]
            workers[0]["nixlMetadata"] = "bm9uc2Vuc2U="

        yield SharedStore(
            {"namespace": server.namespace, "kubeconfig": kubeconfig},
            lambda: KubernetesStore(server.namespace, kubeconfig, SystemClock()),
            lambda: turn(unavailable=True),
            lambda: turn(unavailable=False),
            spoil,
        )


@pytest.fixture(params=["redis", "kubernetes"])
async def shared(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SharedStore]:
    async with shared_store(request.param, tmp_path) as found:
        yield found


@asynccontextmanager
async def opened(shared: SharedStore) -> AsyncIterator[RecordStore]:
    """The store as somebody else sees it."""
    store = shared.open()
    await store.connect()
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def layered(
    store: RecordStore | None,
    told: Told | None = None,
    pace: StoreTimes = PACE,
    flags: ReadyFlags | None = None,
) -> AsyncIterator[LayeredRecords]:
    flags = flags or ReadyFlags(SystemClock())
    records = LayeredRecords(store, flags, told or Told(), pace)
    records.start()
    try:
        yield records
    finally:
        await records.stop()


def lock(file: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN IMMEDIATE")
    return connection


async def ranks(records: LayeredRecords | RecordStore, model: ModelRef = MODEL) -> list[int]:
    record = await records.get(model)
    return [] if record is None else [each.worker_rank for each in record.workers]


async def test_memory_alone_has_nothing_behind_it() -> None:
    async with layered(None) as records:
        await records.publish(MODEL, [worker(2), worker(1)])
        assert await ranks(records) == [1, 2]
        await records.withdraw(MODEL, [2])
        assert await ranks(records) == [1]
        assert records.state() == {
            "store": "memory",
            "reachable": True,
            "error": None,
            "unwritten": 0,
        }
        with pytest.raises(RankTaken):
            await records.publish(MODEL, [worker(1, holder="study")])


async def test_memory_is_bounded() -> None:
    async with layered(None) as records:
        with pytest.raises(RecordsFull, match="1024 workers"):
            await records.publish(MODEL, [worker(n, count=0) for n in range(1025)])
        for n in range(1024):
            await records.publish(ModelRef(ModelId(f"m{n}"), "ab" * 32), [worker(n, count=0)])
        await records.publish(ModelRef(ModelId("m5"), "ab" * 32), [worker(5), worker(6)])
        with pytest.raises(RecordsFull, match="1024 models"):
            await records.publish(MODEL, [worker(1)])
        await records.withdraw(ModelRef(ModelId("m5"), "ab" * 32), [5, 6])
        await records.publish(MODEL, [worker(n, count=0) for n in range(1024)])


async def test_a_restart_reads_back_what_was_written(tmp_path: Path) -> None:
    file = tmp_path / "records.db"
    async with layered(SqliteStore(file)) as records:
        await read_back(records)
        await records.publish(MODEL, [worker(2), worker(1)])
        await records.publish(OTHER, [worker(1)])
        await records.withdraw(OTHER, [1])
        # What is not written when the node stops is, before it lets go.
    async with layered(SqliteStore(file)) as records:
        await read_back(records)
        assert await ranks(records) == [1, 2]
        assert await records.models() == [MODEL]


async def test_a_store_that_cannot_be_written_at_the_end_is_let_go_all_the_same(
    tmp_path: Path,
) -> None:
    file, before = tmp_path / "records.db", sqlite_threads()
    async with layered(SqliteStore(file), pace=replace(PACE, stop_s=0.1)) as records:
        await read_back(records)
        with closing(await asyncio.to_thread(lock, file)):
            await records.publish(MODEL, [worker(1)])
            await records.stop()
    await until(lambda: asyncio.sleep(0, sqlite_threads() == before))


async def test_what_is_published_before_the_store_is_read_back_stays(tmp_path: Path) -> None:
    file = tmp_path / "records.db"
    async with layered(SqliteStore(file)) as records:
        await records.publish(MODEL, [worker(1), worker(2)])
        await read_back(records)
    async with layered(SqliteStore(file)) as records:
        newer = worker(1, at=1_900_000_000)
        await records.publish(MODEL, [newer, worker(3)])
        await records.withdraw(MODEL, [2])
        await read_back(records)
        record = await records.get(MODEL)
        assert record is not None
        assert record.workers == (newer, worker(3))


async def test_two_nodes_see_each_other_through_a_store(shared: SharedStore) -> None:
    async with layered(shared.open()) as one, layered(shared.open()) as two:
        await asyncio.gather(one.publish(MODEL, [worker(1)]), two.publish(MODEL, [worker(2)]))
        for records in (one, two):
            await until(lambda records=records: _is(ranks(records), [1, 2]))  # type: ignore[misc]
        await one.withdraw(MODEL, [1])
        await until(lambda: _is(ranks(two), [2]))
        await two.publish(MODEL, [worker(1, holder="study")])
        await until(lambda: _is(ranks(one), [1, 2]))
        await two.withdraw(MODEL, [1])
        await until(lambda: _is(ranks(one), [2]))
        # Somebody empties the store: who holds something says so again.
        async with opened(shared) as store:
            await store.withdraw(MODEL, [1, 2])
            await until(lambda: _is(ranks(store), [2]))


async def _is(wanted: Awaitable[list[int]], value: list[int]) -> bool:
    return await wanted == value


async def test_a_store_that_is_down_costs_a_warning_and_nothing_else(shared: SharedStore) -> None:
    told = Told()
    async with layered(shared.open(), told) as records:
        await read_back(records)
        await shared.stop()
        async with asyncio.timeout(4):  # less than a store is waited for
            await records.publish(MODEL, [worker(1)])
            assert await ranks(records) == [1]
        await until(lambda: _answers(records, reachable=False))
        await records.publish(MODEL, [worker(2)])
        await asyncio.sleep(0.5)
        assert [why for why in told.warnings if "memory only" in why] == told.warnings
        assert len(told.warnings) == 1
        state = records.state()
        assert state["unwritten"] == 2
        assert state["error"]
        await shared.start()
        await until(lambda: _answers(records, reachable=True))
        await until(lambda: _written(records))
    async with opened(shared) as store:
        assert await ranks(store) == [1, 2]


class _Silent(SqliteStore):
    """Says each time that it is asked, and never answers."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.asked = 0

    async def connect(self) -> None:
        self.asked += 1
        raise StoreUnavailable("It is silent.", fix="Wait.")


async def test_a_store_that_never_answers_is_asked_less_and_less() -> None:
    store, told = _Silent(), Told()
    async with layered(store, told, replace(PACE, first_retry_s=0.03, last_retry_s=0.12)):
        await asyncio.sleep(0.5)
    assert 2 <= store.asked <= 8
    assert len(told.warnings) == 1


async def read_back(records: LayeredRecords) -> None:
    """Until it has read what the store has."""
    await until(lambda: _answers(records, reachable=True))


async def _answers(records: LayeredRecords, *, reachable: bool) -> bool:
    return bool(records.state()["reachable"]) is reachable


async def _written(records: LayeredRecords) -> bool:
    return records.state()["unwritten"] == 0


async def test_one_record_that_cannot_be_written_keeps_no_other_back(shared: SharedStore) -> None:
    told = Told()
    async with opened(shared) as store:
        await store.publish(MODEL, [worker(1, holder="study")])
        async with layered(shared.open(), told) as records:
            await records.publish(MODEL, [worker(1)])
            await records.publish(OTHER, [worker(2)])
            await until(lambda: _is(ranks(store, OTHER), [2]))
            await asyncio.sleep(0.5)
        assert [each for each in told.warnings if "already published by node study" in each]
        assert len(told.warnings) == 1
        record = await store.get(MODEL)
        assert record is not None
        assert record.workers == (worker(1, holder="study"),)


async def test_one_record_that_cannot_be_read_keeps_no_other_back(shared: SharedStore) -> None:
    told = Told()
    async with opened(shared) as store:
        await store.publish(MODEL, [worker(1)])
        await store.publish(OTHER, [worker(2)])
        await shared.spoil(MODEL)
        async with layered(shared.open(), told) as records:
            await read_back(records)
            assert await ranks(records, OTHER) == [2]
            await asyncio.sleep(0.3)
        assert len(told.warnings) == 1


async def test_kubernetes_tells_of_changes_and_shows_who_is_ready(tmp_path: Path) -> None:
    server = ApiServer()
    ready = ReadySignal(ready=True, stability_verified=True)
    async with api_server(tmp_path, server) as kubeconfig:
        pace = replace(PACE, refresh_s=20.0)

        def store() -> KubernetesStore:
            return KubernetesStore("kavin", kubeconfig, SystemClock())

        flags = ReadyFlags(SystemClock())
        async with (
            layered(store(), pace=pace, flags=flags) as one,
            layered(store(), pace=pace) as two,
        ):
            await asyncio.gather(read_back(one), read_back(two))
            await one.publish(MODEL, [worker(1)])
            flags.set(MODEL, 1, ready)
            await one.show_ready(MODEL, [1, 7])
            await until(lambda: _is(ranks(two), [1]))
            await until(lambda: _phase(server, "Ready"))
            await two.show_ready(MODEL, [1])  # not its own
            await two.publish(OTHER, [worker(2)])
            await until(lambda: _written(two))
            await until(lambda: _is(ranks(one, OTHER), [2]))
            assert await _phase(server, "Ready")
            server.requests.clear()
            await asyncio.sleep(0.2)
            assert [each for each in server.requests if "update" in each] == []
            # What is lost there, and so written anew, is shown as it was.
            server.resources.clear()
            await two.withdraw(OTHER, [2])
            await two.publish(OTHER, [worker(2)])  # which is told of
            await until(lambda: _phase(server, "Ready"))
            # Another run of it is not ready, whatever was said of the one before.
            flags.clear(MODEL, 1)
            await one.publish(MODEL, [worker(1, at=1_900_000_000)])
            await until(lambda: _phase(server, "Stale"))
        async with layered(store(), pace=pace) as again:
            await read_back(again)
            assert await ranks(again) == [1]


async def _phase(server: ApiServer, phase: str) -> bool:
    found = server.resources.get(resource_name(MODEL), {})
    return found.get("status", {}).get("phase") == phase


class TestDirect:
    async def test_every_call_goes_to_the_store(self, shared: SharedStore) -> None:
        flags = ReadyFlags(SystemClock())
        records = DirectRecords(shared.open(), flags, SystemClock(), Told())
        await records.publish(MODEL, [worker(1)])
        async with opened(shared) as other:
            await other.publish(MODEL, [worker(2)])
            record = await records.get(MODEL)
            assert record is not None
            assert [each.worker_rank for each in record.workers] == [1, 2]
            assert await records.models() == [MODEL]
            await records.withdraw(MODEL, [1, 2])
            assert await records.get(MODEL) is None
            assert records.state()["store"] == f"{other.name}-only"
        await records.stop()

    async def test_a_store_that_is_down_is_left_alone_for_a_while(
        self, shared: SharedStore
    ) -> None:
        clock, told = ManualClock(), Told()
        records = DirectRecords(shared.open(), ReadyFlags(clock), clock, told)
        assert not records.state()["reachable"]
        await shared.stop()
        with pytest.raises(StoreUnavailable):
            await records.get(MODEL)
        clock.time += 2.0
        with pytest.raises(StoreUnavailable) as first:
            await records.get(MODEL)
        await shared.start()
        clock.time += 1.5
        with pytest.raises(StoreUnavailable) as second:
            await records.get(MODEL)
        assert second.value is first.value
        state = records.state()
        assert (state["reachable"], state["error"]) == (False, str(first.value))
        clock.time += 1.5
        assert await records.get(MODEL) is None
        state = records.state()
        assert (state["reachable"], state["error"]) == (True, None)
        assert len(told.warnings) == 1
        await records.stop()

    async def test_those_who_fail_together_count_as_one_failure(self, shared: SharedStore) -> None:
        clock = ManualClock()
        records = DirectRecords(shared.open(), ReadyFlags(clock), clock, Told())
        assert await records.models() == []
        await shared.stop()
        asked = (records.models() for _ in range(5))
        failed = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(each) for each in failed} == {StoreUnavailable}
        await shared.start()
        clock.time += 1.5
        assert await records.models() == []
        await records.stop()


MODES = ("memory", "sqlite", "redis", "kubernetes", "redis-only", "kubernetes-only")


@pytest.mark.parametrize("mode", MODES)
async def test_each_mode_keeps_records_where_its_name_says(mode: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        shared = None
        if mode not in {"memory", "sqlite"}:
            kind = mode.removesuffix("-only")
            shared = await stack.enter_async_context(shared_store(kind, tmp_path))
        where = shared.settings if shared is not None else {}
        settings = CoordinationSection.model_validate({"store": mode, **where})
        one, two = (
            open_coordinator(settings, tmp_path / "records.db", SystemClock(), Told())
            for _ in range(2)
        )
        one.start()
        await one.publish(MODEL, [worker(1)])
        await until(lambda: _is_written(one))
        assert one.state()["store"] == mode
        await one.stop()
        two.start()
        if mode.endswith("-only"):
            assert await two.lookup(MODEL) is not None
        await until(lambda: _is_written(two))
        record = await two.lookup(MODEL)
        assert (record is None) is (mode == "memory")
        if shared is not None:
            await shared.stop()
            if mode.endswith("-only"):
                with pytest.raises(StoreUnavailable):
                    await two.lookup(MODEL)
            else:
                assert await two.lookup(MODEL) is not None
        await two.stop()


def test_every_mode_is_tried() -> None:
    assert get_args(CoordinationSection.model_fields["store"].annotation) == MODES


async def _is_written(coordinator: Coordinator) -> bool:
    return bool(coordinator.state()["reachable"]) and not coordinator.state()["unwritten"]
