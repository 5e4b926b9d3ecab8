"""Admission and life of the intervention sessions of one shard, on the event loop.

A session's messages come as the steps of its link session: ``int8`` tensors of bytes, so that
chunks, credits and back-pressure are those of any step; `parts` says how messages are cut. What
they mean is `session`'s business, which runs on the device's queue, in turns with chat.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mesh.clock import SystemClock
from mesh.errors import BadRequest, Busy, DeviceFailed, MeshError, NoRoute, SessionGone
from mesh.ledger import Hold, Limit, Resource, ResourceLedger, of_peer
from mesh.shard.batcher import DeviceQueue
from mesh.shard.failures import foreseen
from mesh.shard.residence import MakeRoom
from mesh.shard.sessions import Reply
from mesh.shard.taps.parts import FETCH, MAX_MESSAGE_BYTES, PART_BYTES
from mesh.types import LayerRange, Principal, ShardDescriptor
from mesh.wire.messages import Failure, OpenTaps, Result, Step, WireTensor

if TYPE_CHECKING:
    from mesh.models.load import LoadedSpan
    from mesh.shard.runtime import SpanRuntime
    from mesh.shard.server import ShardServer
    from mesh.shard.taps.session import TapSession
    from mesh.shard.taps.tree import SpanTree

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TapSettings:
    """The limits of one shard's intervention sessions.

    A session that says nothing for `silence_s` ends. Without sessions, the instrumented modules are
    dropped after `idle_s`. `memory_bytes` bounds all that one session holds, `positions` the rows
    of one forward, and those it has cached.
    """

    max_sessions: int = 4
    silence_s: float = 600.0
    idle_s: float = 600.0
    memory_bytes: int = 4 << 30
    positions: int = 32768

    @classmethod
    def of(cls, asked: Mapping[str, Any], positions: int) -> TapSettings:
        """As the daemon's ``load`` command has them, defaults where it says nothing."""
        default = cls()
        megabytes = asked.get("tap_memory_mb")
        return cls(
            max_sessions=int(asked.get("max_tap_sessions", default.max_sessions)),
            memory_bytes=default.memory_bytes if megabytes is None else int(megabytes) << 20,
            positions=positions,
        )


@dataclass(slots=True, eq=False)
class TapPlace:
    """One admitted session, on the event loop's side."""

    number: int
    layers: LayerRange
    room: Hold
    held: Hold
    """What the session holds; it refuses by itself what is too much, this is for others to see."""
    session: TapSession | None = None
    message: bytearray = field(default_factory=bytearray)
    """What has come in of the next one."""
    answer: memoryview = field(default_factory=lambda: memoryview(b""))
    busy: bool = False
    closed: bool = False
    silence: asyncio.TimerHandle | None = None


class TapServer:
    """The intervention sessions of one shard."""

    def __init__(
        self,
        shard: ShardServer,
        load: Callable[[], LoadedSpan],
        queue: DeviceQueue,
        settings: TapSettings | None = None,
        make_room: MakeRoom = nullcontext,
    ) -> None:
        """`load` reads the span's plain weights once more, in the block of `make_room`; called
        where chat's cannot be shared."""
        self._shard = shard
        self._load = load
        self._queue = queue
        self._settings = settings or TapSettings()
        self._make_room = make_room
        self.weights_mb = 0.0
        """What weights take that only interventions use."""
        most, each = self._settings.max_sessions, self._settings.memory_bytes
        own = of_peer(shard.descriptor.host)
        # A job cannot move on half-way, so nobody's is ended for somebody else's: another node than
        # this one always leaves a place.
        self.accounts = ResourceLedger(
            SystemClock(),
            {
                Resource.TAP_SESSIONS: Limit(max(1, most - 1), total=most),
                Resource.TAP_BYTES: Limit(total=most * each),
            },
            personal=lambda who, what: (
                most if who == own and what is Resource.TAP_SESSIONS else None
            ),
        )
        """Intervention sessions, and what they hold, by who asked for them."""
        self._places: set[TapPlace] = set()
        self._tree: SpanTree | None = None
        self._loading = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None

    @property
    def sessions(self) -> int:
        """Sessions admitted and not closed."""
        return len(self._places)

    def weights(self) -> list[LoadedSpan]:
        """What chat and jobs compute with now; whoever asks must not keep it."""
        runtime = self._shard.resident()
        loaded = [] if runtime is None else [runtime.loaded]
        return loaded if self._tree is None else [*loaded, self._tree.loaded]

    def admit(self, request: OpenTaps, owner: Principal) -> TapPlace:
        """Take a place for a new session of `owner`.

        Raises NoRoute, WeightsMismatch, BadRequest or Busy.
        """
        layers = self._check(request)
        if self._settings.max_sessions == 0:  # not Busy, which says that waiting helps
            raise NoRoute(
                "It takes no jobs (max_tap_sessions is 0).",
                fix="Use a shard of another node.",
            )
        room = self.accounts.hold(owner, Resource.TAP_SESSIONS, 1)
        place = TapPlace(
            request.session, layers, room, self.accounts.hold(owner, Resource.TAP_BYTES)
        )
        self._places.add(place)
        return place

    async def opened(self, place: TapPlace) -> None:
        """Wait until the session can be used. Raises MeshError, which frees the place, too."""
        try:
            tree = await foreseen(self._acquire(), "loading for interventions")
            if place.closed:
                raise _gone()  # noqa: TRY301 - as what loading raises
            from mesh.shard.taps.session import TapLimits, TapSession

            limits = TapLimits(self._settings.memory_bytes, self._settings.positions)
            place.session = TapSession(tree, place.layers, limits)
            self._listen(place)
        except BaseException:
            self.close(place)
            raise

    def submit(self, place: TapPlace, step: Step, reply: Reply) -> None:
        """One part of a message. `reply` gets a Result for each; raises what refuses a part."""
        session = place.session
        if place.closed or session is None:
            raise _gone()
        if place.busy:
            raise Busy("The session is busy.", fix="Wait for its answer.")
        self._listen(place)
        if step.position == FETCH:
            reply(_next_part(place, step))
            return
        if step.tensor.dtype != "int8" or len(step.tensor.shape) != 1:
            raise BadRequest("An intervention message is bytes.", fix="Update the asking node.")
        _take_in(place, session, step.tensor)
        if step.position:
            reply(_result(step, b"\0"))
            return
        message, place.message = place.message, bytearray()
        place.busy = True
        self._visit(place, step, reply, lambda: session.exchange(message))

    def close(self, place: TapPlace) -> None:
        """Free the session; what it has under way is unwound on the device's thread."""
        if place.closed:
            return
        place.closed = True
        self._places.discard(place)
        place.room.close()
        place.held.close()
        if place.silence is not None:
            place.silence.cancel()
        session, place.session = place.session, None
        if session is not None and not place.busy:
            self._queue.visit(session.close, _log_failure)
        if not self._places:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(self._settings.idle_s, self._forget_tree)

    def evict(self) -> None:
        """Let the modules go if no session needs them."""
        if not self._places:
            if self._idle is not None:
                self._idle.cancel()
            self._forget_tree()

    def shutdown(self) -> None:
        """End every session and let the modules go."""
        for place in list(self._places):
            self.close(place)
        if self._idle is not None:
            self._idle.cancel()
        self._forget_tree()

    # Private

    def _visit(
        self, place: TapPlace, step: Step, reply: Reply, work: Callable[[], bytes | None]
    ) -> None:
        session = place.session

        def done(future: Future[bytes | None]) -> None:
            error = future.exception()
            if session is not None and not place.closed:
                place.held.resize(session.meter.held_bytes)
            if session is not None and (place.closed or error is not None):
                place.busy = False
                self._queue.visit(session.close, _log_failure)
            if error is not None:
                logger.error("intervention failed session=%d", place.number, exc_info=error)
                reply(Failure(_failed(error).to_dict(), step.session, step.step))
                self.close(place)
                return
            answer = future.result()
            if place.closed:
                reply(Failure(_gone().to_dict(), step.session, step.step))
            elif answer is None and session is not None:
                self._visit(place, step, reply, session.go_on)
            else:
                place.busy = False
                place.answer = memoryview(answer or b"")
                reply(_next_part(place, step))

        self._queue.visit(work, done)

    def _listen(self, place: TapPlace) -> None:
        if place.silence is not None:
            place.silence.cancel()
        loop = asyncio.get_running_loop()
        place.silence = loop.call_later(self._settings.silence_s, self._silent, place)

    def _silent(self, place: TapPlace) -> None:
        if place.busy:  # it is our turn, not the job's
            self._listen(place)
        else:
            self.close(place)

    async def _acquire(self) -> SpanTree:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        async with self._loading:
            if self._tree is None:
                runtime = await self._shard.borrow()
                if (shared := await self._queue.load(lambda: _twin(runtime))) is not None:
                    self._tree = await self._queue.load(lambda: _grow(runtime, shared))
                else:
                    async with self._make_room():
                        self._tree = await self._queue.load(lambda: _grow(runtime, self._load()))
                    self.weights_mb = runtime.weight_bytes / 2**20
            return self._tree

    def _forget_tree(self) -> None:
        self._idle = None
        if not self._places:
            self._tree = None
            self.weights_mb = 0.0

    def _check(self, request: OpenTaps) -> LayerRange:
        here: ShardDescriptor = self._shard.descriptor
        if not 0 <= request.start < request.stop:
            raise BadRequest("An intervention session needs layers.", fix="Name at least one.")
        layers = LayerRange(request.start, request.stop)
        same = request.model_id == here.model_id and request.weights_sha256 == here.weights_sha256
        if not same or not here.layer_range.covers(layers):
            raise NoRoute(
                f"{here.node_name} serves {here.shard_id}, not {request.model_id}:{layers} of"
                " these weights.",
                fix="Use a shard that covers these layers.",
            )
        return layers


def _take_in(place: TapPlace, session: TapSession, part: WireTensor) -> None:
    """Add a part to the message that is coming in. Raises what refuses all of it."""
    try:
        session.mail.arrives(len(part.data))
        if len(place.message) + len(part.data) > MAX_MESSAGE_BYTES:
            raise BadRequest("An intervention message is too large.", fix="Send less at once.")
    except MeshError:
        place.message = bytearray()
        session.mail.read()
        raise
    place.message += part.data
    place.held.resize(session.meter.held_bytes)


def _twin(runtime: SpanRuntime) -> LoadedSpan | None:
    from mesh.shard.taps.twin import twin

    return twin(runtime.loaded)


def _grow(runtime: SpanRuntime, loaded: LoadedSpan) -> SpanTree:
    # nnsight takes seconds to import and is needed by interventions only.
    from mesh.shard.taps.tree import SpanTree

    return SpanTree(loaded, runtime.device)


def _next_part(place: TapPlace, step: Step) -> Result:
    part, place.answer = place.answer[:PART_BYTES], place.answer[PART_BYTES:]
    return _result(step, (b"\1" if place.answer else b"\0") + bytes(part))


def _result(step: Step, data: bytes) -> Result:
    return Result(step.session, step.step, WireTensor("int8", (len(data),), data), 0, 0)


def _gone() -> SessionGone:
    return SessionGone("The intervention session is over.", fix="Run the job again.")


def _failed(error: BaseException) -> MeshError:
    if isinstance(error, MeshError):
        return error
    return DeviceFailed(
        f"The shard could not go on ({type(error).__name__}).",
        fix="Run the job again; the details are in that node's log.",
    )


def _log_failure(future: Future[None]) -> None:
    error = future.exception()
    if error is not None:
        logger.error("closing an intervention session failed", exc_info=error)
