"""Who is let in to a shard, and what all its chat sessions share: streams and cache positions.

Admission is decided here, at once and strictly; nothing is ever queued behind a limit. Whoever asks
first may have everything. When nothing is left, somebody who has less than its share (the whole
divided by all who hold some or ask) gets it from those who have more: first caches that are parked,
then sessions that were silent for a while, the longest first; and whoever holds nothing at all gets
one stream even from sessions at work, if their owner keeps another. Caches grow with their
sessions; nobody's at work goes for that. Knows neither links nor torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from mesh.accounts.ledger import Hold, Limit, Resource, ResourceLedger
from mesh.clock import Clock, LoopClock
from mesh.errors import (
    BadRequest,
    Busy,
    CacheFull,
    ContextTooLong,
    MeshError,
    NoRoute,
    SessionGone,
    WeightsMismatch,
)
from mesh.models.cuts import Cuts
from mesh.shard.session import gone
from mesh.shard.sessions import GROWTH
from mesh.shard.settings import ShardSettings
from mesh.types import LayerRange, Principal, ShardDescriptor
from mesh.wire.messages import Open, OpenTaps

if TYPE_CHECKING:
    from mesh.shard.sessions import ChatSession


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Of a model: rows have `row_size` numbers, of which the first `hidden_size` are a hidden state
    (`mesh.models.row_form`); `cuts` are where sessions may begin."""

    hidden_size: int
    row_size: int
    cuts: Cuts


def require_start(layers: LayerRange, shape: LayerShape) -> None:
    """Raise BadRequest for layers of which the first uses what earlier ones have made."""
    first = shape.cuts.first(layers.start)
    if first != layers.start:
        raise BadRequest(
            f"Layers {layers} are not a session: layer {layers.start} uses what earlier layers have"
            " made.",
            fix=f"Ask for those from layer {first} on as well.",
        )


def layers_asked(request: Open | OpenTaps, here: ShardDescriptor) -> LayerRange:
    """The layers of `here` that a session is asked for.

    Raises WeightsMismatch, NoRoute (layers or model not here), or BadRequest for what is none.
    """
    if request.weights_sha256 != here.weights_sha256 and request.model_id == here.model_id:
        raise WeightsMismatch(
            f"{here.node_name} serves {here.model_id} with other weights.",
            fix="Use shards of one checkpoint; compare weights_sha256.",
        )
    if not 0 <= request.start < request.stop:
        raise BadRequest(
            f"Layers [{request.start}, {request.stop}) are not a session.",
            fix="Ask for at least one layer.",
        )
    if isinstance(request, Open) and request.max_tokens < 1:
        raise BadRequest(
            f"{request.max_tokens} tokens are not a session.",
            fix="Ask for at least one.",
            param="max_tokens",
        )
    layers = LayerRange(request.start, request.stop)
    if request.model_id != here.model_id or not here.layers.covers(layers):
        raise NoRoute(
            f"{here.node_name} serves {here.shard_id}, not {request.model_id}:{layers}.",
            fix="Use a shard that covers these layers.",
        )
    return layers


Ended = tuple["ChatSession", SessionGone]
"""A session that the shard ends by itself, and why."""


@dataclass(frozen=True, slots=True)
class _Held:
    stream: Hold
    positions: Hold


class SessionTable:
    """Who is in, and how much is left; `accounts` has it per owner."""

    def __init__(self, settings: ShardSettings, clock: Clock | None = None) -> None:
        self._settings = settings
        self._active: dict[ChatSession, _Held] = {}  # the oldest first
        self._parked: dict[ChatSession, _Held] = {}  # the one parked longest comes first
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
        return sum(s.sequence.cache.allocated_bytes for s in self if s.sequence is not None)

    @property
    def parked_bytes(self) -> int:
        """What of that those take that hold only their cache."""
        return sum(s.sequence.cache.allocated_bytes for s in self._parked if s.sequence is not None)

    def __iter__(self) -> Iterator[ChatSession]:
        return iter([*self._active, *self._parked])

    def admit(self, session: ChatSession, now: float) -> list[Ended]:
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
        session.goes_on(now)
        return going

    def grow(self, session: ChatSession, positions: int, now: float) -> list[Ended]:
        """Room for so many positions in all, for a session at work; returns and raises as `admit`.

        It gets some more at once where nobody has to go for it.
        """
        ample = session.max_tokens + max(GROWTH, session.max_tokens // 4)
        free = self._settings.kv_tokens - self.kv_tokens_used - self._left_to_others(session, ample)
        ample = min(ample, session.max_tokens + free)
        wanted = max(positions, ample)
        self._require_budget(wanted)
        going = self._remove(self._for_positions(session, wanted, (), now))
        self._active[session].positions.resize(wanted)
        session.grows_to(wanted)
        return going

    def park(self, session: ChatSession, now: float) -> None:
        """Give the session's stream back."""
        held = self._parked[session] = self._active.pop(session)
        held.stream.resize(0)
        session.rests(now)

    def resume(self, session: ChatSession, max_tokens: int, now: float) -> list[Ended]:
        """Take a stream again, with room for `max_tokens`. Returns and raises as `admit` does."""
        if session.sequence is not None:  # what is allocated is taken, wanted or not
            max_tokens = max(max_tokens, session.sequence.cache.capacity)
        going = self._make_room(session, max_tokens, now)
        held = self._active[session] = self._parked.pop(session)
        held.stream.resize(1)
        held.positions.resize(max_tokens)
        session.has_room(max_tokens)
        session.goes_on(now)
        return going

    def remove(self, session: ChatSession) -> None:
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

    def _make_room(self, session: ChatSession, max_tokens: int, now: float) -> list[Ended]:
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
                f"The request needs {positions} cached positions. As the shard has {budget} in all,"
                f" this model's maximum context length is {budget} tokens here.",
                fix="Shorten the prompt, lower max_tokens, or raise kv_tokens where it runs.",
                param="max_tokens",
            )

    def _remove(self, going: Sequence[ChatSession]) -> list[Ended]:
        for each in going:
            self.remove(each)
        return [(each, gone() if each.parked else reclaimed()) for each in going]

    def _left_to_others(self, session: ChatSession, positions: int) -> int:
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

    def _for_a_stream(self, owner: Principal, now: float) -> list[ChatSession]:
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
        self, session: ChatSession, max_tokens: int, going: Sequence[ChatSession], now: float
    ) -> list[ChatSession]:
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
        chosen: list[ChatSession] = []
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

    def _above_share(self, owner: Principal, resource: Resource, now: float) -> list[ChatSession]:
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

    def _youngest(self, owner: Principal) -> list[ChatSession]:
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
