"""One hearth as this node knows it: the log, the roster it folds to, the contexts for TLS.

Follows the log: whenever the members change, new handshakes follow at once and `on_roster` is told.
Knows nothing of links; what the gossip says goes out and comes in through `start_gossip` and
`receive`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from mesh.clock import Clock
from mesh.errors import BadFrame
from mesh.events import messages
from mesh.events.gossip import Gossip, Send
from mesh.events.intake import Report
from mesh.events.log import Change, EventLog, LogSettings
from mesh.events.state import Fact
from mesh.hearth.record import HearthRecord
from mesh.identity import decisions, membership
from mesh.identity.certificates import make_certificate
from mesh.identity.decisions import Decision, Founded
from mesh.identity.keys import NodeKey
from mesh.identity.roster import Roster, TrustLevel, freeze
from mesh.identity.tls import TlsContexts, TlsMaterial
from mesh.ledger import ResourceLedger
from mesh.types import NodeId

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 5.0
_MAX_REVOKED_TOKENS = 1024

OnReport = Callable[[Report], None]


class Hearth:
    """Use `open`, then `close`. `on_roster` gets the roster before and after each change, and
    is called as well when tokens were revoked."""

    def __init__(self, key: NodeKey, record: HearthRecord, log: EventLog) -> None:
        self.key = key
        self.on_roster: list[Callable[[Roster, Roster], None]] = []
        self._record = record
        self._log = log
        self._gossip: Gossip | None = None
        self._tls: TlsContexts | None = None
        self._roster = Roster(record.hearth_id, record.name)
        self._revoked: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._applying = asyncio.Lock()
        self._follower: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        key: NodeKey,
        record: HearthRecord,
        logs: Path,
        clock: Clock,
        on_report: OnReport,
        accounts: ResourceLedger | None = None,
    ) -> Self:
        """Open the hearth's log below the directory `logs`. Raises what `EventLog.open` raises."""
        log = await open_log(key, record.hearth_id, logs, clock, on_report, accounts)
        hearth = cls(key, record, log)
        hearth._roster, hearth._revoked = hearth._read_roster(), hearth.revoked_tokens()
        material = TlsMaterial.of(key, hearth._roster.certificates)
        hearth._tls = await asyncio.to_thread(TlsContexts, material)
        log.on_change.append(hearth._note)
        hearth._follower = asyncio.create_task(hearth._follow(), name="follow members")
        return hearth

    @property
    def id(self) -> str:
        """The hearth's id."""
        return self._record.hearth_id

    @property
    def roster(self) -> Roster:
        """Who is in."""
        return self._roster

    @property
    def tls(self) -> TlsContexts:
        """See `mesh.discovery.trust.Trust`."""
        if self._tls is None:
            raise RuntimeError("the hearth is not open")
        return self._tls

    @property
    def accounts(self) -> ResourceLedger:
        """See `mesh.discovery.trust.Trust`."""
        return self._log.ledger.accounts

    def may_serve(self, node: NodeId) -> bool:
        """See `mesh.discovery.trust.Trust`: serving takes the level trusted."""
        return self._roster.at_least(node, TrustLevel.TRUSTED)

    def sign(self, data: bytes) -> bytes:
        """See `mesh.discovery.trust.Trust`."""
        return self.key.sign(data)

    def verify(self, node: NodeId, data: bytes, signature: bytes) -> bool:
        """See `mesh.discovery.trust.Trust`."""
        member = self._roster.members.get(node)
        if member is None:
            return False
        try:
            Ed25519PublicKey.from_public_bytes(member.public_key).verify(signature, data)
        except InvalidSignature:
            return False
        return True

    def users(self) -> tuple[bytes, ...]:
        """The certificates of those who may use each other's shards; none if this node may not."""
        if not self.may_serve(self.key.node_id):
            return ()
        return tuple(
            member.certificate
            for member in self._roster.members.values()
            if member.level >= TrustLevel.TRUSTED
        )

    def head(self, node: NodeId) -> tuple[int, bytes]:
        """Number and hash of the node's last event that is here; (0, b"") without any."""
        return self._log.ledger.heads().get(node, (0, b""))

    async def decide(self, decision: Decision) -> None:
        """Sign a decision about members; when this returns it holds here and is on the disk.

        Raises what `EventLog.append` raises, and UntrustedPeer when this node is no anchor.
        """
        self._roster.require(self.key.node_id, TrustLevel.ANCHOR)
        await self._log.append(*decisions.encode(decision))
        await self._apply()

    async def publish(self, event_type: str, payload: dict[str, Any]) -> None:
        """Sign a fact that is not about members. Raises what `EventLog.append` raises."""
        await self._log.append(event_type, payload)

    def models(self) -> dict[str, Fact]:
        """The newest publication of each model, by model id."""
        return self._log.state.models()

    def steering(self) -> dict[str, Fact]:
        """The newest steering edit of each name."""
        return self._log.state.steering()

    def revoked_tokens(self) -> frozenset[str]:
        """Ids of tokens that no shard honours any more: the newest ones, as they live short."""
        newest = sorted(self._log.state.revoked_tokens().items(), key=lambda row: row[1].order)
        return frozenset(token_id for token_id, _ in newest[-_MAX_REVOKED_TOKENS:])

    def recorded_shards(self) -> dict[tuple[NodeId, str], Fact]:
        """Who began or ceased to serve what, for the record, by node and shard id."""
        return self._log.state.advertised_shards()

    def own_facts(self, event_type: str) -> dict[str, Fact]:
        """What this node itself last said about each subject of that type."""
        fold = self._log.state.authors.get(self.key.node_id)
        facts = fold.facts if fold is not None else {}
        return {name: fact for (kind, name), fact in facts.items() if kind == event_type}

    def forks(self) -> Mapping[NodeId, int]:
        """Nodes proven to have signed two histories, with the last number that counts.

        The two events that prove it are kept in the log and handed on.
        """
        return self._log.state.frozen

    def start_gossip(self, send: Send) -> None:
        """Begin to keep the log in step with linked peers."""
        self._gossip = Gossip(self._log, send)
        self._gossip.start()

    def peer_up(self, peer: NodeId) -> None:
        """A link is up."""
        if self._gossip is not None:
            self._gossip.peer_up(peer)

    async def peer_down(self, peer: NodeId) -> None:
        """A link is gone."""
        if self._gossip is not None:
            await self._gossip.peer_down(peer)

    def receive(self, peer: NodeId, body: dict[str, object]) -> None:
        """A peer said something about the log; nonsense is dropped."""
        if self._gossip is None or self._log.muted(peer):
            return
        try:
            self._gossip.receive(peer, messages.from_dict(body))
        except BadFrame as error:
            self._log.blame(peer)
            logger.info("gossip dropped: peer=%s reason=%s", peer, error)

    async def close(self) -> None:
        """Stop following and close the log."""
        if self._gossip is not None:
            await self._gossip.stop()
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.wait([self._follower], timeout=_STOP_TIMEOUT_S)
        await self._log.close()

    # Following.

    def _note(self, change: Change) -> None:
        self._changed.set()

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._apply()

    async def _apply(self) -> None:
        async with self._applying:
            before, after = self._roster, self._read_roster()
            revoked = self.revoked_tokens()
            if before == after and revoked == self._revoked:
                return
            self._roster, self._revoked = after, revoked
            if before.certificates != after.certificates:
                await asyncio.to_thread(self.tls.update, after.certificates)
            for listener in self.on_roster:
                listener(before, after)

    def _read_roster(self) -> Roster:
        state = self._log.state
        assert isinstance(state.membership, Roster)  # noqa: S101 - our own rules made it
        roster = freeze(state.membership, state.frozen)
        own = self.key.node_id
        if own in roster.members or own in roster.cuts:
            return roster
        told = {m.node_id: m for m in self._record.members if m.node_id not in roster.cuts}
        return replace(
            roster, name=roster.name or self._record.name, members={**told, **roster.members}
        )


async def open_log(
    key: NodeKey,
    hearth_id: str,
    logs: Path,
    clock: Clock,
    on_report: OnReport,
    accounts: ResourceLedger | None = None,
) -> EventLog:
    """The log of one hearth, in a file of its own below `logs`."""
    return await EventLog.open(
        LogSettings(logs / f"{hearth_id}.db", hearth_id, key.node_id),
        rules=membership.HearthRules(hearth_id),
        verify=membership.verify,
        sign=key.sign,
        clock=clock,
        on_report=on_report,
        accounts=accounts,
    )


async def found(
    key: NodeKey, node_name: str, logs: Path, clock: Clock, on_report: OnReport
) -> HearthRecord:
    """Found a hearth with this node as its first anchor; the caller keeps the record.

    A crash before it is kept leaves a log that nobody opens again.
    """
    nonce = secrets.token_bytes(decisions.NONCE_BYTES)
    hearth_id = decisions.hearth_id(key.public_bytes, nonce)
    name = f"{node_name}'s hearth"[: decisions.MAX_NAME]
    founded = Founded(name, nonce, make_certificate(key), node_name)
    log = await open_log(key, hearth_id, logs, clock, on_report)
    try:
        await log.append(*decisions.encode(founded))
    finally:
        await log.close()
    return HearthRecord(hearth_id, name)
