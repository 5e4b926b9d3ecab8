"""What every store of records does alike: SQLite, a real Redis, a stand-in API server."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from mesh.clock import SystemClock
from mesh.coordination.kubernetes import KubernetesStore
from mesh.coordination.records import MAX_MODELS, ModelRef
from mesh.coordination.redis import INDEX, RedisStore, record_key
from mesh.coordination.sqlite import SqliteStore
from mesh.coordination.store import RecordStore
from mesh.errors import BadRecord, RankTaken, StoreRefused, StoreUnavailable
from tests.coordination.api_server import ApiServer, api_server
from tests.coordination.holders import (
    MODEL,
    OTHER,
    RedisServer,
    redis_server,
    sqlite_threads,
    until,
    worker,
)

Open = Callable[[], Awaitable[RecordStore]]


@pytest.fixture
async def redis_here(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with redis_server(tmp_path) as server:
        yield server


@pytest.fixture(params=["sqlite", "redis", "kubernetes"])
async def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Open]:
    """Opens the same store as often as it is called, each time anew."""
    async with AsyncExitStack() as stack:
        make: Callable[[], RecordStore]
        if request.param == "sqlite":
            make = lambda: SqliteStore(tmp_path / "records.db")  # noqa: E731
        elif request.param == "kubernetes":
            stand_in = ApiServer()
            kubeconfig = await stack.enter_async_context(api_server(tmp_path, stand_in))
            make = lambda: KubernetesStore("kavin", kubeconfig, SystemClock())  # noqa: E731
        else:
            server = await stack.enter_async_context(redis_server(tmp_path))
            make = lambda: RedisStore(server.url)  # noqa: E731

        async def opened() -> RecordStore:
            store = make()
            stack.push_async_callback(store.close)
            await store.connect()
            return store

        yield opened


async def test_records_are_published_merged_and_withdrawn(open_store: Open) -> None:
    store = await open_store()
    assert await store.models() == []
    assert await store.get(MODEL) is None
    await store.publish(MODEL, [worker(9, "8-11"), worker(1), replace(worker(4), tensors=())])
    await store.publish(MODEL, [worker(1, at=1_900_000_000), worker(5)])
    await store.publish(OTHER, [worker(4_294_967_295)])
    record = await store.get(MODEL)
    assert record is not None
    assert record.model == MODEL
    assert record.workers == (
        worker(1, at=1_900_000_000),
        replace(worker(4), tensors=()),
        worker(5),
        worker(9, "8-11"),
    )
    assert set(await store.models()) == {MODEL, OTHER}
    await store.withdraw(MODEL, [1, 4, 77])
    record = await (await open_store()).get(MODEL)
    assert record is not None
    assert [each.worker_rank for each in record.workers] == [5, 9]
    await store.withdraw(MODEL, [5, 9])
    await store.withdraw(MODEL, [5])
    assert await store.get(MODEL) is None
    assert await store.models() == [OTHER]


async def test_two_that_publish_at_once_lose_nothing(open_store: Open) -> None:
    stores = [await open_store() for _ in range(2)]
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for index in range(20):
            group.create_task(stores[index % 2].publish(MODEL, [worker(index, count=index)]))
    record = await stores[0].get(MODEL)
    assert record is not None
    assert record.workers == tuple(worker(index, count=index) for index in range(20))


async def test_a_worker_that_is_published_again_before_it_was_taken_is_there_once(
    open_store: Open,
) -> None:
    stores = [await open_store() for _ in range(2)]
    async with asyncio.timeout(60):
        for index in range(6):
            await asyncio.gather(*(store.publish(MODEL, [worker(index)]) for store in stores))
    record = await stores[0].get(MODEL)
    assert record is not None
    assert record.workers == tuple(worker(index) for index in range(6))


async def test_who_is_cancelled_while_it_publishes_keeps_nothing_back(open_store: Open) -> None:
    store = await open_store()
    async with asyncio.timeout(60):
        for steps in range(1, 6):
            publishing = asyncio.create_task(store.publish(MODEL, [worker(1)]))
            for _ in range(steps):
                await asyncio.sleep(0)
            publishing.cancel()
            await asyncio.wait([publishing])
            await store.publish(MODEL, [worker(2)])
    record = await store.get(MODEL)
    assert record is not None
    assert worker(2) in record.workers


async def test_a_rank_of_another_node_is_refused_and_nothing_written(open_store: Open) -> None:
    store = await open_store()
    await store.publish(MODEL, [worker(1)])
    with pytest.raises(RankTaken, match="Worker 1 of deepseek"):
        await store.publish(MODEL, [worker(0, holder="study"), worker(1, holder="study")])
    record = await store.get(MODEL)
    assert record is not None
    assert record.workers == (worker(1),)


class TestSqlite:
    @pytest.mark.parametrize("left", [b"something else" * 100, None])
    async def test_a_damaged_file_is_put_aside(self, tmp_path: Path, left: bytes | None) -> None:
        """What a power cut leaves of it keeps nobody from publishing again."""
        file = tmp_path / "records.db"
        store = SqliteStore(file)
        await store.connect()
        await store.publish(MODEL, [worker(1)])
        await store.close()
        whole = await asyncio.to_thread(file.read_bytes)
        await asyncio.to_thread(file.write_bytes, left or whole[: len(whole) // 2])
        await store.connect()
        assert await store.get(MODEL) is None
        await store.publish(MODEL, [worker(2)])
        await store.close()
        assert (tmp_path / "records.damaged").exists()
        await store.connect()
        assert await store.models() == [MODEL]
        await store.close()

    async def test_a_newer_file_is_left_alone(self, tmp_path: Path) -> None:
        file, before = tmp_path / "records.db", sqlite_threads()
        store = SqliteStore(file)
        await store.connect()
        await store.close()

        def newer() -> None:
            with sqlite3.connect(file) as connection:
                assert connection.execute("PRAGMA user_version").fetchone() == (1,)
                connection.execute("PRAGMA user_version = 2")
            connection.close()

        await asyncio.to_thread(newer)
        with pytest.raises(StoreUnavailable, match="newer hearthnet"):
            await store.connect()
        await until(lambda: asyncio.sleep(0, sqlite_threads() == before))

    async def test_what_cannot_be_opened_is_not_put_aside_as_damaged(self, tmp_path: Path) -> None:
        (tmp_path / "records.db").mkdir()
        with pytest.raises(StoreUnavailable, match="unable to open"):
            await SqliteStore(tmp_path / "records.db").connect()
        assert (tmp_path / "records.db").is_dir()

    async def test_it_is_open_once_for_its_owner_alone_and_tells_of_no_others(
        self, tmp_path: Path
    ) -> None:
        file, before = tmp_path / "records.db", sqlite_threads()
        store = SqliteStore(file)
        try:
            await store.connect()
            await store.connect()
            await until(lambda: asyncio.sleep(0, len(sqlite_threads() - before) == 1))
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await store.changed(0.0)
        finally:
            await store.close()
        with pytest.raises(StoreUnavailable, match="not open"):
            await store.models()

    async def test_a_row_that_is_no_worker_is_named(self, tmp_path: Path) -> None:
        store = SqliteStore(tmp_path / "records.db")
        await store.connect()
        await store.publish(MODEL, [worker(1)])

        def damage() -> None:
            with sqlite3.connect(tmp_path / "records.db") as connection:
                connection.execute("UPDATE workers SET body = '{}'")
            connection.close()

        await asyncio.to_thread(damage)
        with pytest.raises(BadRecord, match="Delete the file"):
            await store.get(MODEL)
        await store.close()


async def _are_connected(client: Any, count: int) -> bool:
    return len(await client.client_list()) == count


class TestRedis:
    async def test_keys_and_values_are_modelexpress_s(self, redis_here: RedisServer) -> None:
        store = RedisStore(redis_here.url)
        await store.connect()
        await store.publish(MODEL, [worker(rank) for rank in range(900, 100, -100)])
        await store.publish(MODEL, [worker(50, count=1), worker(250, at=1_900_000_000)])
        client = redis.asyncio.Redis.from_url(redis_here.url)
        try:
            assert await client.smembers("mx:models") == {MODEL.key.encode()}
            kept = await client.keys("*")
            assert set(kept) == {b"mx:models", f"mx:model:{MODEL.key}".encode()}
            assert await client.ttl(record_key(MODEL)) == -1
            record = json.loads(await client.get(record_key(MODEL)))
            assert (record["model_name"], record["published_at"]) == (MODEL.name, 1_900_000_000)
            assert [each["worker_rank"] for each in record["workers"]] == [
                50, 200, 250, 300, 400, 500, 600, 700, 800, 900,
            ]  # fmt: skip
            assert record["workers"][0]["tensors"][0]["size"] == str(2**63)
        finally:
            await client.aclose()
            await store.close()

    async def test_what_is_no_record_is_named_and_others_names_left_out(
        self, redis_here: RedisServer
    ) -> None:
        store = RedisStore(redis_here.url)
        await store.connect()
        client: Any = redis.asyncio.Redis.from_url(redis_here.url)
        try:
            await client.set(record_key(MODEL), '{"model_name": 3}')
            with pytest.raises(BadRecord, match="Delete the key"):
                await store.get(MODEL)
            await client.set(record_key(OTHER), "no JSON at all")
            with pytest.raises(StoreRefused, match="Redis refuses"):
                await store.publish(OTHER, [worker(1)])
            await client.sadd(INDEX, "somebody/else-s", MODEL.key)
            await store.connect()
            assert await store.models() == [MODEL]
            await until(lambda: _are_connected(client, 2))
            await client.sadd(INDEX, *range(MAX_MODELS - 2))
            assert await store.models() == [MODEL]
            await client.sadd(INDEX, "one more")
            with pytest.raises(BadRecord, match="more than 1024"):
                await store.models()
        finally:
            await client.aclose()
            await store.close()

    @pytest.mark.parametrize(
        ("wrong", "fix"),
        [
            (["CONFIG SET", "maxmemory", "1"], "See to the server, its memory"),
            (["CONFIG SET", "min-replicas-to-write", "1"], "See to the server, its memory"),
            (["REPLICAOF", "127.0.0.1", "1"], "See to the server, its memory"),
            (["SET", record_key(MODEL), "no JSON at all"], "Delete the keys"),
            (["SET", record_key(MODEL), '{"workers": [3]}'], "Delete the keys"),
            (["SADD", record_key(MODEL), "x"], "Delete the keys"),
            (["ACL SETUSER", "default", "-set"], "Check the user"),
            (["ACL SETUSER", "default", "-eval", "-evalsha"], "Check the user"),
        ],
    )
    async def test_a_refusal_has_the_fix_for_it(
        self, redis_here: RedisServer, wrong: list[str], fix: str
    ) -> None:
        store = RedisStore(redis_here.url)
        await store.connect()
        try:
            async with redis.asyncio.Redis.from_url(redis_here.url) as client:
                await client.execute_command(*wrong)
            with pytest.raises(StoreRefused, match=fix) as refused:
                await store.publish(MODEL, [worker(1)])
        finally:
            await store.close()
        assert "script: " not in refused.value.message
        assert ".." not in refused.value.message

    async def test_a_password_is_used_and_never_shown(self, tmp_path: Path) -> None:
        async with redis_server(tmp_path, "s3cret") as server:
            store = RedisStore(server.url)
            await store.connect()
            await store.close()
            server.password = "wrong"  # noqa: S105
            with pytest.raises(StoreRefused) as refused:
                await RedisStore(server.url).connect()
        assert "s3cret" not in str(refused.value)
        with pytest.raises(StoreUnavailable) as gone:
            await RedisStore(server.url).connect()
        assert "wrong" not in str(gone.value)
        assert ".." not in str(gone.value)

    async def test_it_is_not_asked_before_it_is_connected(self) -> None:
        with pytest.raises(StoreUnavailable, match="not connected"):
            await RedisStore("redis://127.0.0.1:1/0").get(ModelRef.parse(MODEL.key))
