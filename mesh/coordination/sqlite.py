"""The records in a SQLite file of this node: a row per worker, so that a merge is an upsert.

Knows nothing of who else may hold a copy.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiosqlite

from mesh.codec import Fault
from mesh.coordination.forms import worker_from, worker_json
from mesh.coordination.records import ModelRecord, ModelRef, ModelWorker, rank_taken
from mesh.coordination.store import RecordStore
from mesh.errors import BadRecord, StoreUnavailable
from mesh.events.opening import is_damage, put_aside
from mesh.private_files import mending

logger = logging.getLogger(__name__)

_VERSION = 1
_CLOSE_TIMEOUT_S = 5.0
_TABLE = (
    "CREATE TABLE IF NOT EXISTS workers (model TEXT NOT NULL, worker_rank INTEGER NOT NULL,"
    " holder TEXT NOT NULL, body TEXT NOT NULL, PRIMARY KEY (model, worker_rank)) WITHOUT ROWID"
)
_PUBLISH = (
    "INSERT INTO workers VALUES (?1, ?2, ?3, ?4) ON CONFLICT (model, worker_rank)"
    " DO UPDATE SET body = ?4 WHERE holder = ?3"
)


class SqliteStore(RecordStore):
    """See `RecordStore`."""

    name = "sqlite"

    def __init__(self, file: Path) -> None:
        self._file = file
        self._connection: aiosqlite.Connection | None = None
        self._transaction = asyncio.Lock()
        """A connection has one at a time."""

    async def connect(self) -> None:
        """Open or create the file (0600); a damaged one is put aside: nodes publish again."""
        await self.close()
        async with self._translated():
            try:
                await self._begin()
            except sqlite3.Error as error:
                if not is_damage(error):
                    raise
                aside = await asyncio.to_thread(put_aside, self._file)
                logger.warning("%s is damaged (%s); it is kept as %s", self._file, error, aside)
                await self._begin()

    async def _begin(self) -> None:
        await asyncio.to_thread(self._file.touch, 0o600)
        connection = await aiosqlite.connect(self._file, isolation_level=None, timeout=5)
        self._connection = connection
        try:
            await self._prepare(connection)
        except BaseException:
            await self.close()  # its thread would outlive this process
            raise

    async def _prepare(self, connection: aiosqlite.Connection) -> None:
        await connection.execute_fetchall("PRAGMA journal_mode = WAL")
        await connection.execute_fetchall("PRAGMA synchronous = NORMAL")
        ((version,),) = await connection.execute_fetchall("PRAGMA user_version")
        if version > _VERSION:
            raise StoreUnavailable(
                f"{self._file} was written by a newer hearthnet (form {version}).",
                fix="Run that version, or delete the file: nodes publish again what they hold.",
            )
        await connection.execute_fetchall(_TABLE)
        await connection.execute_fetchall(f"PRAGMA user_version = {_VERSION}")

    async def publish(self, model: ModelRef, workers: Sequence[ModelWorker]) -> None:
        """Upsert the workers' rows in one transaction."""
        bodies = await asyncio.to_thread(lambda: [worker_json(each) for each in workers])
        async with self._writing() as connection:
            for worker, body in zip(workers, bodies, strict=True):
                row = model.key, worker.worker_rank, worker.place.holder, body
                cursor = await connection.execute(_PUBLISH, row)
                if cursor.rowcount == 0:
                    raise rank_taken(model, worker.worker_rank, "another one")

    async def withdraw(self, model: ModelRef, ranks: Collection[int]) -> None:
        """Delete the workers' rows."""
        async with self._writing() as connection:
            await connection.executemany(
                "DELETE FROM workers WHERE model = ? AND worker_rank = ?",
                [(model.key, rank) for rank in ranks],
            )

    async def get(self, model: ModelRef) -> ModelRecord | None:
        """All rows of the model, in the order of their ranks."""
        query = "SELECT body FROM workers WHERE model = ? ORDER BY worker_rank"
        async with self._translated():
            rows = await self._open().execute_fetchall(query, (model.key,))
            workers = await asyncio.to_thread(lambda: tuple(worker_from(body) for (body,) in rows))
        return ModelRecord(model, workers) if workers else None

    async def models(self) -> list[ModelRef]:
        """Every model that has a row."""
        async with self._translated():
            rows = await self._open().execute_fetchall("SELECT DISTINCT model FROM workers")
            try:
                return [ModelRef.parse(key) for (key,) in rows]
            except ValueError as error:
                raise Fault(str(error), "model") from error

    async def changed(self, timeout_s: float) -> None:
        """Nobody else writes to the file."""
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """Close the file."""
        connection, self._connection = self._connection, None
        if connection is not None:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await connection.close()

    def _open(self) -> aiosqlite.Connection:
        if self._connection is None:
            raise StoreUnavailable(f"{self._file} is not open.", fix="Wait: it is opened again.")
        return self._connection

    @asynccontextmanager
    async def _writing(self) -> AsyncIterator[aiosqlite.Connection]:
        async with self._translated(), self._transaction:
            connection = self._open()
            try:
                await connection.execute("BEGIN IMMEDIATE")
                yield connection
                await connection.execute("COMMIT")
            except BaseException:
                # Who is cancelled leaves what it had begun to the thread: this comes after it.
                await connection.rollback()
                raise

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        """Errors of SQLite and of what is read, as CoordinationError."""
        try:
            yield
        except Fault as fault:
            raise BadRecord(
                f"{self._file} holds something else than records: {fault}.",
                fix="Delete the file: nodes publish again what they hold.",
                param=fault.field or None,
            ) from fault
        except (sqlite3.Error, OSError, ValueError) as error:
            raise StoreUnavailable(
                f"{self._file} cannot be used: {error}.",
                fix=mending(
                    error,
                    "Free space on the disk, make the state directory writable, or delete the file"
                    " if it is damaged: nodes publish again what they hold.",
                ),
            ) from error
