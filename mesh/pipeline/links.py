"""The asker's links to shard hosts, one per endpoint, shared by all its generations.

A link hands out session numbers and passes each message to the session it is about. It knows
nothing of routes, tokens or tensors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from typing import Protocol

from mesh.errors import (
    AddressLost,
    ConnectFailed,
    LinkLost,
    MeshError,
    TokenRejected,
    UntrustedPeer,
    from_peer,
)
from mesh.types import Endpoint, NodeId
from mesh.wire.abilities import copies_prefixes, takes_blobs
from mesh.wire.link import Link
from mesh.wire.messages import Drain, Failure, Message, Open, OpenTaps, Ping
from mesh.wire.websocket import place_of

logger = logging.getLogger(__name__)

_REST_PART, _TEND_PART = 1 / 4, 1 / 8
"""A session rests that was silent for this part of its lease; looked at as often."""


class SessionReceiver(Protocol):
    """The asker's end of one session on one hop."""

    def message(self, message: Message) -> None:
        """Something about this session arrived."""

    def lost(self, error: MeshError) -> None:
        """Nothing will arrive any more: the link is gone."""

    def rest(self, before: float) -> None:
        """The host ends sessions that are silent for long. If this one has been since the loop's
        time `before`, see to it that it is not ended. Raises nothing: others rest after it."""


class HopLink:
    """One link and the sessions on it. Implements LinkHandler.

    `is_draining`: its host asked that sessions move elsewhere while they can. `permit` makes the
    token that the host wants with what opens a session; None when it wants none. `lease_s` is how
    long the host keeps a session that is silent; None when it does not say. `takes_blobs`: whether
    it understands `Blob`s, without which it takes no jobs. `copies_prefixes`: whether a session may
    begin as another does.
    """

    def __init__(self, endpoint: Endpoint, host: NodeId) -> None:
        self.endpoint = endpoint
        self.host = host
        self.is_draining = False
        self.permit: Callable[[Open | OpenTaps], str] | None = None
        self.lease_s: float | None = None
        self.takes_blobs = False
        self.copies_prefixes = False
        self._is_doubted = False
        self._tending: asyncio.TimerHandle | None = None
        self._link: Link | None = None
        self._receivers: dict[int, SessionReceiver] = {}
        self._used_at = asyncio.get_running_loop().time()
        self._last_session = 0
        self._closed = False

    def attach(self, link: Link) -> None:
        """Start using `link`, whose handler this is."""
        self._link = link
        self.takes_blobs = takes_blobs(link.peer)
        self.copies_prefixes = copies_prefixes(link.peer)

    @property
    def is_closed(self) -> bool:
        """Whether a new one has to be dialled."""
        return self._closed or self._link is None or self._link.is_closed

    def register(self, receiver: SessionReceiver) -> int:
        """A fresh session number whose messages go to `receiver`."""
        self._last_session = (self._last_session + 1) & 0xFFFFFFFF
        self._receivers[self._last_session] = receiver
        self._tend_later()
        return self._last_session

    def unregister(self, session: int) -> None:
        """Messages about this session are dropped from now on."""
        self._receivers.pop(session, None)
        self._used_at = asyncio.get_running_loop().time()

    def send(self, message: Message) -> None:
        """Queue a message. Raises LinkLost."""
        if self._link is None or self._closed:
            raise LinkLost(f"the link to {self.endpoint} is closed.", fix="Another route is tried.")
        self._link.send(message)

    def ask(self, question: Sequence[Message]) -> None:
        """Queue what opens or resumes a session, with a fresh token each time. Raises LinkLost."""
        for message in question:
            if self.permit is not None and isinstance(message, Open | OpenTaps):
                self.send(replace(message, token=self.permit(message)))
            else:
                self.send(message)

    def doubt(self) -> None:
        """The host is said to be elsewhere: the link is lost, unless something comes soon."""
        if self._link is not None and not self.is_closed and not self._is_doubted:
            self._is_doubted = True
            loop = asyncio.get_running_loop()
            with suppress(MeshError):  # it takes nothing more: then it has to say something
                self._link.send(Ping(int(loop.time() * 1e6)))
            loop.call_later(_DOUBT_S, self._judge, loop.time())

    def _judge(self, asked_at: float) -> None:
        self._is_doubted = False
        asked_s = asyncio.get_running_loop().time() - asked_at
        if self._link is not None and not self.is_closed and self._link.silent_s > asked_s:
            why = f"{self.endpoint} is silent, and its host is elsewhere now."
            self.closed(AddressLost(why, fix="It is asked where it is."))
            self.close("silent")

    def close(self, reason: str) -> None:
        """Close the link; receivers are told."""
        if self._link is not None:
            self._link.close(reason)

    @property
    def is_unused(self) -> bool:
        """Whether no session was on it for a while."""
        now = asyncio.get_running_loop().time()
        return not self._receivers and now - self._used_at > _UNUSED_S

    # LinkHandler

    def message(self, message: Message) -> None:
        """Pass a message to the session it names; a failure of the whole link goes to all."""
        session = getattr(message, "session", None)
        if session is None:
            if isinstance(message, Drain):
                self.is_draining = bool(message.reason)
            if isinstance(message, Failure):
                logger.warning("endpoint=%s failure=%s", self.endpoint, from_peer(message.error))
            return
        receiver = self._receivers.get(session)
        if receiver is not None:
            receiver.message(message)
        if isinstance(message, Failure) and _is_misdated(message):
            # It told its time when the link opened; the clocks have drifted apart since.
            self.close("tokens of this link are dated by a clock that has drifted")

    def _tend_later(self) -> None:
        if self.lease_s is not None and self._tending is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._tending = loop.call_later(self.lease_s * _TEND_PART, self._tend)

    def _tend(self) -> None:
        """Let sessions rest that were silent for a good part of their lease."""
        self._tending = None
        if self.lease_s is None or self.is_closed:
            return
        before = asyncio.get_running_loop().time() - self.lease_s * _REST_PART
        for receiver in list(self._receivers.values()):
            receiver.rest(before)
        if self._receivers:
            self._tend_later()

    def closed(self, error: MeshError | None) -> None:
        """Tell every session that its link is gone."""
        self._closed = True
        if self._tending is not None:
            self._tending.cancel()
        receivers, self._receivers = list(self._receivers.values()), {}
        reason = error or LinkLost(f"{self.endpoint} closed the link.", fix="It may be stopping.")
        for receiver in receivers:
            receiver.lost(reason)


def _is_misdated(failure: Failure) -> bool:
    return (
        failure.error.get("code") == TokenRejected.code and failure.error.get("param") == "expiry"
    )


_DOUBT_S = 2.0

_UNUSED_S = 60.0
"""After so long without a session a link to a host goes when there is another to the same host."""

_Place = tuple[NodeId, Endpoint]

Dial = Callable[[str, int, HopLink], Awaitable[Link]]
"""Opens a link to this host at this address and port, for it to report to.

Raises ConnectFailed and its kin, and UntrustedPeer when another node answers.
"""

_REST_S, _HOST_RESTS_S = 0.25, 15.0
_FAILED_DIALS = 4
"""A place where nobody answered is not dialled again at once, but soon, as a process that ended is
back within a second; and a host that was not there at so many not for a while. What a host says of
where its shards are is not known to be so: it may name 64 places, each of which takes seconds, and
which need not be its own."""


class _Failures:
    """The dials that failed lately."""

    def __init__(self) -> None:
        self._of: dict[NodeId, dict[Endpoint, tuple[float, ConnectFailed]]] = {}

    def require_worth_a_dial(self, host: NodeId, endpoint: Endpoint) -> None:
        """Raise ConnectFailed as the last dial did where another would most likely fail as well."""
        now, known = asyncio.get_running_loop().time(), self._of.pop(host, {})
        failed = {place: each for place, each in known.items() if now - each[0] < _HOST_RESTS_S}
        if failed:
            self._of[host] = failed
        at, error = failed.get(endpoint, (now - _REST_S, None))
        if now - at >= _REST_S:
            error = None
        if error is None and len(failed) >= _FAILED_DIALS:
            *_, (_, error) = failed.values()
        if error is not None:
            raise ConnectFailed(error.message, fix=error.fix)

    def note(self, host: NodeId, endpoint: Endpoint, error: ConnectFailed) -> None:
        """This one failed just now."""
        failed = self._of.setdefault(host, {})
        failed.pop(endpoint, None)
        failed[endpoint] = asyncio.get_running_loop().time(), error

    def forget(self, host: NodeId) -> None:
        """It is there."""
        self._of.pop(host, None)


class HopLinks:
    """Dials hosts on demand and keeps the live links."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._links: dict[_Place, HopLink] = {}
        self._dialling: dict[_Place, asyncio.Task[HopLink]] = {}
        self._allowed: frozenset[NodeId] | None = None
        self._failures = _Failures()

    async def link(self, host: NodeId, endpoint: Endpoint) -> HopLink:
        """The live link to `host` at `endpoint`, dialled when there is none.

        Raises ConnectFailed, and UntrustedPeer when another node answers there, or when `host` is
        not, or by the end of the dial no longer, one of those to keep links to.
        """
        self._require_allowed(host, endpoint)
        place = (host, endpoint)
        live = self._links.get(place)
        if live is not None and not live.is_closed:
            return live
        task = self._dialling.get(place)
        if task is None:
            self._failures.require_worth_a_dial(host, endpoint)
            # Others' requests go over it, too: its lines in the log are not of this one.
            dialling = self._open(host, endpoint)
            task = asyncio.create_task(dialling, name=f"dial {endpoint}", context=Context())
            self._dialling[place] = task
            task.add_done_callback(lambda _: self._dialling.pop(place, None))
        # Several sessions may wait for one dial; one that gives up must not end it for the others.
        return await asyncio.shield(task)

    def are_at(self, places: Collection[_Place]) -> None:
        """Doubt links to where hosts are no longer said to be: their address may have changed, or
        they may be in two networks."""
        hosts = {host for host, _ in places}
        for place, known in list(self._links.items()):
            if place[0] in hosts and place not in places:
                known.doubt()

    def keep_only(self, hosts: frozenset[NodeId]) -> None:
        """Close the links to all other nodes, whose sessions are lost, and open no more to them.

        Before the first call whoever the dial accepts is kept.
        """
        self._allowed = hosts
        for place, known in list(self._links.items()):
            if known.host not in hosts:
                del self._links[place]
                known.close("no longer trusted")

    async def close(self) -> None:
        """Close every link."""
        for task in list(self._dialling.values()):
            task.cancel()
        for link in list(self._links.values()):
            link.close("asker stops")
        self._links.clear()

    async def _open(self, host: NodeId, endpoint: Endpoint) -> HopLink:
        address, port = place_of(endpoint)
        link = HopLink(endpoint, host)
        try:
            link.attach(await self._dial(address, port, link))
        except ConnectFailed as error:
            self._failures.note(host, endpoint, error)
            raise
        self._failures.forget(host)
        try:
            self._require_allowed(host, endpoint)
        except UntrustedPeer:
            link.close("no longer trusted")
            raise
        # A host that started again has another port. What was closed at the old one is let go, and
        # so is what nobody uses: a host that is always somewhere else is not to have them all.
        for place, known in list(self._links.items()):
            if known.is_closed or (place[0] == host and known.is_unused):
                del self._links[place]
                known.close("the host is elsewhere now")
        self._links[host, endpoint] = link
        return link

    def _require_allowed(self, host: NodeId, endpoint: Endpoint) -> None:
        if self._allowed is not None and host not in self._allowed:
            raise UntrustedPeer(
                f"The host at {endpoint} is no longer trusted.", fix="See `hearthnet members`."
            )
