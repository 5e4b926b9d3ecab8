"""`ShardServer`: one shard's sessions, from admission to the last result.

Everything happens on the event loop, except what `DeviceQueue` takes elsewhere. Knows messages but
no links: answers go to the function that came with the step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mesh.clock import Clock, SystemClock
from mesh.errors import BadRequest, MeshError, from_dict
from mesh.percentiles import percentile
from mesh.shard.admission import layers_asked
from mesh.shard.batcher import DeviceQueue
from mesh.shard.compute import Lane, Outcome, PendingStep
from mesh.shard.residence import MakeRoom, Residence
from mesh.shard.sessions import Place, Reply, Session, SessionTable, gone
from mesh.shard.settings import ShardSettings
from mesh.shard.steering import Steering
from mesh.types import THIS_NODE, Edit, Principal, ShardDescriptor, ShardHealth
from mesh.wire.messages import Failure, Open, Result, Step

if TYPE_CHECKING:
    from mesh.shard.recording import Recording
    from mesh.shard.runtime import SpanRuntime

_RECENT_STEPS = 256
_SWEEPS_PER_LEASE = 8


@dataclass(frozen=True, slots=True)
class ShardLoad:
    """What a shard holds right now. `kv_mb` is what the caches' buffers take, `weights_mb` what the
    weights do."""

    loaded: bool
    parked: int
    kv_tokens_used: int
    kv_tokens: int
    kv_mb: float
    weights_mb: float


class ShardServer:
    """Serves the sessions of one shard."""

    def __init__(
        self,
        descriptor: ShardDescriptor,
        load: Callable[[], SpanRuntime],
        settings: ShardSettings,
        *,
        hidden_size: int,
        queue: DeviceQueue,
        clock: Clock | None = None,
        make_room: MakeRoom = nullcontext,
    ) -> None:
        """`load` blocks while it reads the weights; it is called off the event loop, in the block
        of `make_room`, again after each eviction. `queue` is shared by all shards of the device."""
        self.descriptor = descriptor
        self.settings = settings
        self._hidden_size = hidden_size
        self._queue = queue
        self._clock = clock or SystemClock()
        self._sessions = SessionTable(settings)
        self._residence = Residence(load, settings, queue, make_room)
        self._recent_ms: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._queue_depth = 0
        self._used_at = 0.0
        self._sweep: asyncio.TimerHandle | None = None
        self.accounts = self._sessions.accounts
        """Streams and cache positions by who asked for them."""

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call `changed` when streams, caches or residence changed; replaces an earlier one."""
        self._residence.changed = changed

    async def start(self) -> None:
        """Load the weights now. Raises what loading raises."""
        await self._residence.acquire()
        self._note_idle()

    async def borrow(self) -> SpanRuntime:
        """The loaded span, loaded first when it is not here. Raises what loading raises."""
        try:
            return (await self._residence.acquire()).runtime
        finally:
            self._note_idle()

    def resident(self) -> SpanRuntime | None:
        """The loaded span, if it is loaded now; whoever asks must not keep it."""
        return self._residence.lane.runtime if self._residence.lane is not None else None

    @property
    def idle_s(self) -> float | None:
        """For how long no stream has needed its weights, but for parked ones; None while one does,
        or while they are not here."""
        if self._sessions.active or self._residence.lane is None:
            return None
        return _now() - self._used_at

    async def evict(self, why: MeshError | None = None) -> None:
        """End every session and free the weights; askers are told `why` at once, if anything."""
        for session in list(self._sessions):
            self._abandon(session, why or gone())
            if why is not None:
                session.on_end(why)
        await self._residence.evict()

    async def health(self) -> ShardHealth:
        """Latencies over the last steps, queue depth and streams in use."""
        ordered = sorted(self._recent_ms)
        return ShardHealth(
            shard_id=self.descriptor.shard_id,
            online=True,
            last_seen=self._clock.now(),
            p50_latency_ms=percentile(ordered, 0.5),
            p95_latency_ms=percentile(ordered, 0.95),
            queue_depth=self._queue_depth,
            active_streams=self._sessions.active,
        )

    def load_now(self) -> ShardLoad:
        """Residence and cache budget at this moment."""
        table, lane = self._sessions, self._residence.lane
        return ShardLoad(
            lane is not None,
            table.parked,
            table.kv_tokens_used,
            self.settings.kv_tokens,
            table.kv_bytes / 2**20,
            0.0 if lane is None else lane.runtime.weight_bytes / 2**20,
        )

    def admit(
        self,
        request: Open,
        edits: Sequence[Edit] = (),
        recording: Recording | None = None,
        owner: Principal = THIS_NODE,
    ) -> Session:
        """Take a stream and cache room for a new session of `owner`, at once; `edits` steer it,
        `recording` writes down what it computes.

        It can be used after `opened`. Raises WeightsMismatch, NoRoute (layers or model not here),
        BadRequest, BadSteering, Busy, CacheFull or ContextTooLong, and has then changed
        nothing.
        """
        steering = Steering.check(edits, layers_asked(request, self.descriptor), self._hidden_size)
        session = Session(request, owner, steering, recording)
        lane = self._residence.lane
        place = _place(lane, session) if lane is not None and recording is None else None
        self._let_go(self._sessions.admit(session, _now()))
        self._watch_leases()
        self._queue.sessions += 1
        self._residence.keep()
        session.place = place
        self._residence.changed()
        return session

    async def opened(self, session: Session) -> None:
        """Wait until the weights are here and `session` can compute.

        Raises what loading raises, BadSteering and DiskFull (the session is then freed), and
        SessionGone when it was closed meanwhile.
        """
        if session.place is not None:
            return
        try:
            lane = await self._residence.acquire()
            place = _place(lane, session)
            if session.recording is not None:
                taps = await session.recording.start(lane.runtime, session.layers)
                place = replace(place, hooks=(*place.hooks, *taps))
        except BaseException:
            self.close(session)
            raise
        if session.closed:
            raise gone()
        session.place = place
        session.active_at = _now()

    def submit(self, session: Session, step: Step, reply: Reply) -> None:
        """Compute `step`; `reply` gets its Result or Failure, on the event loop, perhaps right now.

        The last answered step is answered again from memory; one that is under way is not started
        twice. A session that needs more positions than it has room for gets them here. Raises
        SessionGone, BadRequest, ContextTooLong, CacheFull or Busy for a step that is refused; the
        session is then as before.
        """
        if session.closed:
            raise gone()
        if session.place is None:
            raise BadRequest("The session is still opening.", fix="Wait for its `Opened`.")
        if self._is_repeated(session, step, reply):
            return
        session.check(step, self._hidden_size)
        self._grow(session, session.place, step.position + step.tensor.shape[1])
        session.active_at = _now()
        session.waiting.append((step, reply))
        session.last_step = step.step
        session.end = step.position + step.tensor.shape[1]
        self._queue_depth += 1
        if len(session.waiting) == 1:
            self._begin(session, session.place)

    async def seal(self, session: Session) -> list[dict[str, Any]]:
        """See `Recording.seal`. Raises BadRequest for one that records nothing, or is busy."""
        if session.recording is None or session.waiting:
            raise BadRequest(
                "The session has nothing to seal yet.", fix="Wait for the answers to its steps."
            )
        session.is_sealing = True
        try:
            return await session.recording.seal()
        finally:
            session.is_sealing = False
            session.active_at = _now()

    async def forward(self, session: Session, step: Step) -> Result:
        """As `submit`, awaited. Raises what a refused or failed step carries."""
        answer: asyncio.Future[Result | Failure] = asyncio.get_running_loop().create_future()

        def settle(message: Result | Failure) -> None:
            if not answer.done():
                answer.set_result(message)

        self.submit(session, step, settle)
        message = await answer
        if isinstance(message, Failure):
            raise from_dict(message.error)
        return message

    def park(self, session: Session) -> None:
        """Give the stream back once no step is under way; the cache stays for `park_lease_s`."""
        if session.closed or session.parked:
            return
        if session.waiting:
            session.park_when_idle = True
            return
        session.park_when_idle = False
        session.last_result = None  # activations are kept no longer than they are of use
        self._sessions.park(session, _now())
        self._used_at = _now()
        self._queue.sessions -= 1
        self._residence.changed()

    def resume(self, session: Session, max_tokens: int) -> None:
        """Take a stream for a parked session, with room for `max_tokens` positions in all.

        Raises SessionGone, Busy, CacheFull, or BadRequest (not parked, no tokens); the session is
        then as before.
        """
        if session.closed or session.place is None:
            raise gone()
        if not session.parked or max_tokens < 1:
            raise BadRequest("Only a parked session is resumed.", fix="Park it first.")
        self._let_go(self._sessions.resume(session, max_tokens, _now()))
        session.place.cache.max_tokens = session.max_tokens
        self._queue.sessions += 1
        self._residence.changed()

    def close(self, session: Session) -> None:
        """Free the session, right after the step that is being computed if there is one."""
        if session.closed:
            return
        session.closed = True
        if session.recording is not None:
            session.recording.abort()
        self._queue_depth -= len(session.waiting)
        pending = session.pending
        session.forget_waiting()
        if pending is not None:
            pending.cancelled = True
            if pending.running:
                session.pending = pending
                return
        self._free(session)

    # One step

    def _grow(self, session: Session, place: Place, positions: int) -> None:
        if positions > session.max_tokens:
            self._let_go(self._sessions.grow(session, positions, _now()))
            place.cache.max_tokens = session.max_tokens

    def _begin(self, session: Session, place: Place) -> None:
        step, _ = session.waiting[0]
        pending = PendingStep(
            place.lane,
            session.layers,
            place.cache,
            step.position,
            step.tensor,
            session.wire_dtype,
            lambda outcome: self._finished(session, place, outcome),
            place.hooks,
        )
        session.pending = pending
        self._queue.submit(pending)

    def _finished(self, session: Session, place: Place, outcome: Outcome) -> None:
        session.pending = None
        session.active_at = _now()
        if session.closed:
            self._free(session)
            return
        if session.recording is not None:
            rows = 0 if outcome.tensor is None else outcome.tensor.shape[1]
            session.recording.keep(rows, lambda: self._answer(session, place, outcome))
        else:
            self._answer(session, place, outcome)

    def _answer(self, session: Session, place: Place, outcome: Outcome) -> None:
        if outcome.tensor is None:
            self._fail_waiting(session, outcome.error or gone())
        else:
            self._recent_ms.append(outcome.compute_us / 1000)
            step, reply = session.waiting.popleft()
            self._queue_depth -= 1
            session.last_answered = step.step
            session.last_result = Result(
                step.session, step.step, outcome.tensor, outcome.compute_us, outcome.queue_us
            )
            reply(session.last_result)
        if session.waiting:
            self._begin(session, place)
        elif session.park_when_idle:
            self.park(session)

    def _fail_waiting(self, session: Session, error: MeshError) -> None:
        # What follows a failed step starts beyond the cache's end: it cannot run either.
        dropped = session.forget_waiting()
        self._queue_depth -= len(dropped)
        for step, reply in dropped:
            reply(Failure(error.to_dict(), step.session, step.step))

    def _is_repeated(self, session: Session, step: Step, reply: Reply) -> bool:
        last = session.last_result
        if last is not None and step.step == last.step:
            reply(last)
            return True
        return any(step.step == accepted.step for accepted, _ in session.waiting)

    # Admission and release

    def _abandon(self, session: Session, error: MeshError) -> None:
        waiting = [*session.waiting]
        self.close(session)
        for step, reply in waiting:
            reply(Failure(error.to_dict(), step.session, step.step))

    def _let_go(self, ended: Sequence[tuple[Session, MeshError]]) -> None:
        """End sessions by the shard's own will; who has one in use is told at once."""
        for session, error in ended:
            was_open = not session.parked
            self._abandon(session, error)
            if was_open:
                session.on_end(error)

    def _watch_leases(self) -> None:
        if self._sweep is None:
            shortest_s = min(self.settings.session_lease_s, self.settings.park_lease_s)
            loop = asyncio.get_running_loop()
            self._sweep = loop.call_later(shortest_s / _SWEEPS_PER_LEASE, self._end_overdue)

    def _end_overdue(self) -> None:
        self._sweep = None
        self._let_go(self._sessions.overdue(_now()))
        if any(True for _ in self._sessions):
            self._watch_leases()

    def _free(self, session: Session) -> None:
        if not session.parked:
            self._queue.sessions -= 1
        self._sessions.remove(session)
        session.place = None
        self._note_idle()
        self._residence.changed()

    def _note_idle(self) -> None:
        self._used_at = _now()
        if not any(True for _ in self._sessions):
            self._residence.idle()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _place(lane: Lane, session: Session) -> Place:
    hooks = session.steering.hooks(lane.runtime)
    return Place(lane, lane.runtime.new_cache(session.max_tokens), hooks)
