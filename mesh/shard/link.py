"""One asker's link to the shards of this process: messages in, answers out.

Errors become `Failure` here and nowhere else. A session belongs to the link it was opened on and
ends with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from mesh.accounts.ledger import of_peer
from mesh.errors import BadRequest, MeshError, VersionMismatch, as_mesh_error
from mesh.models.edits import assemble
from mesh.shard.edit_parts import EditParts
from mesh.shard.failures import device_failed
from mesh.shard.permits import Permits
from mesh.shard.session import Session, gone
from mesh.shard.sessions import ChatSession
from mesh.types import NodeId, WireDtype
from mesh.wire.abilities import takes_blobs
from mesh.wire.activations import to_wire
from mesh.wire.link import Link
from mesh.wire.messages import (
    Blob,
    Close,
    CopyPrefix,
    Drain,
    Failure,
    Loading,
    Message,
    Open,
    Opened,
    OpenPart,
    OpenTaps,
    Park,
    PrefixCopied,
    Result,
    Resume,
    RowAsk,
    Seal,
    Sealed,
    Step,
)

if TYPE_CHECKING:
    from mesh.shard.server import ShardServer
    from mesh.shard.service import ShardService

logger = logging.getLogger(__name__)


class LinkSessions:
    """The sessions of one link; a `mesh.wire.link.LinkHandler`."""

    def __init__(self, link: Link, service: ShardService) -> None:
        self._link = link
        self._service = service
        self._sessions: dict[int, Session] = {}
        self._tokens: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._parts = EditParts(service.accounts, of_peer(self.peer))

    def message(self, message: Message) -> None:
        """Hand one message of the link to the session it is for."""
        # Steps first: there are a thousand of them to one of anything else.
        if isinstance(message, Step):
            try:
                self._find(message.session).submit(message, self._send)
            except MeshError as error:
                self._send(Failure(error.to_dict(), message.session, message.step))
            return
        try:
            self._control(message)
        except MeshError as error:
            self._send(Failure(error.to_dict(), getattr(message, "session", None)))

    def closed(self, error: MeshError | None) -> None:
        """See `LinkHandler.closed`: nobody can use these sessions any more."""
        for task in self._tasks:
            task.cancel()
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
        self._parts.clear()
        self._service.gone(self)

    @property
    def peer(self) -> NodeId:
        """Who is at the other end."""
        return NodeId(self._link.peer.node_id)

    def rows(self) -> list[dict[str, Any]]:
        """Who has which session open by which token on this link, JSON-able."""
        self._forget_closed()
        peer = self._link.peer
        return [
            {
                "node_id": peer.node_id,
                "node": peer.node_name,
                "purpose": self._sessions[number].purpose,
                "token_id": token,
            }
            for number, token in self._tokens.items()
        ]

    def uses(self, server: ShardServer) -> bool:
        """Whether a generation on this link has a session of this shard."""
        return any(
            isinstance(session, ChatSession) and session.server is server and not session.closed
            for session in self._sessions.values()
        )

    def notify(self, notice: Drain) -> None:
        """Tell the asker."""
        self._send(notice)

    def end_revoked(self, permits: Permits) -> None:
        """End the sessions whose tokens no longer hold."""
        for number, token_id in list(self._tokens.items()):
            try:
                permits.check(token_id)
            except MeshError as error:
                self._close(number)
                self._send(Failure(error.to_dict(), number))

    def _control(self, message: Message) -> None:
        match message:
            case Blob():
                self._find(message.session).submit(message, self._send)
            case OpenPart():
                self._parts.add(message)
            case Open() | OpenTaps():
                self._open(message)
            case Close():
                self._close(message.session)
            case Park():
                self._find(message.session).park()
            case CopyPrefix() | RowAsk() | Seal():
                self._answer_later(self._find(message.session), message)
            case Resume():
                session = self._find(message.session)
                session.resume(message.max_tokens)
                self._send(Opened(session.number, session.max_tokens))
            case Failure():
                logger.warning("peer=%s reports %s", self._link.peer.node_name, message.error)
            case _:
                raise BadRequest(
                    f"A {type(message).__name__} does not belong on a tensor link.",
                    fix="Send it on the control link.",
                )

    def _answer_later(self, session: Session, message: CopyPrefix | RowAsk | Seal) -> None:
        match message:
            case CopyPrefix():
                self._later(self._copy_prefix(session, message), "shard-copy")
            case RowAsk():
                self._later(self._give_row(session, message), "shard-row")
            case Seal():
                self._later(self._seal(session), "shard-seal")

    def _open(self, request: Open | OpenTaps) -> None:
        """The token comes first: without it nothing of what was sent is looked at."""
        number, permits = request.session, self._service.permits
        token = permits.take(self.peer, request) if permits else None
        parts = self._parts.take(number)
        edits = assemble(request.edits, parts) if isinstance(request, Open) else ()
        known = self._sessions.get(number)
        if known is not None and not known.closed:
            raise BadRequest(
                f"Session {number} is open already.",
                fix="Pick a number that is not in use on this link.",
                param="session",
            )
        if isinstance(request, OpenTaps) and not takes_blobs(self._link.peer):
            raise VersionMismatch(
                f"{self._link.peer.node_name} is too old for jobs on this node.",
                fix=f"Update hearthnet on {self._link.peer.node_name}.",
            )
        self._forget_closed()
        session = self._sessions[number] = self._service.admit(request, edits, self.peer)
        session.on_end = partial(self._ended, session)
        if token is not None:
            self._tokens[number] = token
        if session.is_open:
            self._send(Opened(number, session.max_tokens))
            return
        if session.is_loading:
            self._send(Loading(number))
        self._later(self._finish_open(session), "shard-open")

    def _close(self, number: int) -> None:
        self._parts.take(number)
        self._tokens.pop(number, None)
        session = self._sessions.pop(number, None)
        if session is not None:
            session.close()

    def _later(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _seal(self, session: Session) -> None:
        try:
            files = await as_mesh_error(session.seal(), "sealing a harvest", device_failed)
        except MeshError as error:
            self._send(Failure(error.to_dict(), session.number))
            return
        self._send(Sealed(session.number, files))

    async def _give_row(self, session: Session, ask: RowAsk) -> None:
        try:
            computing = session.row(ask.position)
            row = await as_mesh_error(computing, "computing a row", device_failed)
        except MeshError as error:
            self._send(Failure(error.to_dict(), session.number, ask.step))
            return
        self._send(Result(session.number, ask.step, to_wire(row[None, None], WireDtype.FP32), 0, 0))

    async def _copy_prefix(self, session: Session, request: CopyPrefix) -> None:
        source, held = self._sessions.get(request.source), 0
        try:
            if source is not None and not source.closed:
                copying = session.copy_prefix(source, request.positions)
                held = await as_mesh_error(copying, "copying a prefix", device_failed)
        except MeshError as error:
            self._send(Failure(error.to_dict(), session.number))
            return
        self._send(PrefixCopied(session.number, held))

    async def _finish_open(self, session: Session) -> None:
        try:
            await as_mesh_error(session.opened(), "opening a session", device_failed)
        except MeshError as error:
            if self._sessions.get(session.number) is session:
                self._close(session.number)
                self._send(Failure(error.to_dict(), session.number))
            return
        self._send(Opened(session.number, session.max_tokens))

    def _ended(self, session: Session, error: MeshError) -> None:
        """The shard has ended the session: its asker is told before it next asks."""
        if self._sessions.get(session.number) is session:
            self._close(session.number)
            self._send(Failure(error.to_dict(), session.number))

    def _find(self, number: int) -> Session:
        session = self._sessions.get(number)
        if session is None or session.closed:
            raise gone()
        return session

    def _forget_closed(self) -> None:
        self._sessions = {n: each for n, each in self._sessions.items() if not each.closed}
        self._tokens = {n: token for n, token in self._tokens.items() if n in self._sessions}

    def _send(
        self, message: Result | Failure | Blob | Loading | Opened | PrefixCopied | Sealed | Drain
    ) -> None:
        if self._link.is_closed:
            return
        try:
            self._link.send(message)
        except MeshError as error:
            # A peer that asks and does not read is not served any further.
            logger.warning("peer=%s cut: %s", self._link.peer.node_name, error)
            self._link.close("You do not read what you asked for.")
