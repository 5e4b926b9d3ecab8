"""Whether a peer can open connections to this node, asked of that peer over its control link.

Two machines may be linked while one of them takes no connections: the link is opened by the other.
Whoever is asked tries the ports of who asked at the address at which the link has it and nowhere
else, so that nobody has a member look for open ports of a third machine. Knows nothing of what
listens there.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mesh.clock import Clock
from mesh.discovery.knocking import knock
from mesh.discovery.links import ControlLink
from mesh.errors import ConnectFailed, LinkLost, MeshError
from mesh.processes.tasks import end, spawn
from mesh.types import NodeId
from mesh.wire.call_back import CallBack, CalledBack

logger = logging.getLogger(__name__)

MAX_ANSWERING = 8
"""Peers that are called back at the same time, each once; others are told to ask again."""
_BUSY = "it is asked too much at once; ask again"
_PATIENCE_S = 3.0


@dataclass(frozen=True, slots=True)
class Returned:
    """What a peer found: for each port why it was not reached, empty where it was. `ahead_s` is how
    far its wall clock is ahead of this one's, exact to the round trip."""

    found: dict[int, str]
    ahead_s: float


class CallBacks:
    """Asks peers to call back and does so for them. Use on one event loop; `close` in the end.

    `link` gives the control link to a peer, None where there is none.
    """

    def __init__(
        self,
        link: Callable[[NodeId], ControlLink | None],
        clock: Clock,
        *,
        knock_s: float = 2.0,
    ) -> None:
        self._link = link
        self._clock = clock
        self._knock_s = knock_s
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[NodeId, asyncio.Future[CalledBack]]] = {}
        self._answering: dict[NodeId, asyncio.Task[None]] = {}

    async def ask(self, peer: NodeId, ports: Sequence[int]) -> Returned:
        """Have a peer try these ports of this node, at most `MAX_PORTS`.

        Raises LinkLost without a link to it, and ConnectFailed where it knows no such question, has
        no time for it, or does not answer.
        """
        link = self._link(peer)
        if link is None:
            raise LinkLost(f"There is no link to {peer}.", fix="It is dialled again.")
        if not link.hello.calls_back:
            raise ConnectFailed(
                f"{link.hello.name} runs {link.hello.software}, which cannot call back.",
                fix="Update hearthnet there.",
            )
        sent_s = self._clock.now().timestamp()
        answer = await self._answered(peer, link, ports)
        took_s = self._clock.now().timestamp() - sent_s
        if answer.refused or len(answer.found) != len(ports):
            why = answer.refused or "it answers something else than it was asked"
            raise ConnectFailed(f"{link.hello.name} did not call back: {why}.", fix="Ask again.")
        way_s = min(took_s, (link.link.rtt_ms or 0.0) / 1000) / 2
        ahead_s = answer.wall_ms / 1000 - (sent_s + way_s)
        return Returned(dict(zip(ports, answer.found, strict=True)), ahead_s)

    def receive(self, peer: NodeId, message: CallBack | CalledBack) -> None:
        """What a linked peer said."""
        if isinstance(message, CalledBack):
            asked = self._asked.get(message.number)
            if asked is not None and asked[0] == peer and not asked[1].done():
                asked[1].set_result(message)
            return
        wall_ms = int(self._clock.now().timestamp() * 1000)
        if peer in self._answering or len(self._answering) >= MAX_ANSWERING:
            self._say(peer, CalledBack(message.number, wall_ms, [], _BUSY))
            return
        task = spawn(self._answer(peer, message, wall_ms), "call back")
        self._answering[peer] = task
        task.add_done_callback(lambda _: self._answering.pop(peer, None))

    async def close(self) -> None:
        """Call nobody back any more."""
        await end(list(self._answering.values()))

    async def _answered(self, peer: NodeId, link: ControlLink, ports: Sequence[int]) -> CalledBack:
        number = next(self._numbers) & 0xFFFFFFFF
        future: asyncio.Future[CalledBack] = asyncio.get_running_loop().create_future()
        self._asked[number] = (peer, future)
        try:
            link.link.send(CallBack(number, list(ports)))
            async with asyncio.timeout(self._knock_s + _PATIENCE_S):
                return await future
        except TimeoutError as error:
            raise ConnectFailed(
                f"{link.hello.name} did not say whether it reaches this node.", fix="Ask again."
            ) from error
        finally:
            del self._asked[number]

    async def _answer(self, peer: NodeId, question: CallBack, wall_ms: int) -> None:
        link = self._link(peer)
        if link is None or not link.host:
            return  # it left; nobody waits
        ways = [knock(link.host, port, self._knock_s) for port in question.ports]
        self._say(peer, CalledBack(question.number, wall_ms, await asyncio.gather(*ways)))

    def _say(self, peer: NodeId, answer: CalledBack) -> None:
        link = self._link(peer)
        try:
            if link is not None:
                link.link.send(answer)
        except MeshError as error:
            logger.info("peer=%s was not told what it asked: %s", peer, error)
