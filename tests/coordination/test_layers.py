"""Memory in front of a store: written through, read back, never waiting, going on without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from mesh.clock import SystemClock
from mesh.coordination.custom_resource import resource_name
from mesh.coordination.direct import DirectRecords
from mesh.coordination.kubernetes import KubernetesStore
from mesh.coordination.layered import LayeredRecords, StoreTimes
from mesh.coordination.ready import ReadyFlags, ReadySignal
from mesh.coordination.records import ModelRef
from mesh.coordination.redis import RedisStore, record_key
from mesh.coordination.sqlite import SqliteStore
from mesh.coordination.store import RecordStore
from mesh.errors import RankTaken, RecordsFull, StoreUnavailable
from mesh.types import ModelId
from tests.coordination.api_server import ApiServer, api_server
from tests.coordination.holders import MODEL, OTHER, Told, redis_server, until, worker
from tests.health.clock import ManualClock

PACE = StoreTimes(visit_s=5.0, refresh_s=0.1, first_retry_s=0.05, last_retry_s=0.2, stop_s=5.0)


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
        with pytest.raises(RecordsFull, match="1024 models"):
            await records.publish(MODEL, [worker(1)])
        await records.withdraw(ModelRef(ModelId("m5"), "ab" * 32), [5])
        await records.publish(MODEL, [worker(1)])


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


async def test_two_nodes_see_each_other_through_redis(tmp_path: Path) -> None:
    async with (
        redis_server(tmp_path) as server,
        layered(RedisStore(server.url)) as one,
        layered(RedisStore(server.url)) as two,
    ):
        await asyncio.gather(one.publish(MODEL, [worker(1)]), two.publish(MODEL, [worker(2)]))
        for records in (one, two):
            await until(lambda records=records: _is(ranks(records), [1, 2]))  # type: ignore[misc]
        await one.withdraw(MODEL, [1])
        await until(lambda: _is(ranks(two), [2]))
        # Somebody empties the Redis: who holds something says so again.
        store = RedisStore(server.url)
        await store.connect()
        await store.withdraw(MODEL, [1, 2])
        await until(lambda: _is(ranks(store), [2]))
        await store.close()


async def _is(wanted: Awaitable[list[int]], value: list[int]) -> bool:
    return await wanted == value


async def test_a_store_that_is_down_costs_a_warning_and_nothing_else(tmp_path: Path) -> None:
    told = Told()
    async with redis_server(tmp_path) as server:
        async with layered(RedisStore(server.url), told) as records:
            await read_back(records)
            await asyncio.to_thread(server.stop)
            async with asyncio.timeout(1):
                await records.publish(MODEL, [worker(1)])
                assert await ranks(records) == [1]
            await until(lambda: _answers(records, reachable=False))
            await records.publish(MODEL, [worker(2)])
            await asyncio.sleep(0.5)
            assert [why for why in told.warnings if "memory only" in why] == told.warnings
            assert len(told.warnings) == 1
            assert records.state()["unwritten"] == 2
            await asyncio.to_thread(server.start)
            await until(lambda: _answers(records, reachable=True))
            await until(lambda: _written(records))
        store = RedisStore(server.url)
        await store.connect()
        assert await ranks(store) == [1, 2]
        await store.close()


async def read_back(records: LayeredRecords) -> None:
    """Until it has read what the store has."""
    await until(lambda: _answers(records, reachable=True))


async def _answers(records: LayeredRecords, *, reachable: bool) -> bool:
    return bool(records.state()["reachable"]) is reachable


async def _written(records: LayeredRecords) -> bool:
    return records.state()["unwritten"] == 0


async def test_one_record_that_cannot_be_written_keeps_no_other_back(tmp_path: Path) -> None:
    told = Told()
    async with redis_server(tmp_path) as server:
        store = RedisStore(server.url)
        await store.connect()
        await store.publish(MODEL, [worker(1, holder="study")])
        async with layered(RedisStore(server.url), told) as records:
            await records.publish(MODEL, [worker(1)])
            await records.publish(OTHER, [worker(2)])
            await until(lambda: _is(ranks(store, OTHER), [2]))
            await asyncio.sleep(0.5)
        assert [each for each in told.warnings if "already published by node study" in each]
        assert len(told.warnings) == 1
        record = await store.get(MODEL)
        assert record is not None
        assert record.workers == (worker(1, holder="study"),)
        await store.close()


async def test_one_record_that_cannot_be_read_keeps_no_other_back(tmp_path: Path) -> None:
    told = Told()
    async with redis_server(tmp_path) as server:
        store = RedisStore(server.url)
        await store.connect()
        await store.publish(MODEL, [worker(1)])
        await store.publish(OTHER, [worker(2)])
        async with Redis.from_url(server.url) as somebody:
            await somebody.set(record_key(MODEL), "{}")
        async with layered(RedisStore(server.url), told) as records:
            await read_back(records)
            assert await ranks(records, OTHER) == [2]
            await asyncio.sleep(0.3)
        assert len(told.warnings) == 1
        await store.close()


async def test_kubernetes_tells_of_changes_and_shows_who_is_ready(tmp_path: Path) -> None:
    server = ApiServer()
    ready = ReadySignal("s", ready=True, stability_verified=True)
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
    async def test_every_call_goes_to_the_store(self, tmp_path: Path) -> None:
        async with redis_server(tmp_path) as server:
            records = DirectRecords(RedisStore(server.url), SystemClock(), Told())
            await records.publish(MODEL, [worker(1)])
            other = RedisStore(server.url)
            await other.connect()
            await other.publish(MODEL, [worker(2)])
            record = await records.get(MODEL)
            assert record is not None
            assert [each.worker_rank for each in record.workers] == [1, 2]
            assert await records.models() == [MODEL]
            await records.withdraw(MODEL, [1, 2])
            assert await records.get(MODEL) is None
            assert records.state()["store"] == "redis-only"
            await other.close()
            await records.stop()

    async def test_a_store_that_is_down_is_left_alone_for_a_while(self, tmp_path: Path) -> None:
        clock, told = ManualClock(), Told()
        async with redis_server(tmp_path) as server:
            records = DirectRecords(RedisStore(server.url), clock, told)
            assert await records.get(MODEL) is None
            await asyncio.to_thread(server.stop)
            with pytest.raises(StoreUnavailable) as first:
                await records.get(MODEL)
            await asyncio.to_thread(server.start)
            await server.wait_up()
            with pytest.raises(StoreUnavailable) as second:
                await records.get(MODEL)
            assert second.value is first.value
            clock.time += 2.0
            assert await records.get(MODEL) is None
            assert records.state()["reachable"]
            assert len(told.warnings) == 1
            await records.stop()
