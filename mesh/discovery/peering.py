"""The daemon's links to the other daemons of its hearth: who is there, who went, what they serve.

Serves the node-to-node port, dials whoever was announced or named, keeps one control link per peer,
tells every peer what this node serves and feeds what they say into the `ShardStore`. Every link is
mutual TLS between members, and its hello has to be that of the certificate's node. Knows nothing of
tensors, models or HTTP, nor of what the log's gossip says.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mesh.clock import set_within
from mesh.discovery import neighbours
from mesh.discovery.announced import follow
from mesh.discovery.announcement import Announcement, instance_name, summarise
from mesh.discovery.dialing import Dialer, DialResult, DialSettings, Target, parse_endpoint
from mesh.discovery.directory import Offering, ShardStore
from mesh.discovery.events import PeerDown, PeerEvent, PeerUp, Warned
from mesh.discovery.greeting import PeerHello, from_hello, label, to_hello
from mesh.discovery.interfaces import Reach
from mesh.discovery.links import Admitted, ControlLink, ControlMessage, LinkTable, Said
from mesh.discovery.listing import Listing, info
from mesh.discovery.mdns import Mdns
from mesh.discovery.notices import EXPIRY_FACTOR, Notices, PeerTrust
from mesh.discovery.sightings import PeerState, PeerView, Sightings, why_not
from mesh.errors import (
    BadAdvertisement,
    BadEvent,
    LinkLost,
    MeshError,
    PeerRefused,
    UntrustedPeer,
    VersionMismatch,
)
from mesh.identity.tls import require_node
from mesh.processes.tasks import end as end_tasks
from mesh.processes.tasks import spawn
from mesh.types import NodeId
from mesh.wire.connection import WebSocketLink
from mesh.wire.limits import CONTROL_LIMITS
from mesh.wire.link import LinkHandler
from mesh.wire.messages import PROTOCOL_VERSION, Advertise
from mesh.wire.websocket import Doorkeeper, LinkServer, connect, serve

logger = logging.getLogger(__name__)

_OUT = "not a member of this hearth"
_SETTLE_S = 0.05
"""Changes within this time go out as one advertisement."""


@dataclass(frozen=True, slots=True)
class PeeringSettings:
    """Who this node is and how it links; `static_peers` are ``HOST:PORT``.

    `host` is listened at; with `answers_at`, every address at which that answers. `epoch` is
    greater than at any earlier start of this node.
    """

    node_id: NodeId
    name: str
    hearth: str
    software: str
    host: str
    answers_at: Reach | None = None
    port: int = 0
    static_peers: tuple[str, ...] = ()
    shard_health_timeout_s: float = 30.0
    epoch: int = 1
    dial: DialSettings = field(default_factory=DialSettings)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others reach this node as it is now: mDNS follows later than a new dial."""
        return (self.answers_at.addresses() if self.answers_at is not None else ()) or (self.host,)


class Peering:
    """Owns the node-to-node port and the control links.

    `offering` is asked for what this node offers at every heartbeat and after `advertise`.
    `on_event` is called in the event loop and must not block.
    """

    def __init__(
        self,
        settings: PeeringSettings,
        store: ShardStore,
        offering: Callable[[], Offering],
        on_event: Callable[[PeerEvent], None],
        *,
        trust: PeerTrust,
        on_message: Callable[[NodeId, Said], None] = lambda peer, message: None,
        mdns: Mdns | None = None,
    ) -> None:
        self._settings = settings
        self._trust = trust
        self._heard = on_message
        self._store = store
        self._offering: Callable[[], Offering] = lambda: replace(
            offering(), neighbours=neighbours.linked(self.links.all())
        )
        self._on_event = on_event
        self._mdns = mdns
        self._limits = replace(CONTROL_LIMITS, accounts=trust.accounts)
        self._run = secrets.token_hex(8)
        self.dials = 0
        self.links = LinkTable(settings.node_id)
        self._dialer = Dialer(
            self._dial,
            lambda node_id: self.links.get(node_id) is not None,
            own_id=settings.node_id,
            settings=settings.dial,
        )
        self._server: LinkServer | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._due = asyncio.Event()
        self._sightings = Sightings(on_event)
        self._notices = Notices(
            settings.node_id, settings.hearth, trust, epoch=settings.epoch,
            ttl_s=settings.shard_health_timeout_s * EXPIRY_FACTOR,
        )  # fmt: skip
        self._listing = Listing(
            store, self._notices, trust, self._sightings, self.links, self._dialer
        )
        self._stopping = False

    @property
    def port(self) -> int:
        """Where the node-to-node port listens; 0 before `start`."""
        return self._server.port if self._server is not None else 0

    @property
    def address(self) -> str:
        """``HOST:PORT`` as other nodes of the network can name it."""
        return f"{self._settings.addresses[0]}:{self.port}"

    async def start(self) -> None:
        """Listen, announce, dial. Raises PortInUse, and BadValue for a static peer's form."""
        settings = self._settings
        for peer in settings.static_peers:
            parse_endpoint(peer)
        self._server = await serve(
            settings.answers_at or settings.host, settings.port,
            accept=Doorkeeper(lambda link: require_node(link.peer_certificate, link.peer.node_id),
                              self._accept),
            hello=lambda: to_hello(self._own()), limits=self._limits, ssl=self._trust.tls.server,
        )  # fmt: skip
        if self._mdns is not None:
            nonce = self._run[:6]
            own = Announcement(
                instance=instance_name(settings.node_id, nonce),
                node_id=settings.node_id,
                hearth=settings.hearth,
                name=settings.name,
                version=PROTOCOL_VERSION,
                port=self.port,
                addresses=(),
            )
            await self._mdns.start(own, self._follow_announcements, self._on_event)
        for peer in settings.static_peers:
            self._dialer.add(f"static {peer}", (peer,))
        self._heartbeat = spawn(self._keep_telling(), "peering heartbeat")

    async def stop(self) -> None:
        """Say goodbye to every peer and to the network; safe after a failed `start`."""
        self._stopping = True
        await self._dialer.stop()
        if self._heartbeat is not None:
            await end_tasks([self._heartbeat])
        for link in self.links.all():
            link.link.close("goodbye")
        if self._mdns is not None:
            await self._mdns.stop()
        if self._server is not None:
            await self._server.close()

    def advertise(self) -> None:
        """What this node serves has changed: tell everybody now."""
        self._due.set()

    def follow_members(self) -> None:
        """The members are others: cut links to those that are out, try those that came in."""
        tls = self._trust.tls
        for end in self.links.all():
            if tls.trusts(end.hello.node_id):
                self._listing.relist(end)
            else:
                self._listing.drop(end.hello.node_id)
                end.link.close(_OUT)
        for link in self._server.links if self._server is not None else ():
            if not tls.trusts(link.peer.node_id):
                link.close(_OUT)
        self._dialer.retry()
        self.advertise()

    def send(self, peer: NodeId, message: Said) -> None:
        """Queue a message to a linked peer. Raises LinkLost when it is not linked."""
        end = self.links.get(peer)
        if end is None:
            raise LinkLost(f"There is no link to {peer}.", fix="It is dialled again.")
        end.link.send(message)

    def peers(self) -> list[PeerView]:
        """Everybody known: linked, being dialled, announced by other hearths."""
        linked = [
            PeerView(
                end.hello.node_id, end.hello.name, end.hello.address,
                PeerState.UP, "", end.link.rtt_ms,
            )
            for end in self.links.all()
        ]  # fmt: skip
        up = {view.node_id for view in linked}
        return linked + [view for view in self._sightings.rows() if view.node_id not in up]

    def silences(self) -> list[tuple[NodeId, float]]:
        """Every linked peer and for how many seconds nothing came from it."""
        return [(end.hello.node_id, end.link.silent_s) for end in self.links.all()]

    # Telling.

    async def _keep_telling(self) -> None:
        period_s = self._settings.shard_health_timeout_s / 3
        while True:
            self._due.clear()
            await self._tell()
            await asyncio.sleep(_SETTLE_S)
            await set_within(self._due, period_s)

    async def _tell(self) -> None:
        offering = self._offering()
        try:
            # What is on this node's own disk is asked of its fetcher.
            self._store.update(info(self._own()), replace(offering, weights=()))
            notice = self._notices.seal(offering)
        except (BadAdvertisement, BadEvent) as error:
            self._sightings.warn_once("own", Warned(error.code, error.message, error.fix))
            return
        for peer in self.links.all():
            self._send(peer, notice)
        self._store.sweep()
        if self._mdns is not None:
            served = [(s.descriptor.model_id, s.descriptor.layers) for s in offering.shards]
            await self._mdns.announce(summarise(served))

    def _send(self, peer: ControlLink, notice: Advertise | None) -> None:
        try:
            peer.link.send(notice or self._notices.seal(self._offering()))
        except MeshError as error:  # it is closing, or does not read; its link reports the end
            logger.info("not told: peer=%s reason=%s", label(peer.hello), error)

    # Links.

    def _own(self, dial: int = 0) -> PeerHello:
        settings = self._settings
        return PeerHello(
            settings.node_id, settings.name, settings.software, settings.hearth,
            self._run, dial, self.address, settings.addresses, calls_back=True,
        )  # fmt: skip

    def _accept(self, link: WebSocketLink) -> LinkHandler:
        if not self._trust.tls.trusts(link.peer.node_id):
            raise UntrustedPeer(_OUT, fix="See `hearthnet members`.")
        if self._stopping:
            raise PeerRefused("This node is stopping.", fix="Try again once it runs.")
        end = ControlLink(self._on_message, self._on_closed, initiated=False)
        peer = from_hello(link.peer)
        state, reason = self._judge(peer, None)
        if state is PeerState.UP:
            self._take_in(end, link, peer)
        else:
            # Our hello goes out first: the other side then says for itself what is wrong.
            asyncio.get_running_loop().call_soon(link.close, reason)
            logger.info("turned away: peer=%s reason=%s", label(peer), reason)
        return end

    async def _dial(self, target: Target, endpoint: str) -> DialResult:
        host, port = parse_endpoint(endpoint)
        dial = self.dials = self.dials + 1
        end = ControlLink(self._on_message, self._on_closed, initiated=True, dial=dial)
        hello = to_hello(self._own(dial))
        try:
            tls = self._trust.tls.client(target.pinned)
            link = await connect(
                host, port, hello=hello, handler=end, limits=self._limits, ssl=tls,
                timeout_s=self._settings.dial.timeout_s,
            )  # fmt: skip
        except VersionMismatch as error:
            self._note(target, endpoint, PeerState.OTHER_VERSION, str(error))
            return DialResult.REFUSED
        except (MeshError, UnicodeError) as error:
            self._note(target, endpoint, *why_not(error))
            return DialResult.FAILED
        try:
            peer = from_hello(link.peer)
            require_node(link.peer_certificate, peer.node_id)
        except (PeerRefused, UntrustedPeer) as error:
            link.close(error.message)
            self._note(target, endpoint, PeerState.NOT_A_PEER, str(error))
            return DialResult.REFUSED
        state, reason = self._judge(peer, target.pinned)
        if state is not PeerState.UP:
            link.close(reason)
            self._note(target, endpoint, state, reason, peer)
            return DialResult.REFUSED
        if link.is_closed:
            self._note(target, endpoint, PeerState.TRYING, "it closed the link at once", peer)
            return DialResult.FAILED
        target.node_id = peer.node_id
        self._sightings.forget(target.key)
        self._take_in(end, link, peer)
        return DialResult.LINKED

    def _judge(self, peer: PeerHello, expected: NodeId | None) -> tuple[PeerState, str]:
        """Whether to link with a peer, and the reason when not."""
        if peer.node_id == self._settings.node_id:
            if peer.run == self._run:
                return PeerState.SELF, "this node, under one of its own addresses"
            self._sightings.warn_cloned(peer.node_id, self.address, peer.address)
            return PeerState.NOT_A_PEER, "another machine with this node's key"
        if not self._trust.tls.trusts(peer.node_id):  # put out since the handshake
            return PeerState.NOT_A_PEER, _OUT
        if peer.hearth != self._settings.hearth:
            return PeerState.OTHER_HEARTH, "it belongs to another hearth"
        if expected not in (None, peer.node_id):
            return PeerState.NOT_A_PEER, "another node than the one announced there"
        return PeerState.UP, ""

    def _take_in(self, end: ControlLink, link: WebSocketLink, peer: PeerHello) -> None:
        old = self.links.get(peer.node_id)
        if old is not None and old.is_rivalled_by(peer):
            self._sightings.warn_cloned(peer.node_id, old.hello.address, peer.address)
        end.host = link.peer_host
        end.identify(link, peer)
        self._sightings.met(peer.node_id, peer.name)
        admitted = self.links.admit(end)
        if admitted is Admitted.FIRST:
            try:
                self._store.update(info(peer), Offering())
            except BadAdvertisement as error:
                logger.warning("not listed: peer=%s reason=%s", label(peer), error)
            self._on_event(PeerUp(peer.node_id, peer.name, peer.address, end.initiated))
        if admitted is not Admitted.SPARE:
            self._notices.linked(peer.node_id, peer.run)
            self._send(end, None)
        end.release()

    def _on_message(self, end: ControlLink, message: ControlMessage) -> None:
        if not isinstance(message, Advertise):  # who said it counts, not on which of two links
            self._heard(end.hello.node_id, message)
        elif self.links.is_current(end):
            self._listing.hear(end, message)

    def _on_closed(self, end: ControlLink, error: MeshError | None) -> None:
        if not self.links.drop(end) or self._stopping:
            return
        peer = end.hello
        self._listing.lost(peer.node_id, has_left=error is None)
        if self._mdns is not None:
            self._mdns.look_again()
        said = "goodbye" if error is None else error.message
        reason = said if self._trust.tls.trusts(peer.node_id) else _OUT
        self._on_event(PeerDown(peer.node_id, peer.name, reason))
        trying = PeerView(peer.node_id, peer.name, peer.address, PeerState.TRYING, reason, None)
        self._sightings.expect(self._dialer.lost(peer.node_id), trying)

    def _note(
        self,
        target: Target,
        endpoint: str,
        state: PeerState,
        reason: str,
        peer: PeerHello | None = None,
    ) -> None:
        node_id = peer.node_id if peer is not None else target.node_id
        name = peer.name if peer is not None else self._sightings.name_of(node_id) or endpoint
        self._sightings.show(target.key, PeerView(node_id, name, endpoint, state, reason, None))

    # What the network announces.

    def _follow_announcements(self) -> None:
        """Dial whom mDNS shows and nobody else."""
        if self._mdns is None or self._stopping:
            return
        seen = [a for a in self._mdns.announcements() if not self._is_former_self(a)]
        follow(seen, self._settings.hearth, self._dialer, self._sightings)

    def _is_former_self(self, announcement: Announcement) -> bool:
        """An earlier run of this very daemon, still in the network's memory."""
        return (
            announcement.node_id == self._settings.node_id
            and self._mdns is not None
            and announcement.port == self.port
            and set(announcement.addresses) <= set(self._mdns.addresses)
        )
