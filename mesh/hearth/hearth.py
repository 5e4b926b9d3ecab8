"""One hearth as this node knows it: the log, the roster it comes to, the contexts for TLS.

Follows the log: whenever the members change, new handshakes follow at once and `on_roster` is told.
Signs nothing before it has heard from another member, or waited for one in vain: a log that was
restored from a backup does not know what this node has signed since.
Knows nothing of links; what the gossip says goes out and comes in through `start_gossip` and
`receive`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from mesh.accounts.ledger import ResourceLedger
from mesh.clock import Clock, set_within
from mesh.errors import BadFrame, InternalError, LogForked, MeshError
from mesh.events import messages
from mesh.events.gossip import LogGossip, Send
from mesh.events.log import EventLog, LogChange
from mesh.events.state import Fact
from mesh.events.types import NODE_NAMED
from mesh.hearth import founding
from mesh.hearth.founding import OnReport, open_log
from mesh.hearth.record import HearthRecord
from mesh.hearth.revocations import Revocations
from mesh.identity import decisions
from mesh.identity.decisions import Acknowledged, Decision, Readmitted, Revoked
from mesh.identity.keys import NodeKey
from mesh.identity.naming import is_name
from mesh.identity.roster import Cut, Member, Roster, TrustLevel
from mesh.identity.tls import TlsContexts, TlsMaterial
from mesh.processes.tasks import end, spawn
from mesh.types import NodeId

logger = logging.getLogger(__name__)

_LEFT = "it left"


@dataclass(frozen=True, slots=True)
class Waits:
    """How long a member waits for others."""

    alone_s: float = 30.0
    """A node that has just started, to hear from another member before it signs."""
    acknowledge_s: float = 5.0
    """An anchor, for what others decide, before it says that it has seen it."""
    retry_s: float = 1.0
    """Where links could not follow the members, before that is tried again."""


class Hearth:
    """Use `open`, then `close`. `on_roster` gets the roster before and after each change, and
    is called as well when tokens were revoked."""

    def __init__(
        self, key: NodeKey, record: HearthRecord, log: EventLog, waits: Waits | None = None
    ) -> None:
        self.key = key
        self.on_roster: list[Callable[[Roster, Roster], None]] = []
        self._record = record
        self._log = log
        self._waits = waits or Waits()
        self._gossip: LogGossip | None = None
        self._tls: TlsContexts | None = None
        self._roster = Roster(record.hearth_id, record.name)
        self._revocations = Revocations(log.state)
        self._revoked: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._applying = asyncio.Lock()
        self._is_behind = False
        """Links do not let in all members yet."""
        self._heard = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def open(
        cls,
        key: NodeKey,
        record: HearthRecord,
        logs: Path,
        clock: Clock,
        on_report: OnReport,
        accounts: ResourceLedger | None = None,
        waits: Waits | None = None,
    ) -> Self:
        """Open the hearth's log below the directory `logs`. Raises what `EventLog.open` raises."""
        log = await open_log(key, record.hearth_id, logs, clock, on_report, accounts)
        hearth = cls(key, record, log, waits)
        hearth._roster, hearth._revoked = hearth._read_roster(), hearth.revoked_tokens()
        material = TlsMaterial.of(key, hearth._roster.certificates)
        hearth._tls = await asyncio.to_thread(TlsContexts, material)
        log.on_change.append(hearth._note)
        hearth._tasks = [
            spawn(hearth._follow(), "follow members"),
            spawn(hearth._wait_alone(), "wait for a member"),
            spawn(hearth._acknowledge(), "acknowledge decisions"),
        ]
        return hearth

    @property
    def id(self) -> str:
        """The hearth's id."""
        return self._record.hearth_id

    @property
    def log(self) -> EventLog:
        """The log, for reading only."""
        return self._log

    @property
    def roster(self) -> Roster:
        """The present members and their levels."""
        return self._roster

    @property
    def tls(self) -> TlsContexts:
        """The TLS contexts that let in exactly the present members."""
        if self._tls is None:
            raise RuntimeError("the hearth is not open")
        return self._tls

    @property
    def accounts(self) -> ResourceLedger:
        """The ledger that peers' events and links are counted on."""
        return self._log.chains.accounts

    def may_serve(self, node: NodeId) -> bool:
        """Whether a node may serve and use shards: its level is trusted or higher."""
        return self._roster.at_least(node, TrustLevel.TRUSTED)

    def sign(self, data: bytes) -> bytes:
        """The signature (64 bytes) of `data` by this node's key."""
        return self.key.sign(data)

    def verify(self, node: NodeId, data: bytes, signature: bytes) -> bool:
        """Whether `signature` is a member's own over `data`; False for who is no member."""
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

    def end_of_facts(self, node: NodeId) -> Cut:
        """Where the node's chain of facts ends here."""
        return Cut(*self._log.chains.heads().get(node, (0, 0, b"")))

    async def heard(self) -> None:
        """Wait until another member was heard from, or `Waits.alone_s` after the start."""
        await self._heard.wait()

    async def decide(self, decision: Decision) -> None:
        """Sign a decision about members; when this returns it holds here and is on the disk.

        Raises what `EventLog.decide` raises, UntrustedPeer when this node is no anchor, and
        LogForked when it was one until it signed two histories.
        """
        self._require_one_history()
        self._roster.require(self.key.node_id, TrustLevel.ANCHOR)
        await self.heard()
        kind, payload = decisions.encode(decision)
        await self._log.decide(
            kind, lambda parents, wall_ms: payload,
            # Who is readmitted keeps all that it signed: nobody meant any harm.
            after_everything=isinstance(decision, Readmitted),
        )  # fmt: skip
        await self._apply()

    async def leave(self) -> None:
        """Sign that this node goes, which any member may once, without anybody's vote.

        Raises what `EventLog.decide` raises, LogForked, and InternalError when it is in all the
        same.
        """
        self._require_one_history()
        await self.heard()
        own = self.key.node_id
        kind, payload = decisions.encode(Revoked(own, self.end_of_facts(own), _LEFT))
        await self._log.decide(kind, lambda parents, wall_ms: payload)
        await self._apply()
        if own in self._roster.members:
            raise InternalError(
                "This node has signed that it leaves, and is still a member.",
                fix="See `hearthnet members`, and have an anchor put it out.",
            )

    async def recover(self, code: str, name: str) -> None:
        """Make this node the only anchor by the hearth's recovery `code`."""
        await self.heard()
        await founding.recover(self._log, self.key, self.id, name, code)
        await self._apply()

    async def publish(self, event_type: str, payload: dict[str, Any]) -> None:
        """Sign a fact that is not about members. Raises what `EventLog.append` raises."""
        await self.heard()
        if self._gossip is not None and self.key.node_id in self._log.state.frozen:
            await self._gossip.recall()
        await self._log.append(event_type, payload)

    def revoked_tokens(self) -> frozenset[str]:
        """Ids of tokens that no shard honours any more."""
        return self._revocations.tokens

    def own_facts(self, event_type: str) -> dict[str, Fact]:
        """What this node itself last said about each subject of that type."""
        fold = self._log.state.authors.get(self.key.node_id)
        facts = fold.facts if fold is not None else {}
        return {name: fact for (kind, name), fact in facts.items() if kind == event_type}

    def start_gossip(self, send: Send, rng: random.Random | None = None) -> None:
        """Begin to keep the log in step with linked peers; `rng` spreads when they are asked."""
        self._gossip = LogGossip(self._log, send, rng=rng, on_exchange=self._heard.set)
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
        await end(self._tasks)
        await self._log.close()

    def _require_one_history(self) -> None:
        if self.key.node_id in self._roster.forked:
            raise LogForked(
                "This node has signed two different histories: its log was restored from a backup,"
                " or its key was copied.",
                fix="If it was restored, have another anchor run `hearthnet members readmit`; with"
                " no other anchor left, run `hearthnet members recover` with the recovery code.",
            )

    # Following.

    def _note(self, change: LogChange) -> None:
        self._revocations.note(change)
        self._changed.set()

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._apply()

    async def _wait_alone(self) -> None:
        if self._roster.members.keys() - {self.key.node_id}:
            await set_within(self._heard, self._waits.alone_s)
        self._heard.set()

    async def _acknowledge(self) -> None:
        """As an anchor, say what one has seen: then nobody can make up another past later."""
        own = self.key.node_id
        await self._heard.wait()
        while True:
            await asyncio.sleep(self._waits.acknowledge_s)
            news = self._log.docket.unheard(own)
            is_anchor = self._roster.at_least(own, TrustLevel.ANCHOR)
            if not is_anchor or all(said.type == decisions.ACKNOWLEDGED for said in news):
                continue
            try:
                await self.decide(Acknowledged())
            except MeshError as error:  # a full disk, or put out meanwhile: looked at again later
                logger.info("not acknowledged: %s", error)

    async def _apply(self) -> None:
        async with self._applying:
            before, after = self._roster, self._read_roster()
            revoked = self.revoked_tokens()
            is_news = before != after or revoked is not self._revoked
            self._roster, self._revoked = after, revoked
            if before.certificates != after.certificates or self._is_behind:
                is_news |= await self._let_in(after)
            for listener in self.on_roster if is_news else ():
                listener(before, after)

    async def _let_in(self, roster: Roster) -> bool:
        """Have links let in exactly these members; False where that is to be tried again. Whoever
        is out is not let in all the same."""
        try:
            await asyncio.to_thread(self.tls.update, roster.certificates)
        except OSError:  # no descriptors, no memory: whoever is cut off frees some
            self._is_behind = True
            logger.exception("members not followed; again in %g s", self._waits.retry_s)
            asyncio.get_running_loop().call_later(self._waits.retry_s, self._changed.set)
            return False
        self._is_behind = False
        return True

    def _read_roster(self) -> Roster:
        roster = self._log.state.membership
        assert isinstance(roster, Roster)  # noqa: S101 - our own rules made it
        own = self.key.node_id
        members = {node: self._named(member) for node, member in roster.members.items()}
        former = {node: self._named(member) for node, member in roster.former.items()}
        roster = replace(roster, members=members, former=former)
        if own in members or own in roster.cuts:
            return roster
        told = {m.node_id: m for m in self._record.members if m.node_id not in roster.cuts}
        return replace(roster, name=roster.name or self._record.name, members={**told, **members})

    def _named(self, member: Member) -> Member:
        """By what it calls itself, which decides nothing."""
        state, node = self._log.state, member.node_id
        if node in state.stale:  # what it said is just being read again
            return member.called(self._roster.members.get(node, member).name)
        fold = state.authors.get(node)
        fact = fold.facts.get((NODE_NAMED, node)) if fold is not None else None
        name = fact.payload.get("name") if fact is not None else None
        return member.called(name) if is_name(name) else member
