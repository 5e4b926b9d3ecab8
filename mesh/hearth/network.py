"""This node among its peers: the hearth it is in, the links to the others, and moving into another.

Owns `Hearth`, `Peering` and `Inviting` and takes them down and up together, because a node is in
one hearth and every link belongs to it. With distributed inference switched off there is none of
them: nothing listens, nothing is announced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from mesh.accounts.ledger import ResourceLedger
from mesh.clock import Clock, set_within
from mesh.discovery import interfaces
from mesh.discovery.calling_back import CallBacks
from mesh.discovery.directory import NodeInfo, Offering, ShardStore
from mesh.discovery.events import PeerDown, PeerEvent, PeerSeen, PeerUp
from mesh.discovery.links import ControlLink, Said
from mesh.discovery.mdns import Mdns
from mesh.discovery.peering import Peering
from mesh.discovery.sightings import PeerState, PeerView
from mesh.errors import Busy, ExperimentalDisabled, LinkLost, NodeStopped
from mesh.events import messages
from mesh.events.intake import Report
from mesh.hearth.epoch import next_epoch
from mesh.hearth.founding import Founding, found
from mesh.hearth.hearth import Hearth
from mesh.hearth.inviting import Inviting, OpenWindow, WindowOutcome
from mesh.hearth.joining import JoiningNode, company, join_hearth, take_up
from mesh.hearth.let_in import WhetherLetIn
from mesh.hearth.network_settings import NetworkHooks, NetworkSettings
from mesh.hearth.news import PUT_OUT, Departure, forked, not_in, not_let_in, notices, warned
from mesh.hearth.presence import Away, Presence
from mesh.hearth.publishing import Publisher
from mesh.hearth.record import HearthRecord, read_record, write_record
from mesh.identity.invitations import WindowEnding, parse_ticket
from mesh.identity.keys import NodeKey
from mesh.identity.pairing import JoinRequest
from mesh.identity.roster import Roster, TrustLevel
from mesh.identity.tls import TlsMaterial
from mesh.paths import StatePaths
from mesh.processes.tasks import end, spawn
from mesh.types import NodeId
from mesh.wire.call_back import CallBack, CalledBack
from mesh.wire.messages import FileAsk, FilePart, Gossip

logger = logging.getLogger(__name__)

TOLD_S = 10.0
"""The longest that a node that leaves waits for the others to hear of it."""


@dataclass(frozen=True, slots=True)
class _Here:
    """What there is as long as this node is in a hearth."""

    hearth: Hearth
    peering: Peering
    inviting: Inviting
    publisher: Publisher


class Network:
    """`start`, then `stop`; in between perhaps `join`."""

    def __init__(
        self,
        key: NodeKey,
        paths: StatePaths,
        settings: NetworkSettings,
        store: ShardStore,
        clock: Clock,
        hooks: NetworkHooks,
        accounts: ResourceLedger,
    ) -> None:
        self.on_file: Callable[[NodeId, FileAsk | FilePart], None] = lambda peer, message: None
        self._key = key
        self._paths = paths
        self._settings = settings
        self._store = store
        self._clock = clock
        self._hooks = hooks
        self._accounts = accounts
        self._presence = Presence(clock)
        self._here: _Here | None = None
        self._alone: asyncio.Task[None] | None = None
        self._due = asyncio.Event()
        self._moving = asyncio.Lock()
        self._is_leaving = False
        self._let_in = WhetherLetIn(self.peers, self._not_let_in)
        self._background: set[asyncio.Task[None]] = set()
        self.callbacks = CallBacks(self.link, clock)

    async def start(self) -> None:
        """Open the hearth, founding one when there is none, and link. Raises PortInUse and kin.

        Of a hearth founded here nobody gets to see the recovery code: whoever starts nodes for
        people founds it before.
        """
        if not self._settings.is_enabled:
            logger.info("distributed inference is switched off: nothing is announced")
            self._alone = spawn(self._list_own(), "list own shards")
            return
        record = await asyncio.to_thread(read_record, self._paths.hearth)
        if record is None:
            record = (await self._found()).record
        await self._open(record)

    async def stop(self) -> None:
        """Say goodbye to everybody and close the log."""
        here, self._here = self._here, None
        await end([self._alone])
        self._let_in.close()
        await self.callbacks.close()
        if here is not None:
            await here.inviting.close()
            await here.publisher.stop()
            await here.peering.stop()
            await asyncio.gather(*self._background, return_exceptions=True)
            await here.hearth.close()

    # Asked by the rest of the node.

    @property
    def hearth(self) -> Hearth | None:
        """The hearth that this node is in; None between two, and without distributed inference."""
        return self._here.hearth if self._here is not None else None

    @property
    def name(self) -> str:
        """What people call this node."""
        return self._settings.peering.name

    @property
    def port(self) -> int:
        """Where the node-to-node port listens; 0 while it does not."""
        return self._here.peering.port if self._here is not None else 0

    @property
    def host(self) -> str:
        """The first of the addresses at which others reach this machine now."""
        return self._settings.peering.addresses[0]

    @property
    def address(self) -> str | None:
        """``HOST:PORT`` for other nodes."""
        return self._here.peering.address if self._here is not None else None

    def peers(self) -> list[PeerView]:
        """Every peer that is linked, dialled or was seen; none while this node is in no hearth."""
        return self._here.peering.peers() if self._here is not None else []

    def away(self) -> list[Away]:
        """The other members of the hearth that are no row of `peers`."""
        hearth = self.hearth
        seen = {self._key.node_id, *(row.node_id for row in self.peers() if row.node_id)}
        return self._presence.away(hearth.roster, seen) if hearth is not None else []

    def link(self, peer: NodeId) -> ControlLink | None:
        """The control link to a peer; None while there is none."""
        return self._here.peering.links.get(peer) if self._here is not None else None

    def send(self, peer: NodeId, message: Said) -> None:
        """Queue a message for a linked peer. Raises LinkLost when there is no link to it."""
        if self._here is None:
            raise LinkLost("This node is linked to nobody.", fix="Wait until it is.")
        self._here.peering.send(peer, message)

    def silences(self) -> list[tuple[NodeId, float]]:
        """For each linked peer, the seconds since anything came from it."""
        return self._here.peering.silences() if self._here is not None else []

    def advertise(self) -> None:
        """What this node serves has changed."""
        self._due.set()
        if self._here is not None:
            self._here.peering.advertise()
            self._here.publisher.look()

    def may_serve(self, node: NodeId) -> bool:
        """Whether the node's shards may be used here: its own always, else trusted by trusted."""
        own, hearth = self._key.node_id, self.hearth
        if node == own:
            return True
        return hearth is not None and hearth.may_serve(own) and hearth.may_serve(node)

    def users(self) -> tuple[bytes, ...]:
        """Certificates (DER) of the members that may use shards."""
        return self._here.hearth.users() if self._here is not None else ()

    def revoked_tokens(self) -> frozenset[str]:
        """Ids of the session tokens that the hearth revoked."""
        return self._here.hearth.revoked_tokens() if self._here is not None else frozenset()

    async def tls_material(self) -> TlsMaterial:
        """For this node's own processes. Holds the private key."""
        return await asyncio.to_thread(TlsMaterial.of, self._key, self.users())

    # Inviting and joining.

    def require_hearth(self) -> Hearth:
        """The hearth. Raises ExperimentalDisabled when distributed inference is switched off, Busy
        between two hearths, and NodeStopped behind the last."""
        return self._require_here().hearth

    def _require_here(self) -> _Here:
        if self._here is None and self._moving.locked():
            raise Busy(
                "This node is just joining or leaving a hearth.", fix="Try again in a moment."
            )
        if self._here is None and self._settings.is_enabled:
            raise NodeStopped(
                "This node is being stopped.", fix="Ask again when it is up, or ask another node."
            )
        if self._here is None:
            raise ExperimentalDisabled(
                "distributed inference is switched off, so this node is in no hearth.",
                fix="Set research.distributed_inference.enabled, or leave it unset.",
            )
        return self._here

    async def invite(self, level: TrustLevel, ttl_s: float) -> OpenWindow:
        """Open a pairing window. Raises what `Inviting.open` raises."""
        inviting, peering = self._require_here().inviting, self._settings.peering
        return await inviting.open(level, ttl_s, peering.answers_at or peering.host, self.host)

    async def invitation(self, port: int, timeout_s: float) -> WindowOutcome | None:
        """How the pairing window at `port` ended; None while it is open, after `timeout_s`."""
        return await self._require_here().inviting.outcome(port, timeout_s)

    async def close_invitation(self) -> None:
        """Shut the open window, if there is one."""
        if self._here is not None:
            await self._here.inviting.close()

    async def join(self, code: str, peer: str | None) -> HearthRecord:
        """Leave a hearth in which this node is alone for the one it is invited to; or, among
        others, take up their invitation to another level."""
        self._require_here().inviting.require_another(parse_ticket(code))
        async with self._moving:
            joiner = JoiningNode(self._key, self.name, self._paths, self._clock)
            choices = await asyncio.to_thread(interfaces.choose, list(self._settings.interfaces))
            home = company(self.require_hearth())
            if home is not None:
                return await take_up(joiner, code, peer, choices[0], home)
            # The log of the hearth that is left must be closed while it is looked at again.
            async with self._closed():
                return await join_hearth(joiner, code, peer, choices[0])

    async def leave(self) -> Departure:
        """Go out of the hearth, into a new one of this node's own, once the others have heard of it
        or `TOLD_S` have passed. Raises what `Hearth.leave` raises."""
        async with self._moving:
            hearth, before = self.require_hearth(), self._linked()
            self._is_leaving = True
            try:
                if hearth.roster.is_member(hearth.key.node_id):
                    await hearth.leave()
                await self._until_told(before)
                told = before - self._linked()
                async with self._closed():
                    return Departure(told, await self._found())
            finally:
                self._is_leaving = False

    # Private

    @contextlib.asynccontextmanager
    async def _closed(self) -> AsyncIterator[None]:
        """Out of any hearth meanwhile, then in the one that the record names, at the same port."""
        peering = replace(self._settings.peering, port=self.port)
        await self.stop()
        try:
            yield
        finally:
            self._settings = replace(self._settings, peering=peering)
            await self.start()
            self._hooks.on_members()

    def _linked(self) -> frozenset[NodeId]:
        return frozenset(p.node_id for p in self.peers() if p.state is PeerState.UP and p.node_id)

    async def _until_told(self, others: frozenset[NodeId]) -> None:
        """Until these have cut their links, as they do once they know, or for `TOLD_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TOLD_S):
                while others & self._linked():  # noqa: ASYNC110 - of several links
                    await asyncio.sleep(0.05)

    async def _found(self) -> Founding:
        new = await found(self._key, self.name, self._paths.events_dir, self._clock, self._reported)
        await asyncio.to_thread(write_record, self._paths.hearth, new.record)
        logger.info("founded the hearth %r; distributed inference is on", new.record.name)
        return new

    async def _open(self, record: HearthRecord) -> None:
        if record.node_name != self.name:  # it stays that where no setting says another
            record = replace(record, node_name=self.name)
            await asyncio.to_thread(write_record, self._paths.hearth, record)
        epoch = await asyncio.to_thread(next_epoch, self._paths.epoch, self._clock)
        hearth = await Hearth.open(
            self._key, record, self._paths.events_dir, self._clock, self._reported, self._accounts
        )
        hearth.on_roster.append(self._members_changed)
        choices = list(self._settings.interfaces)
        mdns = Mdns(lambda: interfaces.present(choices))
        peering = Peering(
            replace(self._settings.peering, hearth=record.hearth_id, epoch=epoch),
            self._store,
            self._offering,
            self._on_event,
            trust=hearth,
            on_message=self._heard,
            mdns=mdns,
        )
        inviting = Inviting(hearth, self._clock, mdns.announce_window, self._invited)
        publisher = Publisher(hearth, self._hooks.serving, self.name)
        self._here = _Here(hearth, peering, inviting, publisher)
        hearth.start_gossip(
            lambda peer, message: peering.send(peer, Gossip(messages.to_dict(message)))
        )
        if self._key.node_id not in hearth.roster.members:
            is_out = self._key.node_id in hearth.roster.cuts
            self._hooks.on_event(PUT_OUT if is_out else not_in(hearth.roster.name))
        await peering.start()
        publisher.start()

    async def _list_own(self) -> None:
        """Keep the directory of what is served here; with peers that is `Peering`'s to do."""
        settings = self._settings.peering
        own = NodeInfo(settings.node_id, settings.name, "", settings.software)
        while True:
            self._due.clear()
            self._store.update(own, replace(self._offering(), weights=()))
            await set_within(self._due, settings.shard_health_timeout_s / 3)

    def _offering(self) -> Offering:
        return self._hooks.serving().offers

    def _heard(self, peer: NodeId, message: Said) -> None:
        if isinstance(message, CallBack | CalledBack):
            self.callbacks.receive(peer, message)
        elif isinstance(message, FileAsk | FilePart):
            self.on_file(peer, message)
        elif (hearth := self.hearth) is not None:
            hearth.receive(peer, message.body)

    def _on_event(self, event: PeerEvent) -> None:
        hearth = self.hearth
        if hearth is not None and isinstance(event, PeerUp):
            hearth.peer_up(event.node_id)
            # The end of an earlier link may be on its way through a task: then this is the one.
            asyncio.get_running_loop().call_soon(self._still_up, event.node_id)
        if hearth is not None and isinstance(event, PeerDown):
            self._presence.parted(event.node_id)
            task = spawn(hearth.peer_down(event.node_id), "gossip ends")
            self._background.add(task)
            task.add_done_callback(self._background.discard)
        self._hooks.on_event(event)
        if hearth is not None and isinstance(event, PeerSeen | PeerDown):
            self._let_in.look()

    def _not_let_in(self, refusing: Sequence[str]) -> None:
        hearth = self.hearth
        if hearth is not None and hearth.roster.is_member(self._key.node_id):
            self._hooks.on_event(not_let_in(hearth.roster.name, refusing))

    def _still_up(self, node: NodeId) -> None:
        if (hearth := self.hearth) is not None:
            hearth.peer_up(node)

    def _members_changed(self, before: Roster, after: Roster) -> None:
        for kind, fields in notices(before, after):
            self._hooks.on_notice(kind, fields)
        own = self._key.node_id
        if own in after.cuts and own not in before.cuts and not self._is_leaving:
            self._hooks.on_event(PUT_OUT)
        for node in after.forked - before.forked:
            self._hooks.on_event(forked(after, node, is_own=node == own))
        if self._here is not None:
            self._here.peering.follow_members()
            self._here.publisher.look()
        self._hooks.on_members()

    def _invited(self, ending: WindowEnding, joined: JoinRequest | None) -> None:
        fields: dict[str, object] = {"ending": ending.value}
        if joined is not None:
            fields |= {"node_id": joined.node_id, "name": joined.name}
        self._hooks.on_notice("invitation_ended", fields)

    def _reported(self, report: Report) -> None:
        self._hooks.on_event(warned(report, self.hearth.roster if self.hearth else None))
