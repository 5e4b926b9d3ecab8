"""The sessions of one shard and what they share: streams and cache positions.

Admission is decided here, at once and strictly; nothing is ever queued behind a limit. Whoever asks
first may have everything. When nothing is left, somebody who has less than its share (the whole
divided by all who hold some or ask) gets it from those who have more: first caches that are parked,
then sessions that were silent for a while, the longest first; and whoever holds nothing at all gets
one stream even from sessions at work, if their owner keeps another. Caches grow with their
sessions; nobody's at work goes for that. Knows neither links nor torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from mesh.clock import Clock, LoopClock
from mesh.errors import (
    BadRequest,
    Busy,
    CacheFull,
    ContextTooLong,
    MeshError,
    SessionGone,
)
from mesh.ledger import Hold, Limit, Resource, ResourceLedger
from mesh.shard.admission import check_tensor
from mesh.shard.settings import ShardSettings
from mesh.types import Principal
from mesh.wire.messages import Failure, Open, Result, Step

if TYPE_CHECKING:
    from mesh.shard.compute import Lane, PendingStep
    from mesh.shard.hooks import Hook
    from mesh.shard.kv import SessionCache
    from mesh.shard.recording import Recording
    from mesh.shard.steering import Steering

Reply = Callable[[Result | Failure], None]

MAX_WAITING_STEPS = 8
"""Steps a session may have under way: chunks of a prefill follow each other without waiting."""

GROWTH = 256
"""Positions that a cache grows by at least, where there is room; a quarter of it if that is more,
so that what is copied meanwhile stays a small part of what is computed."""


@dataclass(frozen=True, slots=True)
class Place:
    """The loaded span a session runs on, its cache there, and what steers it."""

    lane: Lane
    cache: SessionCache
    hooks: tuple[Hook, ...] = ()


class Session:
    """One generation's state on this shard. Changed only by `ShardServer` and `SessionTable`."""

    def __init__(
        self,
        request: Open,
        owner: Principal,
        steering: Steering,
        recording: Recording | None = None,
    ) -> None:
        self.number = request.session
        self.owner = owner
        self.layers = steering.layers
        self.max_tokens = request.max_tokens
        """Positions it has room for now."""
        self.has_grown = False
        self.wire_dtype = request.wire_dtype
        self.steering = steering
        self.recording = recording
        self.place: Place | None = None
        """Set once the session is open."""
        self.waiting: deque[tuple[Step, Reply]] = deque()
        """Accepted steps in order; the first is the one under way once `pending` is set."""
        self.pending: PendingStep | None = None
        self.end = 0
        """Positions the cache holds after every accepted step."""
        self.last_result: Result | None = None
        """For when the last answered step is repeated; not kept while nobody can repeat it."""
        self.last_answered: int | None = None
        self.last_step: int | None = None
        self.parked = False
        self.park_when_idle = False
        self.is_sealing = False
        self.closed = False
        self.active_at = 0.0
        """The loop's time of its last step, or answer, or opening, or since when it is parked."""
        self.on_end: Callable[[MeshError], None] = lambda error: None
        """Called when the shard ends the session by itself, with the reason."""

    def silent_since(self) -> float | None:
        """Since when its asker has been free to send a step and has not; None while it is not."""
        busy = self.place is None or self.waiting or self.pending is not None or self.is_sealing
        return None if busy else self.active_at

    def check(self, step: Step, hidden_size: int) -> None:
        """Raise BadRequest or Busy when `step` cannot follow what was accepted."""
        if self.parked or self.park_when_idle:
            raise BadRequest("The session is parked.", fix="Resume it before sending steps.")
        if self.last_step is not None and step.step <= self.last_step:
            raise BadRequest(
                f"Step {step.step} comes after step {self.last_step}.",
                fix="Number the steps of a session upwards.",
                param="step",
            )
        check_tensor(step, hidden_size)
        if not 0 <= step.position <= self.end:
            raise BadRequest(
                f"The step starts at position {step.position}; the session holds {self.end}.",
                fix="Replay the missing positions first.",
                param="position",
            )
        if len(self.waiting) >= MAX_WAITING_STEPS:
            raise Busy(
                f"{len(self.waiting)} steps of this session are under way.",
                fix="Wait for a result before sending more.",
            )

    @property
    def next_growth(self) -> int:
        """By how many positions it will grow next, as far as that is known: what it once did."""
        return max(GROWTH, self.max_tokens // 4) if self.has_grown else 0

    def forget_waiting(self) -> list[tuple[Step, Reply]]:
        """Take back every accepted step; the session stands where its last result left it."""
        dropped = [*self.waiting]
        self.waiting.clear()
        self.pending = None
        self.last_step = self.last_answered
        self.end = 0 if self.place is None else self.place.cache.length
        return dropped


Ended = tuple[Session, SessionGone]
"""A session that the shard ends by itself, and why."""


@dataclass(frozen=True, slots=True)
class _Held:
    stream: Hold
    positions: Hold


class SessionTable:
    """Who is in, and how much is left; `accounts` has it per owner."""

    def __init__(self, settings: ShardSettings, clock: Clock | None = None) -> None:
        self._settings = settings
        self._active: dict[Session, _Held] = {}  # the oldest first
        self._parked: dict[Session, _Held] = {}  # the one parked longest comes first
        self.accounts = ResourceLedger(
            clock or LoopClock(),
            {
                Resource.STREAMS: Limit(total=settings.max_concurrent_streams),
                Resource.CACHE_POSITIONS: Limit(total=settings.kv_tokens),
            },
        )

    @property
    def active(self) -> int:
        """Sessions that hold a stream."""
        return len(self._active)

    @property
    def parked(self) -> int:
        """Sessions that hold only their cache."""
        return len(self._parked)

    @property
    def kv_tokens_used(self) -> int:
        """The positions that all sessions have room for."""
        return int(self.accounts.together(Resource.CACHE_POSITIONS))

    @property
    def kv_bytes(self) -> int:
        """What the caches of all sessions take on the device now."""
        return sum(s.place.cache.allocated_bytes for s in self if s.place is not None)

    def __iter__(self) -> Iterator[Session]:
        return iter([*self._active, *self._parked])

    def admit(self, session: Session, now: float) -> list[Ended]:
        """Let `session` in at the loop's time `now`; returns those that have to go for it, and why.

        They count no more, but are still to be ended. Raises Busy when no stream is free
        for its owner, CacheFull when it does not fit beside the others, ContextTooLong when it
        would not fit alone.
        """
        stream = self.accounts.hold(session.owner, Resource.STREAMS)
        positions = self.accounts.hold(session.owner, Resource.CACHE_POSITIONS)
        try:
            going = self._make_room(session, session.max_tokens, now)
        except MeshError:
            stream.close()
            positions.close()
            raise
        stream.resize(1)
        positions.resize(session.max_tokens)
        self._active[session] = _Held(stream, positions)
        session.active_at = now
        return going

    def grow(self, session: Session, positions: int, now: float) -> list[Ended]:
        """Room for so many positions in all, for a session at work; returns and raises as `admit`.

        It gets some more at once where nobody has to go for it.
        """
        ample = session.max_tokens + max(GROWTH, session.max_tokens // 4)
        free = self._settings.kv_tokens - self.kv_tokens_used - self._left_to_others(session, ample)
        ample = min(ample, session.max_tokens + max(0, free))
        wanted = max(positions, ample)
        self._require_budget(wanted)
        going = self._remove(self._for_positions(session, wanted, (), now))
        self._active[session].positions.resize(wanted)
        session.max_tokens, session.has_grown = wanted, True
        return going

    def park(self, session: Session, now: float) -> None:
        """Give the session's stream back."""
        held = self._parked[session] = self._active.pop(session)
        held.stream.resize(0)
        session.parked = True
        session.active_at = now

    def resume(self, session: Session, max_tokens: int, now: float) -> list[Ended]:
        """Take a stream again, with room for `max_tokens`. Returns and raises as `admit` does."""
        if session.place is not None:  # what is allocated is taken, wanted or not
            max_tokens = max(max_tokens, session.place.cache.capacity)
        going = self._make_room(session, max_tokens, now)
        held = self._active[session] = self._parked.pop(session)
        held.stream.resize(1)
        held.positions.resize(max_tokens)
        session.parked = False
        session.max_tokens = max_tokens
        session.active_at = now
        return going

    def remove(self, session: Session) -> None:
        """Forget the session and what it held."""
        held = self._active.pop(session, None) or self._parked.pop(session, None)
        if held is not None:
            held.stream.close()
            held.positions.close()

    def overdue(self, now: float) -> list[Ended]:
        """Sessions whose lease is over, and why they are to be ended."""
        lease_s = self._settings.session_lease_s
        over = lease_over(lease_s)
        silent = [
            (session, over)
            for session in self._active
            if (since := session.silent_since()) is not None and since <= now - lease_s
        ]
        oldest = now - self._settings.park_lease_s
        return silent + [(each, gone()) for each in self._parked if each.active_at <= oldest]

    # Who has to go

    def _make_room(self, session: Session, max_tokens: int, now: float) -> list[Ended]:
        """Whoever has to go for one more stream and for `max_tokens` positions, and is removed.

        Nothing has changed when this raises.
        """
        self._require_budget(max_tokens)
        going = self._for_a_stream(session.owner, now)
        return self._remove(going + self._for_positions(session, max_tokens, going, now))

    def _require_budget(self, positions: int) -> None:
        budget = self._settings.kv_tokens
        if positions > budget:
            raise ContextTooLong(
                f"The request needs {positions} cached positions; the shard has {budget} in all.",
                fix="Shorten the prompt, lower max_tokens, or raise kv_tokens where it runs.",
                param="max_tokens",
            )

    def _remove(self, going: Sequence[Session]) -> list[Ended]:
        for each in going:
            self.remove(each)
        return [(each, gone() if each.parked else reclaimed()) for each in going]

    def _left_to_others(self, session: Session, positions: int) -> int:
        """Of what is free, what others' answers at work need next, so that it is not for this one.

        Whoever takes no more than its share leaves room only to what it runs itself.
        """
        owner = session.owner
        held = self.accounts.held(owner, Resource.CACHE_POSITIONS) + positions
        if session in self._active or session.parked:
            held -= session.max_tokens
        is_greedy = held > self.accounts.share(owner, Resource.CACHE_POSITIONS)
        is_new = session not in self._active
        return sum(
            each.next_growth
            for each in self._active
            if each is not session and (is_greedy or (is_new and each.owner == owner))
        )

    def _for_a_stream(self, owner: Principal, now: float) -> list[Session]:
        streams = Resource.STREAMS
        if self.accounts.together(streams) < self._settings.max_concurrent_streams:
            return []
        held = self.accounts.held(owner, streams)
        share = self.accounts.share(owner, streams)
        if held < share:
            others = self._above_share(owner, streams, now)
            chosen = others or ([] if held else self._youngest(owner))
            if chosen:
                return chosen[:1]
        self.accounts.require(owner, streams, 1)
        return []

    def _for_positions(
        self, session: Session, max_tokens: int, going: Sequence[Session], now: float
    ) -> list[Session]:
        positions = Resource.CACHE_POSITIONS
        own = session.max_tokens if session.parked or session in self._active else 0
        if max_tokens <= own:
            return []
        left = self._left_to_others(session, max_tokens)
        free = self._settings.kv_tokens - self.accounts.together(positions) - left
        free += sum(each.max_tokens for each in going)
        held = self.accounts.held(session.owner, positions) - own
        share = self.accounts.share(session.owner, positions)
        candidates = [each for each in self._parked if each is not session]
        if held + max_tokens <= share:
            candidates += self._above_share(session.owner, positions, now)
        chosen: list[Session] = []
        for each in candidates:
            if free + own >= max_tokens:
                break
            if each not in going:
                chosen.append(each)
                free += each.max_tokens
        if free + own < max_tokens:
            fix = "Use another shard, or try again when an answer there has ended."
            try:
                self.accounts.require(session.owner, positions, max_tokens - own)
            except Busy as full:
                raise CacheFull(full.message, fix=fix) from None
            raise CacheFull(
                f"{max_tokens - own} cached positions do not fit beside {left} that answers at work"
                " will need next.",
                fix=fix,
            )
        return chosen

    def _above_share(self, owner: Principal, resource: Resource, now: float) -> list[Session]:
        """Silent sessions of those who have more than their share, the longest silent first."""
        share = self.accounts.share(owner, resource)
        greedy = {who for who, held in self.accounts.holders(resource).items() if held > share}
        silent = [
            (since, number, session)
            for number, session in enumerate(self._active)
            if session.owner in greedy - {owner}
            and (since := session.silent_since()) is not None
            and since <= now - self._settings.silent_s
        ]
        return [session for _, _, session in sorted(silent, key=itemgetter(0, 1))]

    def _youngest(self, owner: Principal) -> list[Session]:
        """The session that was opened last by whoever has most streams, and more than one."""
        held = self.accounts.holders(Resource.STREAMS)
        held.pop(owner, None)
        most = max(held, key=lambda who: held[who], default=None)
        if most is None or held[most] < 2:
            return []
        return [session for session in self._active if session.owner == most][-1:]


def lease_over(lease_s: float) -> SessionGone:
    """The error for a session whose asker has sent nothing for a whole lease."""
    return SessionGone(
        f"The session was closed: it got no step for {lease_s:g} s.",
        fix="Open a new one and replay the inputs; park a session that is to rest.",
    )


def reclaimed() -> SessionGone:
    """The error for a session that had to make room for somebody else's share."""
    return SessionGone(
        "The session was closed: its owner held more than its share, and another node asked.",
        fix="Open a new one, here or on another shard, and replay the inputs.",
    )


def gone() -> SessionGone:
    """The error for a session that is not here (any more)."""
    return SessionGone(
        "The shard does not hold this session.", fix="Open a new one and replay the inputs."
    )
