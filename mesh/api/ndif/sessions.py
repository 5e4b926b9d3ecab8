"""`/subscribe`: the socket on which a client that waits hears of its jobs.

The first frame names the session, which the client's request then names. Whatever happens to a job,
its last frame says so before the socket closes. A client that goes away takes its jobs with it, and
so does one whose key is revoked.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from mesh.api.auth import Access, caller_of
from mesh.api.ndif import answers
from mesh.api.ndif.results import ResultUrls
from mesh.clock import tick
from mesh.errors import BadRequest, InternalError, MeshError, NotFound, StorageFull, Unauthorized
from mesh.interventions.jobs.queue.feed import Feed
from mesh.interventions.jobs.queue.inline import inline_answer
from mesh.interventions.jobs.queue.service import JobQueue
from mesh.interventions.jobs.queue.types import Status, Update
from mesh.types import Principal, shown_id

logger = logging.getLogger(__name__)

INLINE_BYTES = 1 << 20
"""The largest result that travels on the socket; larger ones are fetched from a URL."""

MAX_JOBS = 64
_FIRST_JOB_S = 300.0
_LINGER_S = 10.0
_SEND_S = 60.0
_KNOWN_S = 5.0
"""A session ends so soon after its key was revoked."""


@dataclass(slots=True, eq=False)
class ClientSession:
    """One open socket. `jobs` are those that have not ended, `base_url` where results are.

    `handed` are those whose result went out on the socket.
    """

    owner: Principal
    session_id: str = field(default_factory=lambda: secrets.token_hex(16))
    feed: Feed = field(default_factory=Feed)
    jobs: set[str] = field(default_factory=set)
    handed: list[str] = field(default_factory=list)
    base_url: str = ""
    is_open: bool = True


class ClientSessions:
    """All open sockets of a node."""

    def __init__(self, queue: JobQueue, urls: ResultUrls) -> None:
        self._queue = queue
        self._urls = urls
        self._open: dict[str, ClientSession] = {}

    def find(self, session_id: str, owner: Principal) -> ClientSession:
        """The caller's own session. Raises BadRequest."""
        session = self._open.get(session_id)
        if session is None or session.owner != owner:
            raise BadRequest(
                "There is no such session, or its socket has closed.",
                fix="Open /subscribe with the same key first, or leave session_id empty and ask"
                " for the result.",
                param="session_id",
            )
        if len(session.jobs) >= MAX_JOBS:
            raise BadRequest(f"The session has {MAX_JOBS} jobs.", fix="Open another.")
        return session

    async def serve(self, socket: WebSocket) -> None:
        """Hear of jobs while they wait and run: the first frame names the session, which the
        client's request then names."""
        await socket.accept()
        caller = caller_of(socket)
        access: Access = socket.app.state.access
        still_known = partial(access.require_known, caller)
        session = ClientSession(caller.principal.account)
        self._open[session.session_id] = session
        name = f"session {session.session_id[:8]}"
        gone = asyncio.create_task(_until_gone(socket), name=f"{name} reading")
        telling = asyncio.create_task(
            self._tell(socket, session, still_known), name=f"{name} telling"
        )
        barred = asyncio.create_task(_until_revoked(still_known), name=f"{name} key")
        tasks = (gone, telling, barred)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            session.is_open = False
            del self._open[session.session_id]
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            revoked = next((end for end in ends if isinstance(end, Unauthorized)), None)
            why = "Its client went away." if revoked is None else revoked.message
            unfinished = session.jobs.difference(session.handed)
            for job_id in unfinished:
                await self._abandon(session, job_id, why)
            for job_id in session.handed:
                await self._tidy_up(job_id)
        if revoked is not None:
            await _say_last(socket, unfinished or {session.session_id}, why)
        await _close(socket)
        for end in ends:
            if isinstance(end, Exception) and not isinstance(
                end, WebSocketDisconnect | Unauthorized
            ):
                logger.error("%s failed", name, exc_info=end)

    async def _abandon(self, session: ClientSession, job_id: str, why: str) -> None:
        try:
            await self._queue.kill(job_id, session.owner, why)
        except NotFound:  # it ended by itself meanwhile
            return
        except InternalError as error:  # the session's other jobs are to end all the same
            logger.warning("job=%s: %s", shown_id(job_id), error)

    async def _tidy_up(self, job_id: str) -> None:
        try:
            await self._queue.delivered(job_id)
        except (StorageFull, OSError) as error:  # the others' are to go all the same
            logger.warning("job=%s keeps its result for now: %s", shown_id(job_id), error)

    async def _tell(
        self, socket: WebSocket, session: ClientSession, still_known: Callable[[], None]
    ) -> None:
        """Pass on updates until there is nothing more to wait for. Raises as `still_known`."""
        await _send(socket, {"session_id": session.session_id})
        patience_s: float = _FIRST_JOB_S
        while True:
            try:
                async with asyncio.timeout(None if session.jobs else patience_s):
                    update = await session.feed.get()
            except TimeoutError:
                if session.jobs:
                    continue
                if patience_s == _FIRST_JOB_S:
                    said = f"No job came within {_FIRST_JOB_S:g} s."
                    await _send(socket, answers.answer(session.session_id, Status.ERROR, said))
                return
            still_known()
            await self._pass_on(socket, session, update)
            if update.status.is_final:
                session.jobs.discard(update.job_id)
                patience_s = _LINGER_S

    async def _pass_on(self, socket: WebSocket, session: ClientSession, update: Update) -> None:
        try:
            frame = await self._frame(session, update)
        except (MeshError, OSError) as error:
            logger.warning(
                "job=%s: its result was not passed on: %s", shown_id(update.job_id), error
            )
            said = "The result could not be read from the node's disk. Send the job again."
            frame = answers.answer(update.job_id, Status.ERROR, said, meta=update.meta)
        await _send(socket, frame)
        if isinstance(frame, bytes):
            session.handed.append(update.job_id)

    async def _frame(self, session: ClientSession, update: Update) -> dict[str, Any] | bytes:
        """What the client is told, or given. Raises NotFound, StorageFull, OSError."""
        if update.status is not Status.COMPLETED:
            return answers.of_update(update)
        if update.result_bytes > INLINE_BYTES:
            job = await self._queue.find(update.job_id, session.owner)
            return answers.of_update(update, self._urls.make(session.base_url, job))
        path, said = self._queue.spool.result(update.job_id), answers.of_update(update)
        return await asyncio.to_thread(lambda: inline_answer(said, path.read_bytes()))


async def _send(socket: WebSocket, frame: dict[str, Any] | bytes) -> None:
    """Raises WebSocketDisconnect, also when the client does not read."""
    try:
        async with asyncio.timeout(_SEND_S):
            if isinstance(frame, bytes):
                await socket.send_bytes(frame)
            else:
                await socket.send_json(frame)
    except TimeoutError:
        raise WebSocketDisconnect(1008, "it does not read") from None


async def _until_gone(socket: WebSocket) -> None:
    """Clients say nothing on this socket; what they send all the same is ignored."""
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            return


async def _until_revoked(still_known: Callable[[], None]) -> None:
    """Raises Unauthorized once the caller's key is revoked; otherwise never ends."""
    while True:
        still_known()
        await tick(_KNOWN_S)


async def _say_last(socket: WebSocket, ids: Set[str], why: str) -> None:
    """The last frame of each, to a client that may be gone."""
    with suppress(WebSocketDisconnect, RuntimeError):
        for id_ in ids:
            await _send(socket, answers.answer(id_, Status.ERROR, why))


async def _close(socket: WebSocket) -> None:
    if WebSocketState.DISCONNECTED in (socket.client_state, socket.application_state):
        return
    try:
        await socket.close()
    except (WebSocketDisconnect, RuntimeError):  # it left first
        return
