"""The inviter's side in the daemon: one open window at a time, and what becomes of who comes in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from mesh.clock import Clock
from mesh.errors import MeshError, NotFound, PairingRejected
from mesh.hearth.hearth import Hearth
from mesh.identity.decisions import Added, LevelChanged
from mesh.identity.invitations import Invitation, Ticket, Window, WindowEnding
from mesh.identity.pairing import JoinRequest, Welcome
from mesh.identity.pairing_tcp import PairingListener, listen
from mesh.identity.roster import TrustLevel
from mesh.processes.tasks import spawn
from mesh.types import NodeId

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 5.0
_REMEMBERED = 8


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """An invitation that can be taken up at ``host:port``; `link` is its long form."""

    invitation: Invitation
    link: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class WindowOutcome:
    """The end of a pairing window: why it ended, and the member that took it up, or why nobody who
    had the code is in. `level` is the member's now; `before` is what it was, if it was in then."""

    ending: WindowEnding
    joined: JoinRequest | None
    refused: MeshError | None = None
    level: TrustLevel | None = None
    before: TrustLevel | None = None


class Inviting:
    """Opens windows. `announce` tells the network of the window's port, None when it is shut;
    `on_end` hears how a window ended and who came in."""

    def __init__(
        self,
        hearth: Hearth,
        clock: Clock,
        announce: Callable[[int | None], Awaitable[None]],
        on_end: Callable[[WindowEnding, JoinRequest | None], None],
    ) -> None:
        self._hearth = hearth
        self._clock = clock
        self._announce = announce
        self._on_end = on_end
        self._listener: PairingListener | None = None
        self._invitation: Invitation | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended: dict[int, WindowOutcome] = {}
        self._news = asyncio.Event()
        self._changing = asyncio.Lock()
        """Of two who open a window at once, the later shuts the earlier's."""

    async def open(
        self, level: TrustLevel, ttl_s: float, listen_at: str | Callable[[str], bool], host: str
    ) -> OpenWindow:
        """Open a window, shutting the one before; `host` is how others reach it.

        `listen_at` is as for `mesh.identity.pairing_tcp.listen`. Waits until this node may sign:
        whoever came in before would wait with a used code for longer than pairing takes.

        Raises BadValue for a level or lifetime that no invitation may have, UntrustedPeer when this
        node is no anchor, PortInUse.
        """
        own = self._hearth.key.node_id
        self._hearth.roster.require(own, TrustLevel.ANCHOR)
        invitation = Invitation.create(level, ttl_s)
        await self._hearth.heard()
        async with self._changing:
            await self._shut()
            window = Window(invitation, self._clock)
            levels: dict[NodeId, TrustLevel] = {}
            listener = await listen(
                listen_at, 0, key=self._hearth.key, window=window,
                admit=partial(self._admit, levels),
            )  # fmt: skip
            self._listener, self._invitation = listener, invitation
            self._task = spawn(self._watch(listener, levels), "pairing window")
            await self._announce(listener.port)
        return OpenWindow(
            invitation, invitation.link(own, host, listener.port), host, listener.port
        )

    def require_another(self, ticket: Ticket) -> None:
        """Raise PairingRejected for the ticket of the window that is open here."""
        invitation = self._invitation if self._listener is not None else None
        if invitation is not None and invitation.password(ticket.form) == ticket.password:
            raise PairingRejected(
                "This is the machine that invites.",
                fix="Run `hearthnet join` on the one that is to come in.",
                param="own",
            )

    async def close(self) -> None:
        """Shut the open window, if there is one."""
        async with self._changing:
            await self._shut()

    async def _shut(self) -> None:
        listener, self._listener = self._listener, None
        task, self._task = self._task, None
        if listener is not None:
            await listener.close()
            await self._announce(None)
        if task is not None:
            await asyncio.wait([task], timeout=_STOP_TIMEOUT_S)

    async def outcome(self, port: int, timeout_s: float) -> WindowOutcome | None:
        """How the window at `port` ended; None when it is still open after `timeout_s`.

        Raises NotFound for a window that nobody remembers.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while port not in self._ended:
                    if self._listener is None or self._listener.port != port:
                        raise NotFound(
                            f"There is no invitation on port {port}.", fix="Open a new one."
                        )
                    self._news.clear()
                    await self._news.wait()
        return self._ended.get(port)

    async def _watch(self, listener: PairingListener, levels: Mapping[NodeId, TrustLevel]) -> None:
        ending, joined = await listener.wait()
        logger.info("invitation ended: %s%s", ending, f" by {joined.name}" if joined else "")
        outcome = WindowOutcome(ending, joined, listener.refused)
        if joined is not None:
            now = self._hearth.roster.members.get(joined.node_id)
            level = now.level if now is not None else None
            outcome = replace(outcome, level=level, before=levels.get(joined.node_id))
        self._ended[listener.port] = outcome
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        self._news.set()
        if self._listener is listener:
            self._listener = None
            await self._announce(None)
        self._on_end(ending, joined)

    async def _admit(self, levels: dict[NodeId, TrustLevel], request: JoinRequest) -> Welcome:
        """Make whoever proved itself a member, before it is told so; `levels` keeps what one was.

        Who is a member gets the invitation's level. It takes from no anchor what it decides, nor
        from one that has signed two histories what it would decide again: no invitation gives that.
        """
        hearth = self._hearth
        member = hearth.roster.members.get(request.node_id)
        if request.node_id in hearth.roster.cuts:
            raise PairingRejected(
                f"The key of {request.name} was revoked.",
                fix="Give that machine a new --state-dir, which makes a new key.",
                param="revoked",
            )
        if member is None:
            await hearth.decide(Added(request.certificate, request.name, request.level))
        else:
            levels[member.node_id] = member.level
            decides = member.level is TrustLevel.ANCHOR or member.node_id in hearth.roster.forked
            if member.level is not request.level and not decides:
                await hearth.decide(LevelChanged(member.node_id, request.level))
        roster, own = hearth.roster, hearth.key.node_id
        first = (own, request.node_id)
        members = sorted(roster.members.values(), key=lambda m: (m.node_id not in first, -m.level))
        return Welcome(hearth.id, roster.name, tuple(members))
