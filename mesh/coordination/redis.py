"""The records in Redis, under ModelExpress' keys; a merge is a Lua script, and so atomic.

``mx:model:{model_name}`` holds a record as JSON, the set ``mx:models`` all names; a name is
`ModelRef.key`. Readiness (ModelExpress' ``mx:nixl_ready``) stays in memory. Needs the package
``redis`` (the extra of that name), imported when connecting.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from mesh.codec import Fault
from mesh.coordination.forms import MAX_RECORD_BYTES, record_from, worker_map
from mesh.coordination.records import MAX_MODELS, ModelRecord, ModelRef, ModelWorker, rank_taken
from mesh.coordination.store import RecordStore, client_missing
from mesh.errors import BadRecord, StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from redis.asyncio import Redis

INDEX = "mx:models"
SOCKET_TIMEOUT_S = 5.0

_CHANGE = """
local text = redis.call('GET', KEYS[1])
local record, by_rank, workers = text and cjson.decode(text), {}, {}
if not record or type(record.workers) ~= 'table' then
  record = {model_name = ARGV[2], weights_sha256 = ARGV[3], workers = {}}
end
for _, worker in ipairs(record.workers) do by_rank[worker.worker_rank] = worker end
for _, worker in ipairs(cjson.decode(ARGV[4])) do
  local before = by_rank[worker.worker_rank]
  if before and before.holder ~= worker.holder then
    return {worker.worker_rank, before.holder or ''}
  end
  by_rank[worker.worker_rank] = worker
end
for _, rank in ipairs(cjson.decode(ARGV[5])) do by_rank[rank] = nil end
record.published_at = 0
for _, worker in pairs(by_rank) do
  workers[#workers + 1] = worker
  record.published_at = math.max(record.published_at, worker.published_at or 0)
end
if #workers == 0 then
  redis.call('DEL', KEYS[1])
  redis.call('SREM', KEYS[2], ARGV[1])
  return {}
end
table.sort(workers, function(a, b) return a.worker_rank < b.worker_rank end)
record.workers = workers
redis.call('SET', KEYS[1], cjson.encode(record))
redis.call('SADD', KEYS[2], ARGV[1])
return {}
"""
"""Puts the workers ARGV[4] into the record KEYS[1] and takes the ranks ARGV[5] out of it; KEYS[2]
are the names of all records, ARGV[1] to [3] the model. Where a rank is taken it changes nothing and
returns whose it is."""


def record_key(model: ModelRef) -> str:
    """Where the model's record is."""
    return f"mx:model:{model.key}"


class RedisStore(RecordStore):
    """See `RecordStore`. `url` is ``redis://`` or ``rediss://``; it may hold a password, and is
    never shown."""

    name = "redis"

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: Redis | None = None

    async def connect(self) -> None:
        """Connect and ask for a sign of life."""
        await self.close()
        redis = await asyncio.to_thread(_library)
        async with _translated():
            client = self._client = redis.asyncio.Redis.from_url(
                self._url,
                socket_timeout=SOCKET_TIMEOUT_S,
                socket_connect_timeout=SOCKET_TIMEOUT_S,
                # Whoever asks decides whether to try again, and when.
                retry=None,
                # It would be read from the package's files, on the event loop.
                driver_info=None,
                decode_responses=True,
                encoding_errors="replace",
            )
            await client.ping()

    async def publish(self, model: ModelRef, workers: Sequence[ModelWorker]) -> None:
        """Merge by rank, in the server."""
        text = await asyncio.to_thread(lambda: json.dumps([worker_map(each) for each in workers]))
        await self._change(model, text, "[]")

    async def withdraw(self, model: ModelRef, ranks: Collection[int]) -> None:
        """Take out by rank, in the server."""
        await self._change(model, "[]", json.dumps([*ranks]))

    async def _change(self, model: ModelRef, workers: str, ranks: str) -> None:
        key = record_key(model)
        async with _translated(key):
            taken = await self._open().register_script(_CHANGE)(
                keys=[key, INDEX],
                args=[model.key, model.name, model.weights_sha256, workers, ranks],
            )
        if taken:
            raise rank_taken(model, int(taken[0]), taken[1])

    async def get(self, model: ModelRef) -> ModelRecord | None:
        """Read one key."""
        key = record_key(model)
        async with _translated(key):
            if await self._open().strlen(key) > MAX_RECORD_BYTES:
                raise Fault(f"has more than {MAX_RECORD_BYTES} bytes")
            text = await self._open().get(key)
            return None if text is None else await asyncio.to_thread(record_from, text, model)

    async def models(self) -> list[ModelRef]:
        """The index; names that are no `ModelRef` are others' and left out."""
        async with _translated(INDEX):
            if await self._open().scard(INDEX) > MAX_MODELS:
                raise Fault(f"has more than {MAX_MODELS} elements")
            names = await self._open().smembers(INDEX)
        found = []
        for name in names:
            with suppress(ValueError):
                found.append(ModelRef.parse(str(name)))
        return found

    async def changed(self, timeout_s: float) -> None:
        """Redis is asked again after a while."""
        await asyncio.sleep(timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            async with _translated():
                await client.aclose()

    def _open(self) -> Redis:
        if self._client is None:
            raise StoreUnavailable("Redis is not connected.", fix="Wait: it is tried again.")
        return self._client


@asynccontextmanager
async def _translated(key: str = "") -> AsyncIterator[None]:
    """Errors of the client and of what is read at `key`, as CoordinationError."""
    redis = _library()
    try:
        yield
    except Fault as fault:
        raise BadRecord(
            f"Key {key} in Redis is no record of a model: it {fault}.",
            fix=f"Delete the key ({key}): nodes publish again what they hold.",
            param=fault.field or None,
        ) from fault
    except (redis.exceptions.AuthenticationError, redis.exceptions.ResponseError) as error:
        # Behind it a script's name and line.
        why = str(error).partition(" script: ")[0].rstrip(".")
        raise StoreRefused(
            f"Redis refuses: {why}.", fix=_fix(redis, error), param="coordination.redis_url"
        ) from error
    except (redis.exceptions.RedisError, OSError, ValueError) as error:
        raise StoreUnavailable(
            f"Redis does not answer: {str(error).rstrip('.')}.",
            fix="Start it, or correct coordination.redis_url.",
            param="coordination.redis_url",
        ) from error


def _fix(redis: Any, error: Exception) -> str:
    denied = redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError
    text = str(error)
    if isinstance(error, denied) or "can't run this command" in text:  # the latter in a script
        return "Check the user and password in coordination.redis_url and the server's rules."
    if text.startswith(("WRONGTYPE", "user_script:")):
        return (
            f"Something else lies where records do. Delete the keys {INDEX} and mx:model:*:"
            " nodes publish again what they hold."
        )
    return (
        "See to the server, its memory, disk and replicas, or use another: coordination.redis_url."
    )


def _library() -> Any:
    try:
        import redis.asyncio
    except ImportError as error:
        raise client_missing("redis", "redis") from error
    return redis
