"""Keeps this node's log in step with its peers': one exchange per peer at a time, for ever.

Owns the tasks; what is said is `mesh.events.sync`. Messages go out through `send` and come in
through `receive`; how they travel, and who is a peer, is somebody else's business.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from mesh.accounts.ledger import Resource, of_peer
from mesh.clock import backoff_s, jittered_s, set_within
from mesh.errors import LimitReached, MeshError
from mesh.events.log import EventLog, LogChange
from mesh.events.messages import Ask, Heads, LogMessage, Page, Probe, Pull
from mesh.events.sync import CatchUp, answer_probe, heads_of, wants_something
from mesh.types import NodeId

logger = logging.getLogger(__name__)

Send = Callable[[NodeId, LogMessage], None]
"""Queue a message to a linked peer; may raise a MeshError, never blocks."""

_MAX_REQUESTS = 8
_REQUESTS_PER_S = 64.0
"""As many are answered, and asked, of one peer at most."""
_REFUSED_PAUSE_S = 5.0
_FIRST_BACKOFF_S = 0.5
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class GossipSettings:
    """Seconds. A peer is asked every `interval_s` to twice that, at once when it has news."""

    interval_s: float = 5.0
    answer_timeout_s: float = 10.0
    settle_s: float = 0.02
    """Own news within this time go out as one message."""
    max_backoff_s: float = 60.0
    max_turns: int = 1024
    """Of one exchange: half a million events; what is more comes in those after it."""
    max_exchange_s: float = 120.0
    recall_s: float = 20.0


class LogGossip:
    """Call `start`, then `peer_up` and `peer_down` as links come and go, and `stop`."""

    def __init__(
        self,
        log: EventLog,
        send: Send,
        settings: GossipSettings | None = None,
        rng: random.Random | None = None,
        on_exchange: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_exchange` is called whenever an exchange with a peer has come to its end."""
        self._log = log
        self._send = send
        # The random source spreads load; nothing secret hangs on it.
        rng = rng or random.Random()  # noqa: S311
        self._means = _Means(log, send, settings or GossipSettings(), rng, on_exchange)
        self._peers: dict[NodeId, _Peer] = {}
        self._news = asyncio.Event()
        self._teller: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to tell peers of new events."""
        self._log.on_change.append(self._changed)
        self._teller = asyncio.create_task(self._tell(), name="gossip news")

    async def stop(self) -> None:
        """End every task."""
        if self._changed in self._log.on_change:
            self._log.on_change.remove(self._changed)
        tasks = [task for peer in self._peers.values() for task in peer.tasks]
        if self._teller is not None:
            tasks.append(self._teller)
        self._peers.clear()
        await _end(tasks)

    def peer_up(self, peer: NodeId) -> None:
        """A link to this peer is up: catch up with it, and answer it."""
        if peer not in self._peers:
            self._peers[peer] = _Peer(peer, self._means)

    async def peer_down(self, peer: NodeId) -> None:
        """The link is gone."""
        gone = self._peers.pop(peer, None)
        if gone is not None:
            await _end(gone.tasks)
            gone.recalled.set()

    async def recall(self) -> None:
        """Have each linked peer give back what this node has said by its log and not by this one,
        where it forked: what that is goes once this node begins again. Waits no longer than that
        takes, nor than `recall_s`."""
        peers = list(self._peers.values())
        for peer in peers:
            peer.recall()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._means.settings.recall_s):
                for peer in peers:
                    await peer.recalled.wait()

    def receive(self, peer: NodeId, message: LogMessage) -> None:
        """A message has come; never blocks. What a peer sends too much of is dropped."""
        known = self._peers.get(peer)
        if known is not None and not self._log.muted(peer):
            known.receive(message)

    def _changed(self, change: LogChange) -> None:
        self._news.set()

    async def _tell(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(self._means.settings.settle_s)
            self._news.clear()
            heads = heads_of(self._log.replica, 0)
            for peer in self._peers:
                with suppress(MeshError):  # its link reports its own end
                    self._send(peer, heads)


@dataclass(frozen=True, slots=True)
class _Means:
    log: EventLog
    send: Send
    settings: GossipSettings
    rng: random.Random
    on_exchange: Callable[[], None]


class _Peer:
    """One peer's two tasks: the one that asks, and the one that answers."""

    def __init__(self, peer: NodeId, means: _Means) -> None:
        self._peer = peer
        self._log = means.log
        self._send = means.send
        self._settings = means.settings
        self._rng = means.rng
        self._on_exchange = means.on_exchange
        self._requests: asyncio.Queue[LogMessage] = asyncio.Queue(_MAX_REQUESTS)
        self._answers: asyncio.Queue[LogMessage] = asyncio.Queue(1)
        self._number = 0
        self._expected = 0
        self._asked_at = -inf
        self._due = asyncio.Event()
        self._due.set()
        self.recalled = asyncio.Event()
        self.tasks = [
            asyncio.create_task(self._ask(), name=f"gossip ask {peer}"),
            asyncio.create_task(self._answer(), name=f"gossip answer {peer}"),
        ]

    def recall(self) -> None:
        """Ask it for what this node itself has said by its log; then `recalled` is set."""
        self.recalled.clear()
        self._due.set()

    def receive(self, message: LogMessage) -> None:
        """Sort a message to the task it is for; drop it when that one is not ready for it."""
        if isinstance(message, Ask | Pull | Probe):
            with suppress(asyncio.QueueFull):
                self._requests.put_nowait(message)
        elif message.number == 0 and isinstance(message, Heads):
            if wants_something(self._log.replica, message):
                self._due.set()
        elif message.number == self._expected:
            with suppress(asyncio.QueueFull):
                self._answers.put_nowait(message)

    async def _ask(self) -> None:
        failures = 0
        while True:
            await set_within(self._due, self._settings.interval_s * (1 + self._rng.random()))
            self._due.clear()
            try:
                useful = self._log.muted(self._peer) or await self._exchange()
                failures = 0 if useful else failures + 1
            except (MeshError, TimeoutError) as error:
                failures += 1
                why = str(error) or "no answer in time"
                logger.info("gossip failed: peer=%s reason=%s", self._peer, why)
            self.recalled.set()
            if failures:
                wait_s = backoff_s(failures, _FIRST_BACKOFF_S, self._settings.max_backoff_s)
                await asyncio.sleep(jittered_s(wait_s, self._rng))

    async def _exchange(self) -> bool:
        """Catch up once; False when the peer announced what it could not show, or has no end."""
        self._number += 1
        exchange = CatchUp(self._number, self._log.replica)
        message = exchange.start()
        until = asyncio.get_running_loop().time() + self._settings.max_exchange_s
        for _ in range(self._settings.max_turns):
            turn = exchange.receive(await self._request(message))
            if turn.ingest is not None:
                outcome = await self._log.ingest(turn.ingest, self._peer)
                turn = exchange.ingested(outcome)
            if turn.send is None:
                if not self.recalled.is_set():
                    await self._recall()
                self._on_exchange()
                return not turn.fruitless
            if self._log.muted(self._peer) or asyncio.get_running_loop().time() > until:
                break
            message = turn.send
        logger.info("gossip goes on later: peer=%s", self._peer)
        return False

    async def _recall(self) -> None:
        """What this node has itself said by the peer's log and not by its own, where it forked."""
        copy = self._log.peers_copy()
        while (wanted := copy.wanted) is not None:
            page = await self._request(Pull(self._number, (wanted,)))
            await copy.take(page.events if isinstance(page, Page) else ())

    async def _request(self, message: LogMessage) -> LogMessage:
        loop = asyncio.get_running_loop()
        # Whoever answers faster than an honest peer does keeps nobody busier.
        await asyncio.sleep(max(0.0, self._asked_at + 1 / _REQUESTS_PER_S - loop.time()))
        self._asked_at = loop.time()
        while not self._answers.empty():
            self._answers.get_nowait()
        self._expected = message.number
        try:
            self._send(self._peer, message)
            async with asyncio.timeout(self._settings.answer_timeout_s):
                return await self._answers.get()
        finally:
            self._expected = -1

    async def _answer(self) -> None:
        while True:
            request = await self._requests.get()
            try:
                self._send(self._peer, await self._answer_to(request))
            except LimitReached as error:
                logger.info("gossip not answered: peer=%s reason=%s", self._peer, error)
                await asyncio.sleep(_REFUSED_PAUSE_S)
            except MeshError as error:
                logger.info("gossip not answered: peer=%s reason=%s", self._peer, error)
            await asyncio.sleep(1 / _REQUESTS_PER_S)

    async def _answer_pull(self, pull: Pull) -> Page:
        """One page. Raises LimitReached for a peer that has had as much as it may in a minute."""
        peer, accounts = of_peer(self._peer), self._log.chains.accounts
        accounts.require(peer, Resource.EVENT_BYTES_PER_MINUTE)
        with accounts.hold(peer, Resource.PULLS, 1):
            page = await self._log.page(pull, self._peer)
        size_bytes = sum(len(a) + len(b) for a, b in (*page.events, *page.decisions))
        accounts.charge(peer, Resource.EVENT_BYTES_PER_MINUTE, size_bytes)
        return Page.of(pull.number, page)

    async def _answer_to(self, request: LogMessage) -> LogMessage:
        match request:
            case Pull():
                return await self._answer_pull(request)
            case Probe():
                return answer_probe(self._log.chains, request)
        return heads_of(self._log.replica, request.number)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_STOP_TIMEOUT_S)
