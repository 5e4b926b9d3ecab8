"""The control links of one node: one per peer, chosen alike on both sides. No I/O of its own.

Two nodes may dial each other at once, or one may dial the other under two addresses. Both ends then
see the same links and must keep the same one without talking about it; `LinkTable` decides that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum

from mesh.discovery.directory import Offering
from mesh.discovery.greeting import PeerHello
from mesh.errors import MeshError
from mesh.types import NodeId
from mesh.wire.call_back import CallBack, CalledBack
from mesh.wire.limits import CONTROL_LIMITS
from mesh.wire.link import Link
from mesh.wire.messages import (
    Advertise,
    FileAsk,
    FilePart,
    Gossip,
    Message,
)

_SPARE_S = 10.0
_MAX_EARLY = 8
_DOUBTFUL_S = 1.5 * CONTROL_LIMITS.ping_interval_s
"""A link that lives is heard once in an interval."""

Said = Gossip | FileAsk | FilePart | CallBack | CalledBack
"""What daemons say to each other beside their advertisements."""

ControlMessage = Advertise | Said


class ControlLink:
    """The handler of one link; holds back what arrives before the link is admitted."""

    def __init__(
        self,
        on_message: Callable[[ControlLink, ControlMessage], None],
        on_closed: Callable[[ControlLink, MeshError | None], None],
        *,
        initiated: bool,
        dial: int = 0,
    ) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._early: list[ControlMessage] = []
        self._ended: tuple[MeshError | None] | None = None
        self._link: Link | None = None
        self._hello: PeerHello | None = None
        self.initiated = initiated
        self.advertised: Offering | None = None
        self.advertised_until = 0.0
        """By the loop's clock."""
        self.host = ""
        self._own_dial = dial

    @property
    def link(self) -> Link:
        """The link; only after `identify`."""
        if self._link is None:
            raise RuntimeError("the link is not open yet")
        return self._link

    @property
    def hello(self) -> PeerHello:
        """Who is at the other end; only after `identify`."""
        if self._hello is None:
            raise RuntimeError("the link is not open yet")
        return self._hello

    @property
    def dial(self) -> int:
        """The initiator's own count of its dials: both ends know it and order links by it."""
        return self._own_dial if self.initiated else self.hello.dial

    @property
    def is_doubtful(self) -> bool:
        """Whether a link that lives would have been heard by now."""
        return self.link.silent_s > _DOUBTFUL_S

    def is_rivalled_by(self, peer: PeerHello) -> bool:
        """Whether this link lives and leads to another machine with that peer's key: another run,
        elsewhere."""
        is_other = self.hello.run != peer.run and self.hello.address != peer.address
        return is_other and not self.is_doubtful

    def identify(self, link: Link, hello: PeerHello) -> None:
        """Both hellos were exchanged; `release` lets messages through."""
        self._link, self._hello = link, hello

    def release(self) -> None:
        """Hand on what arrived meanwhile."""
        early, self._early = self._early, []
        for message in early:
            self._on_message(self, message)
        if self._ended is not None:
            self._on_closed(self, *self._ended)

    def message(self, message: Message) -> None:
        """Hand an advertisement, gossip or file part on; drop what belongs on no control link."""
        if not isinstance(message, ControlMessage):
            return
        if self._link is not None:
            self._on_message(self, message)
        elif len(self._early) < _MAX_EARLY:
            self._early.append(message)

    def closed(self, error: MeshError | None) -> None:
        """The link ended: tell who it was admitted to, now or once it is."""
        self._ended = (error,)
        if self._link is not None:
            self._on_closed(self, error)


class Admitted(Enum):
    """What became of a new link."""

    FIRST = "the node had no link before"
    REPLACED = "it took the place of another one"
    SPARE = "another one stays; this one is closed by whoever must"


class LinkTable:
    """The one current link of every peer."""

    def __init__(self, own_id: NodeId) -> None:
        self._own_id = own_id
        self._current: dict[NodeId, ControlLink] = {}

    def get(self, node_id: NodeId) -> ControlLink | None:
        """The peer's current link, None when it has none that is open."""
        end = self._current.get(node_id)
        return None if end is None or end.link.is_closed else end

    def all(self) -> list[ControlLink]:
        """Every current link."""
        return list(self._current.values())

    def is_current(self, end: ControlLink) -> bool:
        """Whether messages on this link count."""
        return self._current.get(end.hello.node_id) is end

    def admit(self, end: ControlLink) -> Admitted:
        """Take in a new link; of two to the same peer both ends keep the same one.

        The one initiated by the smaller node id stays, of several by the same node the latest it
        dialled. Only the initiator of the link that stays closes the other one: it alone knows that
        both ends have it by then. A peer that was restarted has lost its old link, whatever the
        order; and so has one whose old link is doubtful: it dials only where it has none.
        """
        old = self.get(end.hello.node_id)
        if old is None:
            self._current[end.hello.node_id] = end
            return Admitted.FIRST
        if old.hello.run != end.hello.run or old.is_doubtful:
            self._current[end.hello.node_id] = end
            old.link.close("replaced by a newer one")
            return Admitted.REPLACED
        wins = self._rank(end) > self._rank(old)
        winner, loser = (end, old) if wins else (old, end)
        self._current[end.hello.node_id] = winner
        # The initiator closes it; should it forget to, we do.
        delay_s = 0.0 if winner.initiated else _SPARE_S
        asyncio.get_running_loop().call_later(delay_s, loser.link.close, "duplicate")
        return Admitted.REPLACED if wins else Admitted.SPARE

    def drop(self, end: ControlLink) -> bool:
        """Forget a link that closed; whether it was the current one."""
        if not self.is_current(end):
            return False
        del self._current[end.hello.node_id]
        return True

    def _rank(self, end: ControlLink) -> tuple[bool, int]:
        smaller_initiated = end.initiated == (self._own_id < end.hello.node_id)
        return smaller_initiated, end.dial
