"""`ShardServer`: what the chat sessions of one shard share, from its weights to its health.

Everything happens on the event loop, except what the `Scheduler` takes elsewhere. Knows no links.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from mesh.clock import SystemClock, loop_time
from mesh.errors import BadRequest, MeshError, NoRoute, from_dict
from mesh.health.percentiles import percentile
from mesh.shard.admission import Ended, LayerShape, SessionTable, layers_asked, require_start
from mesh.shard.commands import ShardLoad
from mesh.shard.resident_weights import MakeRoom, ResidentWeights
from mesh.shard.scheduler import Scheduler
from mesh.shard.session import gone
from mesh.shard.sessions import ChatSession
from mesh.shard.settings import ShardSettings
from mesh.shard.steering import SessionEdits
from mesh.types import THIS_NODE, Edit, Principal, ShardDescriptor, ShardHealth
from mesh.wire.messages import Blob, Failure, Open, OpenEnds, OpenNormed, Result, Step

if TYPE_CHECKING:
    from mesh.shard.ends import LoadedEnds
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
        shape: LayerShape,
        scheduler: Scheduler,
        make_room: MakeRoom = nullcontext,
    ) -> None:
        """`load` blocks while it reads the weights; it is called off the event loop, in the block
        of `make_room`, again after each eviction. `scheduler` is of the device, shared by all its
        shards."""
        self.descriptor = descriptor
        self.settings = settings
        self.shape = shape
        self.scheduler = scheduler
        self.weights = ResidentWeights(load, settings, scheduler, make_room)
        self.sessions = SessionTable(settings)
        self.ends: ResidentWeights[LoadedEnds] | None = None
        """Embedding and head, where the shard runs them for askers that have none; loaded when the
        first comes."""
        self._clock = SystemClock()
        self._recent_ms: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._used_at = 0.0
        self._borrowed = 0
        self._sweep: asyncio.TimerHandle | None = None
        self.accounts = self.sessions.accounts
        """Streams and cache positions by who asked for them."""

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call `changed` when streams, caches or weights changed; replaces an earlier one."""
        self.weights.changed = changed
        if self.ends is not None:
            self.ends.changed = changed

    def lend_ends(
        self,
        load: Callable[[], LoadedEnds],
        make_room: MakeRoom,
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the model's ends for askers that have none, loaded as the layers are; `freed` is
        called whenever they are here no more."""
        self.ends = ResidentWeights(load, self.settings, self.scheduler, make_room)
        self.ends.freed = freed

    async def start(self) -> None:
        """Load the weights now. Raises what loading raises."""
        await self.weights.acquire()
        self._note_idle()

    async def borrow(self) -> Runtime:
        """The loaded span, loaded first when it is not here; no disuse frees it before it is
        `give_back`. Raises what loading raises."""
        self._borrowed += 1
        try:
            return await self.weights.acquire()
        except BaseException:
            self.give_back()
            raise

    def give_back(self) -> None:
        """What was borrowed once is not needed any more."""
        self._borrowed -= 1
        self._note_idle()

    def is_loaded(self, *, ends: bool) -> bool:
        """Whether a session can be opened now, one that needs the `ends` too."""
        if self.weights.loaded is None:
            return False
        return not ends or (self.ends is not None and self.ends.loaded is not None)

    async def acquire_ends(self) -> LoadedEnds:
        """The ends, loaded first where they are not here. Raises NoRoute, what loading raises."""
        if self.ends is None:
            raise _no_ends(self.descriptor)
        return await self.ends.acquire()

    def resident(self) -> Runtime | None:
        """The loaded span, if it is loaded now; whoever asks must not keep it."""
        return self.weights.loaded

    def keep_resident(self, stays: bool) -> None:
        """Whether the weights stay on the device though nobody uses them."""
        if stays != self.weights.stays:
            self.weights.stays = stays
            self._note_idle()

    @property
    def idle_s(self) -> float | None:
        """For how long no stream has needed its weights, but for parked ones; None while one does,
        or while they are not here, or where they stay, or while some of them load: that may need
        room, for which it cannot make way itself."""
        if self.weights.is_loading or (self.ends is not None and self.ends.is_loading):
            return None
        if self.sessions.active or self.weights.loaded is None or self.weights.stays:
            return None
        return loop_time() - self._used_at

    async def evict(self, why: MeshError | None = None) -> None:
        """End every session and free the weights; askers are told `why` at once, if anything."""
        for session in list(self.sessions):
            session.end_with(why or gone())
            if why is not None:
                session.on_end(why)
        await self.weights.evict()
        if self.ends is not None:
            await self.ends.evict()

    @property
    def queue_depth(self) -> int:
        """Steps accepted and not answered."""
        return sum(session.waiting for session in self.sessions)

    async def health(self) -> ShardHealth:
        """Latencies over the last steps, queue depth and streams in use."""
        ordered = sorted(self._recent_ms)
        return ShardHealth(
            online=True,
            last_seen=self._clock.now(),
            p50_latency_ms=percentile(ordered, 0.5),
            p95_latency_ms=percentile(ordered, 0.95),
            queue_depth=self.queue_depth,
            active_streams=self.sessions.active,
        )

    def load_now(self) -> ShardLoad:
        """Residence and cache budget at this moment."""
        table, runtime = self.sessions, self.weights.loaded
        ends = None if self.ends is None else self.ends.loaded
        sizes = [each.weight_bytes for each in (runtime, ends) if each is not None]
        return ShardLoad(
            runtime is not None,
            table.parked,
            table.kv_tokens_used,
            self.settings.kv_tokens,
            table.kv_bytes / 2**20,
            sum(sizes) / 2**20,
            table.parked_bytes / 2**20,
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
        layers = layers_asked(request, self.descriptor)
        require_start(layers, self.shape)
        steering = SessionEdits.check(edits, layers, self.shape.hidden_size)
        self._require_ends(request)
        session = ChatSession(self, request, owner, steering, recording)
        runtime = self.weights.loaded
        if runtime is not None and recording is None and not session.is_loading:
            session.use(runtime, ends=self.ends.loaded if self.ends is not None else None)
        try:
            going = self.sessions.admit(session, loop_time())
        except MeshError:
            session.sequence = None  # its cache is not to wait for the garbage collector
            raise
        self._end(going)
        self._watch_leases()
        self.scheduler.streams += 1
        self.weights.keep()
        if self.ends is not None and session.needs_ends:
            self.ends.keep()
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
        self._end(self.sessions.grow(session, positions, loop_time()))

    def computed(self, result: Result) -> None:
        """A step was computed: remember how long that took."""
        self._recent_ms.append(result.compute_us / 1000)

    def park(self, session: ChatSession) -> None:
        """Give its stream back."""
        self.sessions.park(session, loop_time())
        self._used_at = loop_time()
        self.scheduler.streams -= 1
        self.weights.changed()

    def resume(self, session: ChatSession, max_tokens: int) -> None:
        """Give it a stream again. Raises as `SessionTable.resume`."""
        self._end(self.sessions.resume(session, max_tokens, loop_time()))
        self.scheduler.streams += 1
        self.weights.changed()

    def freed(self, session: ChatSession) -> None:
        """It has closed and computes nothing any more."""
        if not session.parked:
            self.scheduler.streams -= 1
        self.sessions.remove(session)
        if self.ends is not None and session.needs_ends and not self._needs_ends():
            self.ends.idle()
        self._note_idle()
        self.weights.changed()

    # Private

    def _needs_ends(self) -> bool:
        return any(session.needs_ends for session in self.sessions)

    def _require_ends(self, request: Open) -> None:
        """Raise NoRoute where the session asks for ends that this shard does not run, BadRequest
        where it asks for what is none."""
        if not isinstance(request, OpenEnds):
            return
        here = self.descriptor
        lacks_embedding = request.ids and not (here.embeds and request.start == 0)
        at_the_end = here.head and request.stop == here.total_layers
        needs_end = request.candidates > 0 or isinstance(request, OpenNormed)
        if self.ends is None or lacks_embedding or (needs_end and not at_the_end):
            raise _no_ends(here)
        if request.candidates and not request.rows:
            raise BadRequest("Candidates of no rows.", fix="Ask for one row at least.")

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
        self._end(self.sessions.overdue(loop_time()))
        if any(True for _ in self.sessions):
            self._watch_leases()

    def _note_idle(self) -> None:
        self._used_at = loop_time()
        if not self._borrowed and not any(True for _ in self.sessions):
            self.weights.idle()


def _no_ends(here: ShardDescriptor) -> NoRoute:
    return NoRoute(
        f"{here.node_name} runs no embedding or no head of {here.shard_id} for others.",
        fix="Use a shard that says `embeds` or `head`, or fetch the ends: `hearthnet pull`.",
    )
