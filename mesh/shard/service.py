"""The shards of one process behind its links: messages in, answers out.

Errors become `Failure` here and nowhere else. A session belongs to the link it was opened on and
ends with it.
"""

from __future__ import annotations

import asyncio
import logging

from mesh.errors import BadRequest, MeshError, NoRoute
from mesh.shard.server import ShardServer
from mesh.shard.sessions import Session, gone
from mesh.shard.taps.link import LinkTaps
from mesh.shard.taps.server import TapPlace, TapServer
from mesh.types import ShardId
from mesh.wire.link import Link
from mesh.wire.messages import (
    Close,
    Failure,
    Message,
    Open,
    Opened,
    OpenTaps,
    Park,
    Result,
    Resume,
    Step,
)

logger = logging.getLogger(__name__)

_MAX_SESSIONS_PER_LINK = 1024


class ShardService:
    """Which shards this process serves."""

    def __init__(self) -> None:
        self._servers: dict[ShardId, ShardServer] = {}
        self._taps: dict[ShardId, TapServer] = {}

    @property
    def servers(self) -> tuple[ShardServer, ...]:
        """All shards, in the order they were added."""
        return tuple(self._servers.values())

    def add(self, server: ShardServer, taps: TapServer | None = None) -> None:
        """Serve this shard from now on, interventions too if `taps` is given.

        Raises BadRequest when one of the same id is here.
        """
        self.require_absent(server.descriptor.shard_id)
        self._servers[server.descriptor.shard_id] = server
        if taps is not None:
            self._taps[server.descriptor.shard_id] = taps

    def require_absent(self, shard_id: ShardId) -> None:
        """Raise BadRequest when a shard of this id is here."""
        if shard_id in self._servers:
            raise BadRequest(f"{shard_id} is already loaded.", fix="Unload it first.")

    def remove(self, shard_id: ShardId) -> ShardServer:
        """Serve it no longer; its sessions go on until closed. Raises BadRequest if unknown."""
        server = self._servers.pop(shard_id, None)
        if server is None:
            raise BadRequest(f"{shard_id} is not loaded here.", fix="Look at `hearthnet status`.")
        taps = self._taps.pop(shard_id, None)
        if taps is not None:
            taps.shutdown()
        return server

    def handler(self, link: Link) -> LinkSessions:
        """The handler for a new link."""
        return LinkSessions(link, self)

    def admit(self, request: Open) -> tuple[ShardServer, Session]:
        """Open on the first shard that can; raises the error of the best match otherwise."""
        refusal: MeshError | None = None
        for server in self._servers.values():
            try:
                return server, server.admit(request)
            except MeshError as error:
                # That another shard lacks the layers says less than why this one refused.
                if refusal is None or isinstance(refusal, NoRoute):
                    refusal = error
        raise refusal or NoRoute(
            "This node serves no shard.", fix="Use another node, or load a shard here."
        )

    def admit_taps(self, request: OpenTaps) -> tuple[TapServer, TapPlace]:
        """The same for an intervention session."""
        refusal: MeshError | None = None
        for server in self._taps.values():
            try:
                return server, server.admit(request)
            except MeshError as error:
                if refusal is None or isinstance(refusal, NoRoute):
                    refusal = error
        raise refusal or NoRoute(
            "This node serves no interventions.", fix="Use another node, or load a shard here."
        )


class LinkSessions:
    """The sessions of one link; a `mesh.wire.link.LinkHandler`."""

    def __init__(self, link: Link, service: ShardService) -> None:
        self._link = link
        self._service = service
        self._sessions: dict[int, tuple[ShardServer, Session]] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._taps = LinkTaps(service, self._send)

    def message(self, message: Message) -> None:
        """See `LinkHandler.message`."""
        # Steps first: there are a thousand of them to one of anything else.
        if isinstance(message, Step):
            self._step(message)
            return
        try:
            self._control(message)
        except MeshError as error:
            self._send(Failure(error.to_dict(), getattr(message, "session", None)))

    def closed(self, error: MeshError | None) -> None:
        """See `LinkHandler.closed`: nobody can use these sessions any more."""
        for task in self._opening:
            task.cancel()
        for server, session in self._sessions.values():
            server.close(session)
        self._sessions.clear()
        self._taps.closed()

    def _step(self, step: Step) -> None:
        try:
            if self._taps.has(step.session):
                self._taps.step(step)
                return
            server, session = self._find(step.session)
            server.submit(session, step, self._send)
        except MeshError as error:
            self._send(Failure(error.to_dict(), step.session, step.step))

    def _control(self, message: Message) -> None:
        match message:
            case Open():
                self._open(message)
            case OpenTaps():
                self._taps.open(message)
            case Close():
                self._taps.close(message.session)
                known = self._sessions.pop(message.session, None)
                if known is not None:
                    known[0].close(known[1])
            case Park():
                server, session = self._find(message.session)
                server.park(session)
            case Resume():
                server, session = self._find(message.session)
                server.resume(session, message.max_tokens)
                self._send(Opened(session.number, session.max_tokens))
            case Failure():
                logger.warning("peer=%s reports %s", self._link.peer.node_name, message.error)
            case _:
                raise BadRequest(
                    f"A {type(message).__name__} does not belong on a tensor link.",
                    fix="Send it on the control link.",
                )

    def _open(self, request: Open) -> None:
        known = self._sessions.get(request.session)
        if known is not None and not known[1].closed:
            raise BadRequest(
                f"Session {request.session} is open already.",
                fix="Pick a number that is not in use on this link.",
                param="session",
            )
        if len(self._sessions) >= _MAX_SESSIONS_PER_LINK:
            self._forget_closed()
        server, session = self._service.admit(request)
        self._sessions[request.session] = (server, session)
        if session.place is not None:
            self._send(Opened(session.number, session.max_tokens))
            return
        task = asyncio.create_task(self._finish_open(server, session), name="shard-open")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _finish_open(self, server: ShardServer, session: Session) -> None:
        try:
            await server.opened(session)
        except MeshError as error:
            if self._sessions.get(session.number) == (server, session):
                del self._sessions[session.number]
                self._send(Failure(error.to_dict(), session.number))
            return
        self._send(Opened(session.number, session.max_tokens))

    def _find(self, number: int) -> tuple[ShardServer, Session]:
        known = self._sessions.get(number)
        if known is None or known[1].closed:
            raise gone()
        return known

    def _forget_closed(self) -> None:
        self._sessions = {n: known for n, known in self._sessions.items() if not known[1].closed}

    def _send(self, message: Result | Failure | Opened) -> None:
        if self._link.is_closed:
            return
        try:
            self._link.send(message)
        except MeshError as error:
            # A peer that asks and does not read is not served any further.
            logger.warning("peer=%s cut: %s", self._link.peer.node_name, error)
            self._link.close("You do not read what you asked for.")
