"""The table of jobs, in SQLite through aiosqlite. A write is on the disk when it returns.

Knows rows, not what they mean: `service` decides what becomes of a job.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import aiosqlite

from mesh import codec
from mesh.errors import SchemaTooNew, StorageFull
from mesh.events.opening import is_damage, put_aside
from mesh.interventions.jobs.queue.types import Job, Status, Submission
from mesh.private_files import mending
from mesh.types import ModelId, Principal

logger = logging.getLogger(__name__)

_SCHEMA = 2
_PRAGMAS = ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL", "PRAGMA trusted_schema = OFF")
_CREATE = """
CREATE TABLE IF NOT EXISTS jobs (
  number INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
  model_id TEXT NOT NULL, blocking INTEGER NOT NULL, compress INTEGER NOT NULL, env TEXT NOT NULL,
  trusted INTEGER NOT NULL, received_at REAL NOT NULL, status TEXT NOT NULL,
  description TEXT NOT NULL, attempts INTEGER NOT NULL, ended_at REAL,
  payload_bytes INTEGER NOT NULL, result_bytes INTEGER NOT NULL, meta TEXT NOT NULL)
"""
_SINCE_1 = """
UPDATE jobs SET owner = CASE owner WHEN 'local' THEN 'local:anonymous' ELSE 'key:' || owner END
"""
"""In schema 1 an owner was a key's id, or ``local`` for all who had none."""


class _Row(NamedTuple):
    """A job as the table has it: its columns, but for the number."""

    job_id: str
    owner: str
    model_id: str
    blocking: int
    compress: int
    env: str
    trusted: int
    received_at: float
    status: Status
    description: str
    attempts: int
    ended_at: float | None
    payload_bytes: int
    result_bytes: int
    meta: str


_COLUMNS = ", ".join(_Row._fields)
_INSERT = f"INSERT INTO jobs ({_COLUMNS}) VALUES ({', '.join('?' * len(_Row._fields))})"  # noqa: S608 - our own
_UPDATE = (
    "UPDATE jobs SET status = ?, description = ?, attempts = ?, ended_at = ?, result_bytes = ?,"
    " meta = ? WHERE job_id = ?"
)


class JobRecords:
    """Owns the file. Use `open`, then `close`."""

    def __init__(self, connection: aiosqlite.Connection) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, path: Path) -> Self:
        """Open or create the file; a damaged one is put aside. Raises SchemaTooNew, StorageFull."""
        try:
            return cls(await _connect(path))
        except OSError as error:
            raise _unusable(error) from error
        except sqlite3.Error as error:
            if not is_damage(error):
                raise _unusable(error) from error
        try:
            aside = await asyncio.to_thread(put_aside, path)
            logger.error("%s is damaged; its jobs are lost and it is kept as %s", path, aside)
            return cls(await _connect(path))
        except (OSError, sqlite3.Error) as error:
            raise _unusable(error) from error

    async def close(self) -> None:
        """Close the file."""
        await self._connection.close()

    async def add(self, job: Job) -> None:
        """Keep a new job. Raises StorageFull."""
        await self._run(_INSERT, _row(job))

    async def change(self, job: Job) -> None:
        """Keep what became of a job. Raises StorageFull."""
        values = (
            job.status, job.description, job.attempts, job.ended_at, job.result_bytes,
            json.dumps(dict(job.meta)), job.job_id,
        )  # fmt: skip
        await self._run(_UPDATE, values)

    async def find(self, job_id: str) -> Job | None:
        """One job."""
        return next(iter(await self._select("job_id = ?", (job_id,))), None)

    async def unfinished(self) -> list[Job]:
        """Jobs that have not ended, in the order in which they came."""
        return await self._select("ended_at IS NULL", ())

    async def kept(self) -> list[str]:
        """The ids of jobs whose result is still there."""
        rows = await self._run("SELECT job_id FROM jobs WHERE result_bytes > 0", ())
        return [job_id for (job_id,) in rows]

    async def outdated(self, ended_before: float, limit: int) -> list[Job]:
        """Some jobs that ended before then and whose result is still there."""
        where = "result_bytes > 0 AND ended_at < ? ORDER BY number LIMIT ?"
        return await self._select(where, (ended_before, limit), "")

    async def held(self) -> dict[Principal, int]:
        """How many bytes of results each owner has."""
        query = "SELECT owner, sum(result_bytes) FROM jobs WHERE result_bytes > 0 GROUP BY owner"
        try:
            return {Principal.parse(owner): size for owner, size in await self._run(query, ())}
        except ValueError as error:
            raise _unusable(error) from error

    async def oldest(self, owner: Principal) -> Job | None:
        """The owner's job that ended first of those whose result is still there."""
        where = "result_bytes > 0 AND owner = ? ORDER BY ended_at LIMIT 1"
        return next(iter(await self._select(where, (str(owner),), "")), None)

    async def forget(self, ended_before: float) -> None:
        """Drop jobs that ended before then and left nothing. Raises StorageFull."""
        await self._run("DELETE FROM jobs WHERE result_bytes = 0 AND ended_at < ?", (ended_before,))

    async def recent(self, limit: int, owner: Principal | None) -> list[Job]:
        """The jobs that ended last, newest first; those of `owner`, None for all."""
        who = None if owner is None else str(owner)
        where = "ended_at IS NOT NULL AND owner = ifnull(?, owner) ORDER BY ended_at DESC LIMIT ?"
        return await self._select(where, (who, limit), "")

    async def _select(
        self, where: str, values: Sequence[object], order: str = " ORDER BY number"
    ) -> list[Job]:
        query = f"SELECT {_COLUMNS} FROM jobs WHERE {where}{order}"  # noqa: S608 - our own texts
        rows = await self._run(query, values)
        try:
            return [_job(codec.convert(tuple(row), _Row)) for row in rows]
        except ValueError as error:
            raise _unusable(error) from error

    async def _run(self, query: str, values: Sequence[object]) -> list[sqlite3.Row]:
        try:
            return list(await self._connection.execute_fetchall(query, values))
        except sqlite3.Error as error:
            raise _unusable(error) from error


async def _connect(path: Path) -> aiosqlite.Connection:
    """Raises sqlite3.Error, OSError and SchemaTooNew."""
    await asyncio.to_thread(path.touch, 0o600)
    connection = await aiosqlite.connect(path, isolation_level=None, timeout=10)
    try:
        for pragma in _PRAGMAS:
            await connection.execute_fetchall(pragma)
        ((found,),) = await connection.execute_fetchall("PRAGMA user_version")
        _require_known(found, path)
        await connection.execute_fetchall("BEGIN IMMEDIATE")  # or a kill has owners changed twice
        await connection.execute_fetchall(_CREATE)
        if found == 1:
            await connection.execute_fetchall(_SINCE_1)
        await connection.execute_fetchall(f"PRAGMA user_version = {_SCHEMA}")
        await connection.commit()
    except BaseException:
        await connection.close()
        raise
    return connection


def _require_known(schema: int, path: Path) -> None:
    if schema > _SCHEMA:
        raise SchemaTooNew(
            f"A newer hearthnet has written {path}.", fix="Run that version, or a newer one."
        )


def _row(job: Job) -> _Row:
    asked = job.asked
    return _Row(
        job.job_id, str(asked.owner), asked.model_id, asked.blocking, asked.compress,
        json.dumps(dict(asked.env)), asked.trusted, job.received_at, job.status, job.description,
        job.attempts, job.ended_at, job.payload_bytes, job.result_bytes, json.dumps(dict(job.meta)),
    )  # fmt: skip


def _job(row: _Row) -> Job:
    asked = Submission(
        Principal.parse(row.owner), ModelId(row.model_id), bool(row.blocking), bool(row.compress),
        _map(row.env), bool(row.trusted),
    )  # fmt: skip
    return Job(
        row.job_id, asked, row.received_at, row.status, row.description, row.attempts, row.ended_at,
        row.payload_bytes, row.result_bytes, _map(row.meta),
    )  # fmt: skip


def _map(text: str) -> dict[str, Any]:
    return codec.convert(codec.parse_json(text), dict[str, Any])


def _unusable(error: sqlite3.Error | OSError | ValueError) -> StorageFull:
    return StorageFull(
        f"The table of jobs cannot be used: {error}.",
        fix=mending(error, "Free space on the disk, or make the state directory writable."),
    )
