"""`ShardServer`: what the chat sessions of one shard share, from its weights to its health.

Everything happens on the event loop, except what the `Scheduler` takes elsewhere. Knows no links.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from mesh.clock import Clock, SystemClock
from mesh.errors import MeshError, from_dict
from mesh.health.percentiles import percentile
from mesh.shard.admission import Ended, SessionTable, layers_asked
from mesh.shard.commands import ShardLoad
from mesh.shard.resident_weights import MakeRoom, ResidentWeights
from mesh.shard.scheduler import Scheduler
from mesh.shard.sessions import ChatSession, gone
from mesh.shard.settings import ShardSettings
from mesh.shard.steering import SessionEdits
from mesh.types import THIS_NODE, Edit, Principal, ShardDescriptor, ShardHealth
from mesh.wire.messages import Blob, Failure, Open, Result, Step

if TYPE_CHECKING:
    from mesh.shard.recording import Recording
    from mesh.shard.runtime import Runtime

_RECENT_STEPS = 256
_SWEEPS_PER_LEASE = 8


class ShardServer:
    """Serves the sessions of one shard."""

    def __init__(
        self,
        descriptor: ShardDescriptor,
        load: Callable[[], Runtime],
        settings: ShardSettings,
        *,
        hidden_size: int,
        scheduler: Scheduler,
        clock: Clock | None = None,
        make_room: MakeRoom = nullcontext,
    ) -> None:
        """`load` blocks while it reads the weights; it is called off the event loop, in the block
        of `make_room`, again after each eviction. `scheduler` is of the device, shared by all its
        shards."""
        self.descriptor = descriptor
        self.settings = settings
        self.hidden_size = hidden_size
        self.scheduler = scheduler
        self.weights = ResidentWeights(load, settings, scheduler, make_room)
        self.sessions = SessionTable(settings)
        self._clock = clock or SystemClock()
        self._recent_ms: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._used_at = 0.0
        self._sweep: asyncio.TimerHandle | None = None
        self.accounts = self.sessions.accounts
        """Streams and cache positions by who asked for them."""

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call `changed` when streams, caches or weights changed; replaces an earlier one."""
        self.weights.changed = changed

    async def start(self) -> None:
        """Load the weights now. Raises what loading raises."""
        await self.weights.acquire()
        self._note_idle()

    async def borrow(self) -> Runtime:
        """The loaded span, loaded first when it is not here. Raises what loading raises."""
        try:
            return await self.weights.acquire()
        finally:
            self._note_idle()

    def resident(self) -> Runtime | None:
        """The loaded span, if it is loaded now; whoever asks must not keep it."""
        return self.weights.runtime

    def keep_resident(self, stays: bool) -> None:
        """Whether the weights stay on the device though nobody uses them."""
        if stays != self.weights.stays:
            self.weights.stays = stays
            self._note_idle()

    @property
    def idle_s(self) -> float | None:
        """For how long no stream has needed its weights, but for parked ones; None while one does,
        or while they are not here, or where they stay."""
        if self.sessions.active or self.weights.runtime is None or self.weights.stays:
            return None
        return _now() - self._used_at

    async def evict(self, why: MeshError | None = None) -> None:
        """End every session and free the weights; askers are told `why` at once, if anything."""
        for session in list(self.sessions):
            session.end_with(why or gone())
            if why is not None:
                session.on_end(why)
        await self.weights.evict()

    @property
    def queue_depth(self) -> int:
        """Steps accepted and not answered."""
        return sum(session.waiting for session in self.sessions)

    async def health(self) -> ShardHealth:
        """Latencies over the last steps, queue depth and streams in use."""
        ordered = sorted(self._recent_ms)
        return ShardHealth(
            shard_id=self.descriptor.shard_id,
            online=True,
            last_seen=self._clock.now(),
            p50_latency_ms=percentile(ordered, 0.5),
            p95_latency_ms=percentile(ordered, 0.95),
            queue_depth=self.queue_depth,
            active_streams=self.sessions.active,
        )

    def load_now(self) -> ShardLoad:
        """Residence and cache budget at this moment."""
        table, runtime = self.sessions, self.weights.runtime
        return ShardLoad(
            runtime is not None,
            table.parked,
            table.kv_tokens_used,
            self.settings.kv_tokens,
            table.kv_bytes / 2**20,
            0.0 if runtime is None else runtime.weight_bytes / 2**20,
        )

    def admit(
        self,
        request: Open,
        owner: Principal = THIS_NODE,
        edits: Sequence[Edit] = (),
        recording: Recording | None = None,
    ) -> ChatSession:
        """Take a stream and cache room for a new session of `owner`, at once; `edits` steer it,
        `recording` writes down what it computes.

        It can be used after `opened`. Raises WeightsMismatch, NoRoute (layers or model not here),
        BadRequest, BadSteering, Busy, CacheFull or ContextTooLong, and has then changed
        nothing.
        """
        steering = SessionEdits.check(
            edits, layers_asked(request, self.descriptor), self.hidden_size
        )
        session = ChatSession(self, request, owner, steering, recording)
        if self.weights.runtime is not None and recording is None:
            session.use(self.weights.runtime)
        self._end(self.sessions.admit(session, _now()))
        self._watch_leases()
        self.scheduler.streams += 1
        self.weights.keep()
        self.weights.changed()
        return session

    async def forward(self, session: ChatSession, step: Step) -> Result:
        """The answer to `step`. Raises what a refused or failed step carries."""
        answer: asyncio.Future[Result | Failure | Blob] = asyncio.get_running_loop().create_future()

        def settle(message: Result | Failure | Blob) -> None:
            if not answer.done():
                answer.set_result(message)

        session.submit(step, settle)
        message = await answer
        if isinstance(message, Failure):
            raise from_dict(message.error)
        assert isinstance(message, Result)  # noqa: S101 - what a chat session answers a step with
        return message

    # For sessions, whose state it is not

    def grow(self, session: ChatSession, positions: int) -> None:
        """Room for so many positions in all. Raises as `SessionTable.grow`."""
        self._end(self.sessions.grow(session, positions, _now()))

    def computed(self, result: Result) -> None:
        """A step was computed: remember how long that took."""
        self._recent_ms.append(result.compute_us / 1000)

    def park(self, session: ChatSession) -> None:
        """Give its stream back."""
        self.sessions.park(session, _now())
        self._used_at = _now()
        self.scheduler.streams -= 1
        self.weights.changed()

    def resume(self, session: ChatSession, max_tokens: int) -> None:
        """Give it a stream again. Raises as `SessionTable.resume`."""
        self._end(self.sessions.resume(session, max_tokens, _now()))
        self.scheduler.streams += 1
        self.weights.changed()

    def freed(self, session: ChatSession) -> None:
        """It has closed and computes nothing any more."""
        if not session.parked:
            self.scheduler.streams -= 1
        self.sessions.remove(session)
        self._note_idle()
        self.weights.changed()

    # Private

    def _end(self, ended: Sequence[Ended]) -> None:
        """End sessions by the shard's own will; who has one in use is told at once."""
        for session, error in ended:
            was_open = not session.parked
            session.end_with(error)
            if was_open:
                session.on_end(error)

    def _watch_leases(self) -> None:
        if self._sweep is None:
            shortest_s = min(self.settings.session_lease_s, self.settings.park_lease_s)
            loop = asyncio.get_running_loop()
            self._sweep = loop.call_later(shortest_s / _SWEEPS_PER_LEASE, self._end_overdue)

    def _end_overdue(self) -> None:
        self._sweep = None
        self._end(self.sessions.overdue(_now()))
        if any(True for _ in self.sessions):
            self._watch_leases()

    def _note_idle(self) -> None:
        self._used_at = _now()
        if not any(True for _ in self.sessions):
            self.weights.idle()


def _now() -> float:
    return asyncio.get_running_loop().time()
