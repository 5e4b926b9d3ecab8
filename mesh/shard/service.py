"""The shards of one process behind its links: messages in, answers out.

Errors become `Failure` here and nowhere else. A session belongs to the link it was opened on and
ends with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from mesh import allowances
from mesh.clock import SystemClock
from mesh.errors import (
    BadRequest,
    DiskFull,
    MeshError,
    NoRoute,
)
from mesh.ledger import ResourceLedger, of_peer
from mesh.models.edits import assemble
from mesh.models.harvest import HarvestBatch
from mesh.shard.edit_parts import EditParts
from mesh.shard.failures import foreseen
from mesh.shard.permits import Permits
from mesh.shard.recording import HarvestShelf, Recording
from mesh.shard.server import ShardServer
from mesh.shard.sessions import Session, gone
from mesh.shard.taps.link import LinkTaps
from mesh.shard.taps.server import TapPlace, TapServer
from mesh.types import Edit, NodeId, ShardId
from mesh.wire.link import Link
from mesh.wire.messages import (
    Close,
    Failure,
    Loading,
    Message,
    Open,
    Opened,
    OpenPart,
    OpenTaps,
    Park,
    Result,
    Resume,
    Seal,
    Sealed,
    Step,
)

logger = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")

_MAX_SESSIONS_PER_LINK = 1024
_Opened = tuple[ShardServer, Session]


class ShardService:
    """Which shards this process serves.

    With `permits` every session needs a token; None is for links that prove no identity, which
    only exist within one process. Harvests are written to the `shelf`, when there is one. What
    peers hold beside sessions is on `accounts`.
    """

    def __init__(self) -> None:
        self.accounts = ResourceLedger(SystemClock(), allowances.SHARDS)
        self.permits: Permits | None = None
        self.shelf: HarvestShelf | None = None
        self._servers: dict[ShardId, ShardServer] = {}
        self._taps: dict[ShardId, TapServer] = {}
        self._links: set[LinkSessions] = set()

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
        sessions = LinkSessions(link, self)
        self._links.add(sessions)
        return sessions

    def gone(self, sessions: LinkSessions) -> None:
        """A link has ended."""
        self._links.discard(sessions)

    def sessions(self) -> list[dict[str, Any]]:
        """Who has which session open by which token, JSON-able."""
        return [row for sessions in self._links for row in sessions.rows()]

    def reports(self) -> list[dict[str, Any]]:
        """Who holds what here, JSON-able: of the process, and of each shard."""
        ledgers = {"shards": self.accounts}
        ledgers |= {name: server.accounts for name, server in self._servers.items()}
        ledgers |= {f"{name} (jobs)": taps.accounts for name, taps in self._taps.items()}
        reports = [ledger.report(where) for where, ledger in ledgers.items()]
        return [report for report in reports if report["principals"]]

    def revoke(self, token_ids: frozenset[str]) -> None:
        """Exactly these tokens are revoked: nobody opens with them, and their sessions end."""
        if self.permits is not None:
            self.permits.revoke(token_ids)
            for sessions in list(self._links):
                sessions.end_revoked(self.permits)

    def admit(self, request: Open, edits: Sequence[Edit], peer: NodeId) -> _Opened:
        """Open on the first shard that can; raises the error of the best match otherwise."""

        def attempt(server: ShardServer) -> _Opened:
            recording = self._recording(request, peer)
            return server, server.admit(request, edits, recording, of_peer(peer))

        return _first(attempt, self._servers.values(), "shard")

    def _recording(self, request: Open, peer: NodeId) -> Recording | None:
        if not request.harvest:
            return None
        batch = HarvestBatch.from_fields(request.harvest)
        if self.shelf is None:
            raise DiskFull("This process writes no harvests.", fix="Use another node.")
        return self.shelf.recording(batch, peer)

    def admit_taps(self, request: OpenTaps, peer: NodeId) -> tuple[TapServer, TapPlace]:
        """The same for an intervention session."""
        return _first(
            lambda server: (server, server.admit(request, of_peer(peer))),
            self._taps.values(),
            "interventions",
        )


def _first(attempt: Callable[[S], T], servers: Iterable[S], what: str) -> T:
    """What the first server admits; raises the refusal of the best match otherwise."""
    refusal: MeshError | None = None
    for server in servers:
        try:
            return attempt(server)
        except MeshError as error:
            # That another shard lacks the layers says less than why this one refused.
            if refusal is None or isinstance(refusal, NoRoute):
                refusal = error
    raise refusal or NoRoute(
        f"This node serves no {what}.", fix="Use another node, or load a shard here."
    )


class LinkSessions:
    """The sessions of one link; a `mesh.wire.link.LinkHandler`."""

    def __init__(self, link: Link, service: ShardService) -> None:
        self._link = link
        self._service = service
        self._sessions: dict[int, tuple[ShardServer, Session]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._parts = EditParts(service.accounts, of_peer(self.peer))
        self._tokens: dict[int, str] = {}
        self._taps = LinkTaps(service, self._send, self.peer)

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
        for task in self._tasks:
            task.cancel()
        for server, session in self._sessions.values():
            server.close(session)
        self._sessions.clear()
        self._parts.clear()
        self._taps.closed()
        self._service.gone(self)

    @property
    def peer(self) -> NodeId:
        """Who is at the other end."""
        return NodeId(self._link.peer.node_id)

    def rows(self) -> list[dict[str, Any]]:
        """See `ShardService.sessions`."""
        peer = self._link.peer
        return [
            {
                "node_id": peer.node_id,
                "node": peer.node_name,
                "purpose": "taps" if self._taps.has(number) else "tensors",
                "token_id": token,
            }
            for number, token in self._tokens.items()
            if number in self._sessions or self._taps.has(number)
        ]

    def end_revoked(self, permits: Permits) -> None:
        """End the sessions whose tokens no longer hold."""
        for number, token_id in list(self._tokens.items()):
            try:
                permits.check(token_id)
            except MeshError as error:
                self._close(number)
                self._send(Failure(error.to_dict(), number))

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
            case OpenPart():
                self._parts.add(message)
            case Open() | OpenTaps():
                self._open_permitted(message)
            case Close():
                self._close(message.session)
            case Park():
                server, session = self._find(message.session)
                server.park(session)
            case Seal():
                server, session = self._find(message.session)
                self._later(self._seal(server, session), "shard-seal")
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

    def _open_permitted(self, request: Open | OpenTaps) -> None:
        """The token comes first: without it nothing of what was sent is looked at."""
        permits = self._service.permits
        token = permits.take(self.peer, request) if permits else None
        if isinstance(request, Open):
            self._open(request)
        else:
            self._taps.open(request)
        if token is not None:
            if len(self._tokens) >= _MAX_SESSIONS_PER_LINK:
                self._forget_closed()
            self._tokens[request.session] = token

    def _close(self, number: int) -> None:
        self._parts.take(number)
        self._tokens.pop(number, None)
        self._taps.close(number)
        known = self._sessions.pop(number, None)
        if known is not None:
            known[0].close(known[1])

    def _open(self, request: Open) -> None:
        edits = assemble(request.edits, self._parts.take(request.session))
        known = self._sessions.get(request.session)
        if known is not None and not known[1].closed:
            raise BadRequest(
                f"Session {request.session} is open already.",
                fix="Pick a number that is not in use on this link.",
                param="session",
            )
        if len(self._sessions) >= _MAX_SESSIONS_PER_LINK:
            self._forget_closed()
        server, session = self._service.admit(request, edits, self.peer)
        self._sessions[request.session] = (server, session)
        session.on_end = partial(self._ended, session)
        if session.place is not None:
            self._send(Opened(session.number, session.max_tokens))
            return
        if not server.load_now().loaded:
            self._send(Loading(session.number))
        self._later(self._finish_open(server, session), "shard-open")

    def _later(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _seal(self, server: ShardServer, session: Session) -> None:
        try:
            files = await foreseen(server.seal(session), "sealing a harvest")
        except MeshError as error:
            self._send(Failure(error.to_dict(), session.number))
            return
        self._send(Sealed(session.number, files))

    async def _finish_open(self, server: ShardServer, session: Session) -> None:
        try:
            await foreseen(server.opened(session), "opening a session")
        except MeshError as error:
            if self._sessions.get(session.number) == (server, session):
                del self._sessions[session.number]
                self._send(Failure(error.to_dict(), session.number))
            return
        self._send(Opened(session.number, session.max_tokens))

    def _ended(self, session: Session, error: MeshError) -> None:
        """The shard has ended the session: its asker is told before it next asks."""
        known = self._sessions.get(session.number)
        if known is not None and known[1] is session:
            self._close(session.number)
            self._send(Failure(error.to_dict(), session.number))

    def _find(self, number: int) -> tuple[ShardServer, Session]:
        known = self._sessions.get(number)
        if known is None or known[1].closed:
            raise gone()
        return known

    def _forget_closed(self) -> None:
        self._sessions = {n: known for n, known in self._sessions.items() if not known[1].closed}
        self._tokens = {
            n: token
            for n, token in self._tokens.items()
            if n in self._sessions or self._taps.has(n)
        }

    def _send(self, message: Result | Failure | Loading | Opened | Sealed) -> None:
        if self._link.is_closed:
            return
        try:
            self._link.send(message)
        except MeshError as error:
            # A peer that asks and does not read is not served any further.
            logger.warning("peer=%s cut: %s", self._link.peer.node_name, error)
            self._link.close("You do not read what you asked for.")
