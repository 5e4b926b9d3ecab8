"""Admission and life of the intervention sessions of one shard, on the event loop.

A session's messages and answers are `Blob`s, in parts of at most `PART_BYTES`. What they mean is
`session`'s business, which runs when the scheduler says, in turns with chat.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mesh.accounts.ledger import Limit, Resource, ResourceLedger, of_peer
from mesh.clock import SystemClock
from mesh.errors import (
    BadRequest,
    Busy,
    DeviceFailed,
    MeshError,
    NoRoute,
    SessionGone,
    as_mesh_error,
)
from mesh.shard.admission import layers_asked
from mesh.shard.failures import device_failed
from mesh.shard.resident_weights import MakeRoom
from mesh.shard.scheduler import Reply, Scheduler
from mesh.shard.session import Session
from mesh.shard.taps.borrowing import sharing
from mesh.shard.taps.parts import MAX_MESSAGE_BYTES, PART_BYTES
from mesh.types import LayerRange, Principal
from mesh.wire.messages import Blob, BlobKind, Failure, OpenTaps, Step

if TYPE_CHECKING:
    from mesh.models.load import LoadedSpan
    from mesh.shard.runtime import Runtime
    from mesh.shard.server import ShardServer
    from mesh.shard.taps.session import TapSession
    from mesh.shard.taps.tree import SpanTree
    from mesh.shard.weight_check import Checkable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TapSettings:
    """The limits of one shard's intervention sessions.

    A session that says nothing for `silence_s` ends. Without sessions, the instrumented modules are
    dropped after `idle_s`. `memory_bytes` bounds all that one session holds, `positions` the rows
    of one forward, and those it has cached. Answers are given in parts of at most `part_bytes`.
    """

    max_sessions: int = 4
    silence_s: float = 600.0
    idle_s: float = 600.0
    memory_bytes: int = 4 << 30
    positions: int = 32768
    part_bytes: int = PART_BYTES


class JobSession(Session):
    """A job's session on one shard, on the event loop's side; `tap` is the device's."""

    purpose = "taps"

    def __init__(
        self, server: TapServer, number: int, owner: Principal, layers: LayerRange
    ) -> None:
        super().__init__(number, owner, layers)
        self.tap: TapSession | None = None
        """Set once the session is open."""
        self.message = bytearray()
        """What has come in of the next question."""
        self._server = server
        self._place = server.accounts.hold(owner, Resource.TAP_SESSIONS, 1)
        # It refuses by itself what is too much, this is for others to see.
        self._held = server.accounts.hold(owner, Resource.TAP_BYTES)
        self._answer = memoryview(b"")
        self._busy = False
        self._silence: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether there are layers to tap."""
        return self.tap is not None

    async def opened(self) -> None:
        """Wait until there are layers to tap. Raises MeshError, and is closed then."""
        if self.closed:
            raise _gone()
        try:
            tap = await self._server.tap(self.layers)
            if self.closed:
                raise _gone()  # noqa: TRY301 - as what loading raises
        except BaseException:
            self.close()
            raise
        self.tap = tap
        self._listen()

    def submit(self, message: Step | Blob, reply: Reply) -> None:
        """See `Session`: every part of a question is answered, the last one with the answer."""
        if self.closed or self.tap is None:
            raise _gone()
        if self._busy:
            raise Busy("The session is busy.", fix="Wait for its answer.")
        if not isinstance(message, Blob):
            raise BadRequest("A job's session takes blobs.", fix="Update the asking node.")
        self._listen()
        if message.kind is BlobKind.ANSWER:
            if message.offset >= max(1, len(self._answer)):
                raise BadRequest("The answer has no such part.", fix="Fetch it in order.")
            if self._answer:  # else it only says that it is still there
                self._give(message.offset, reply)
            return
        self._take_in(message, self.tap)
        if message.end < message.length:
            reply(Blob(self.number, BlobKind.QUESTION, message.length, message.end))
            return
        question, self.message = self.message, bytearray()
        self._busy = True
        self._visit(self.tap, lambda tap: tap.exchange(question), reply)

    def close(self) -> None:
        """See `Session`; what it has under way is unwound on the device's thread."""
        if self.closed:
            return
        self.closed = True
        self._place.close()
        self._held.close()
        if self._silence is not None:
            self._silence.cancel()
        tap, self.tap = self.tap, None
        if tap is not None and not self._busy:
            self._unwind(tap)
        self._server.freed(self)

    def end(self) -> None:
        """Close it by the shard's own will: its asker is told at once."""
        self.close()
        self.on_end(_gone())

    # Private

    def _take_in(self, part: Blob, tap: TapSession) -> None:
        """Add a part to the question that is coming in. Raises what refuses all of it."""
        try:
            tap.mail.arrives(len(part.data))
            if part.length > MAX_MESSAGE_BYTES or len(part.data) > PART_BYTES:
                raise BadRequest("An intervention message is too large.", fix="Send less at once.")
            if part.offset != len(self.message):
                raise BadRequest("A part is missing.", fix="Send the parts in their order.")
        except MeshError:
            self.message = bytearray()
            tap.mail.read()
            raise
        self.message += part.data
        self._held.resize(tap.meter.held_bytes)

    def _visit(
        self, tap: TapSession, work: Callable[[TapSession], bytes | None], reply: Reply
    ) -> None:
        """Compute for the job until there is an answer, or it is to be seen that there is none."""

        def done(future: Future[bytes | None]) -> None:
            error = future.exception()
            if self.closed:
                self._unwind(tap)
                reply(Failure(_failed(error or _gone()).to_dict(), self.number))
                return
            self._held.resize(tap.meter.held_bytes)
            if error is not None:
                logger.error("intervention failed session=%d", self.number, exc_info=error)
                self._busy = False
                self.close()
                reply(Failure(_failed(error).to_dict(), self.number))
            elif (answer := future.result()) is None:
                self._visit(tap, lambda tap: tap.go_on(), reply)
            else:
                self._busy = False
                self._answer = memoryview(answer)
                self._give(0, reply)

        self._server.scheduler.visit(lambda: work(tap), done)

    def _give(self, offset: int, reply: Reply) -> None:
        """The part of the answer from `offset` on; once all is given, nothing of it is kept."""
        length, most = len(self._answer), self._server.settings.part_bytes
        part = Blob(self.number, BlobKind.ANSWER, length, offset, self._answer[offset:][:most])
        if part.end >= length:
            self._answer = memoryview(b"")
        reply(part)

    def _unwind(self, tap: TapSession) -> None:
        self._server.scheduler.visit(tap.close, _log_failure)

    def _listen(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
        loop = asyncio.get_running_loop()
        self._silence = loop.call_later(self._server.settings.silence_s, self._silent)

    def _silent(self) -> None:
        if self._busy:  # it is our turn, not the job's
            self._listen()
        else:
            self.end()


class TapServer:
    """The intervention sessions of one shard."""

    def __init__(
        self,
        shard: ShardServer,
        load: Callable[[], LoadedSpan],
        scheduler: Scheduler,
        settings: TapSettings | None = None,
        make_room: MakeRoom = nullcontext,
    ) -> None:
        """`load` reads the span's plain weights once more, in the block of `make_room`; called
        where chat's cannot be shared."""
        self._shard = shard
        self._load = load
        self.scheduler = scheduler
        self.settings = settings or TapSettings()
        self._make_room = make_room
        self.weights_mb = 0.0
        """What weights take that only interventions use."""
        self.weights_freed: Callable[[], None] = lambda: None  # called once they are let go
        most, each = self.settings.max_sessions, self.settings.memory_bytes
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
        self.sessions_so_far = 0
        self._sessions: set[JobSession] = set()
        self._tree: SpanTree | None = None
        self._borrows = False
        self._loading = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None

    @property
    def sessions(self) -> int:
        """Sessions admitted and not closed."""
        return len(self._sessions)

    @property
    def open_sessions(self) -> tuple[JobSession, ...]:
        """Those sessions."""
        return tuple(self._sessions)

    def weights(self) -> list[Checkable]:
        """What chat and jobs compute with now; whoever asks must not keep it."""
        return [each for each in (self._shard.resident(), self._tree) if each is not None]

    def admit(self, request: OpenTaps, owner: Principal) -> JobSession:
        """Take a place for a new session of `owner`.

        Raises NoRoute, WeightsMismatch, BadRequest or Busy.
        """
        layers = layers_asked(request, self._shard.descriptor)
        if self.settings.max_sessions == 0:  # not Busy, which says that waiting helps
            raise NoRoute(
                "It takes no jobs (max_tap_sessions is 0).",
                fix="Use a shard of another node.",
            )
        session = JobSession(self, request.session, owner, layers)
        self._sessions.add(session)
        self.sessions_so_far += 1
        return session

    async def tap(self, layers: LayerRange) -> TapSession:
        """The device's side of a new session. Raises MeshError."""
        tree = await as_mesh_error(self._acquire(), "loading for interventions", device_failed)
        if not self._sessions:  # whoever asked has gone meanwhile
            self._note_idle()
        from mesh.shard.taps.session import TapLimits, TapSession

        return TapSession(
            tree, layers, TapLimits(self.settings.memory_bytes, self.settings.positions)
        )

    def freed(self, session: JobSession) -> None:
        """It has closed."""
        self._sessions.discard(session)
        if not self._sessions:
            self._note_idle()

    def evict(self) -> None:
        """Let the modules go if no session needs them."""
        if not self._sessions:
            if self._idle is not None:
                self._idle.cancel()
            self._forget_tree()

    def shutdown(self) -> None:
        """End every session and let the modules go, what is still loading as well; for good."""
        self.settings = replace(self.settings, idle_s=0.0)
        for session in list(self._sessions):
            session.end()
        if self._idle is not None:
            self._idle.cancel()
        self._forget_tree()

    # Private

    def _note_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(self.settings.idle_s, self._forget_tree)

    async def _acquire(self) -> SpanTree:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        async with self._loading:
            if self._tree is None:
                self._tree = await self._new_tree()
            return self._tree

    async def _new_tree(self) -> SpanTree:
        """While its weights are chat's, those are borrowed: freeing them there would free nothing,
        and chat would load them once more beside it."""
        runtime = await self._shard.borrow()
        try:
            if (shared := await self.scheduler.load(lambda: sharing(runtime.loaded))) is not None:
                tree = await self.scheduler.load(lambda: _grow(runtime, shared))
                self._borrows = True
            else:
                async with self._make_room():
                    tree = await self.scheduler.load(lambda: _grow(runtime, self._load()))
                self.weights_mb = runtime.weight_bytes / 2**20
            return tree
        finally:
            if not self._borrows:
                self._shard.give_back()

    def _forget_tree(self) -> None:
        self._idle = None
        if not self._sessions:
            if self.weights_mb:
                self.weights_freed()
            self._tree, self.weights_mb = None, 0.0
            if self._borrows:
                self._borrows = False
                self._shard.give_back()


# nnsight takes seconds to import and is needed by interventions only.
def _grow(runtime: Runtime, loaded: LoadedSpan) -> SpanTree:
    from mesh.shard.taps.tree import SpanTree

    return SpanTree(loaded, runtime.device)


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
