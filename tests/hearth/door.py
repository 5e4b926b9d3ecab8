"""One daemon's node-to-node door, open: its hearth and its links, and a member that comes in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.accounts import allowances
from mesh.accounts.ledger import ResourceLedger
from mesh.clock import SystemClock
from mesh.discovery.directory import Offering, ShardStore
from mesh.discovery.greeting import PeerHello, to_hello
from mesh.discovery.peering import Peering, PeeringSettings
from mesh.errors import MeshError
from mesh.events import messages
from mesh.events.intake import Report
from mesh.hearth.founding import found
from mesh.hearth.hearth import Hearth
from mesh.identity.certificates import make_certificate
from mesh.identity.decisions import Added
from mesh.identity.keys import NodeKey
from mesh.identity.roster import TrustLevel
from mesh.identity.tls import TlsContexts, TlsMaterial
from mesh.types import NodeId
from mesh.wire.connection import WebSocketLink
from mesh.wire.limits import CONTROL_LIMITS, Limits
from mesh.wire.messages import Gossip, Message
from mesh.wire.websocket import connect
from tests.discovery.network import new_key

CLOCK = SystemClock()
PATIENCE_S = 20.0


class Member:
    """The other end of a control link: what came over it, and how it ended."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[Message] = asyncio.Queue()
        self.ended: asyncio.Future[MeshError | None] = asyncio.get_running_loop().create_future()
        self._link: WebSocketLink | None = None

    @property
    def link(self) -> WebSocketLink:
        """The link, once it is open."""
        assert self._link is not None
        return self._link

    def use(self, link: WebSocketLink) -> None:
        """It is open."""
        self._link = link

    def message(self, message: Message) -> None:
        """See `LinkHandler.message`."""
        self.heard.put_nowait(message)

    def closed(self, error: MeshError | None) -> None:
        """See `LinkHandler.closed`."""
        if not self.ended.done():
            self.ended.set_result(error)

    def say(self, body: dict[str, Any]) -> None:
        """Say something about the log, in whatever form."""
        self.link.send(Gossip(body))

    def pages(self) -> list[Message]:
        """The pages of the log that came and nobody has read."""
        heard = [self.heard.get_nowait() for _ in range(self.heard.qsize())]
        return [m for m in heard if isinstance(m, Gossip) and m.body["kind"] == "page"]

    async def answer(self, number: int) -> messages.LogMessage:
        """What answers the question of this number."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                heard = await self.heard.get()
                if isinstance(heard, Gossip) and heard.body["number"] == number:
                    return messages.from_dict(heard.body)


@dataclass
class Door:
    """A daemon that listens. `key` is the member's, who is in its hearth."""

    hearth: Hearth
    peering: Peering
    key: NodeKey
    reports: list[Report]

    async def enter(self, limits: Limits = CONTROL_LIMITS) -> Member:
        """A link as the member."""
        own, hearth = self.hearth.key, self.hearth
        certificate = hearth.roster.members[own.node_id].certificate
        tls = await asyncio.to_thread(TlsContexts, TlsMaterial.of(self.key, [certificate]))
        me = PeerHello(self.key.node_id, "barn", "test", hearth.id, "run", 1, "127.0.0.1:9")
        member = Member()
        hello = to_hello(me)
        link = await connect(
            "127.0.0.1", self.peering.port, hello=hello, handler=member, limits=limits,
            ssl=tls.client(own.node_id),
        )  # fmt: skip
        member.use(link)
        return member


@asynccontextmanager
async def opened(logs: Path) -> AsyncIterator[Door]:
    """A founded hearth with one member more, over real TLS on loopback."""
    own, key = new_key(), new_key()
    reports: list[Report] = []
    record = (await found(own, "attic", logs, CLOCK, reports.append)).record
    accounts = ResourceLedger(CLOCK, allowances.DAEMON)
    hearth = await Hearth.open(own, record, logs, CLOCK, reports.append, accounts)
    heard = []

    def receive(peer: NodeId, message: Any) -> None:
        heard.append(message)
        hearth.receive(peer, message.body)

    settings = PeeringSettings(own.node_id, "attic", hearth.id, "test", "127.0.0.1")
    peering = Peering(
        settings, ShardStore(CLOCK, expiry_s=60), Offering, lambda event: None,
        trust=hearth, on_message=receive,
    )  # fmt: skip
    try:
        await hearth.decide(Added(make_certificate(key), "barn", TrustLevel.TRUSTED))
        hearth.start_gossip(lambda peer, message: peering.send(peer, _gossip(message)))
        await peering.start()
        hearth.peer_up(key.node_id)
        yield Door(hearth, peering, key, reports)
    finally:
        await peering.stop()
        await hearth.close()


def _gossip(message: messages.LogMessage) -> Gossip:
    return Gossip(messages.to_dict(message))
