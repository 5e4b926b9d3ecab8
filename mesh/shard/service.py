"""The shards of one process: who they are, who may ask them, and which one takes a session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from mesh.accounts import allowances
from mesh.accounts.ledger import ResourceLedger, of_peer
from mesh.clock import SystemClock
from mesh.errors import BadRequest, DiskFull, MeshError, NoRoute
from mesh.models.harvest import HarvestBatch
from mesh.shard.link import LinkSessions
from mesh.shard.permits import Permits
from mesh.shard.recording import HarvestShelf, Recording
from mesh.shard.server import ShardServer
from mesh.shard.session import Session
from mesh.shard.taps.server import TapServer
from mesh.types import Edit, NodeId, ShardId
from mesh.wire.link import Link
from mesh.wire.messages import Drain, Open, OpenTaps

S = TypeVar("S")


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

    def remove(self, shard_id: ShardId, *, end_jobs: bool = True) -> ShardServer:
        """Serve it no longer; its sessions go on until closed, those of jobs unless `end_jobs`.

        Raises BadRequest if unknown.
        """
        server = self._servers.pop(shard_id, None)
        if server is None:
            raise BadRequest(f"{shard_id} is not loaded here.", fix="Look at `hearthnet status`.")
        taps = self._taps.pop(shard_id, None)
        if taps is not None and end_jobs:
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

    def tell_users(self, server: ShardServer, notice: Drain) -> list[LinkSessions]:
        """The links with a session of this shard, after they were told."""
        users = [sessions for sessions in self._links if sessions.uses(server)]
        for sessions in users:
            sessions.notify(notice)
        return users

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

    def admit(self, request: Open | OpenTaps, edits: Sequence[Edit], peer: NodeId) -> Session:
        """Open on the first shard that can; raises the error of the best match otherwise."""
        meant = self._meant(request)
        if isinstance(request, OpenTaps):
            taps = [self._taps[name] for name in meant if name in self._taps]
            return _first(taps, lambda each: each.admit(request, of_peer(peer)))
        return _first(
            [self._servers[name] for name in meant],
            lambda each: each.admit(request, of_peer(peer), edits, self._recording(request, peer)),
        )

    def _meant(self, request: Open | OpenTaps) -> list[ShardId]:
        """The shards that a session may be on. An asker names layers only: it means the shard of
        just these, else the smallest that has them; one in another number format would answer
        otherwise than it was chosen for."""
        here = sorted((each.descriptor for each in self.servers), key=lambda each: len(each.layers))
        model, start, stop = request.model_id, request.start, request.stop
        formats = [
            each.dtype
            for each in here
            if each.model_id == model and each.layers.start <= start < stop <= each.layers.stop
        ]
        return [each.shard_id for each in here if each.dtype in (formats[:1] or [each.dtype])]

    def _recording(self, request: Open, peer: NodeId) -> Recording | None:
        if not request.harvest:
            return None
        batch = HarvestBatch.from_fields(request.harvest)
        if self.shelf is None:
            raise DiskFull("This process writes no harvests.", fix="Use another node.")
        return self.shelf.recording(batch, peer)


def _first(servers: Iterable[S], admit: Callable[[S], Session]) -> Session:
    """What the first server admits; raises the refusal of the best match otherwise."""
    refusal: MeshError | None = None
    for server in servers:
        try:
            return admit(server)
        except MeshError as error:
            # That another shard lacks the layers says less than why this one refused.
            if refusal is None or isinstance(refusal, NoRoute):
                refusal = error
    raise refusal or NoRoute(
        "This node serves no shard.", fix="Use another node, or load a shard here."
    )
