"""The sessions of a link, chat's and jobs', behind one interface; and those of chat.

A session is admitted, opened, fed and closed alike, whoever it is for. Knows neither links nor
what else is computed.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from mesh.errors import BadRequest, MeshError, SessionGone
from mesh.shard.prefixes import copy_prefix
from mesh.shard.scheduler import Reply, Sequence, Task
from mesh.types import LayerRange, Principal
from mesh.wire.messages import Blob, Failure, Open, Result, Step

if TYPE_CHECKING:
    from mesh.shard.hooks import Hook
    from mesh.shard.recording import Recording
    from mesh.shard.runtime import Runtime
    from mesh.shard.server import ShardServer
    from mesh.shard.steering import SessionEdits

GROWTH = 256
"""Positions that a cache grows by at least, where there is room; a quarter of it if that is more,
so that what is copied meanwhile stays a small part of what is computed."""

_WIRE_DTYPES = frozenset({"fp16", "bf16", "fp32"})


class Session(ABC):
    """One session, from its admission until it is `closed`."""

    purpose: ClassVar[str]
    """As the link of an asker calls it in its tokens and in `status`."""

    def __init__(self, number: int, owner: Principal, layers: LayerRange) -> None:
        self.number = number
        self.owner = owner
        self.layers = layers
        self.max_tokens = 0
        """Positions it has room for now; 0 where that is not told."""
        self.closed = False
        self.on_end: Callable[[MeshError], None] = lambda error: None
        """Called when the shard ends the session by itself, with the reason."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether it can compute; until then `opened` is to be awaited."""

    @property
    def is_loading(self) -> bool:
        """Whether its asker is to be told that the weights have to be read first."""
        return False

    @abstractmethod
    async def opened(self) -> None:
        """Wait until it can compute. Raises MeshError, and is closed then."""

    @abstractmethod
    def submit(self, message: Step | Blob, reply: Reply) -> None:
        """Take the next message; `reply` gets what is answered, on the event loop, perhaps right
        now. Raises MeshError for what is refused; the session is then as before."""

    def park(self) -> None:
        """Give its stream back. Raises BadRequest where there is none."""
        raise _not_for_jobs("parked")

    def resume(self, max_tokens: int) -> None:
        """Take a stream again, with room for `max_tokens` positions in all. Raises MeshError."""
        raise _not_for_jobs("resumed")

    async def seal(self) -> list[dict[str, Any]]:
        """End what it records: what is said of each file. Raises MeshError."""
        raise _not_for_jobs("sealed")

    async def copy_prefix(self, source: Session, positions: int) -> int:
        """Begin as `source` does: how many of its first `positions` this holds then.

        Raises MeshError; it is as before then, or closed.
        """
        raise _not_for_jobs("begun as another")

    @abstractmethod
    def close(self) -> None:
        """Free it, right after what is being computed for it if there is something."""


class ChatSession(Session):
    """One generation's state on a shard. Who may be in, and with how much, is `admission`'s."""

    purpose = "tensors"

    def __init__(
        self,
        server: ShardServer,
        request: Open,
        owner: Principal,
        steering: SessionEdits,
        recording: Recording | None = None,
    ) -> None:
        super().__init__(request.session, owner, steering.layers)
        self.max_tokens = request.max_tokens
        self.has_grown = False
        self.recording = recording
        self.sequence: Sequence | None = None
        """Set once the session is open."""
        self.end = 0
        """Positions the cache holds after every accepted step."""
        self.last_result: Result | None = None
        """For when the last answered step is repeated; not kept while nobody can repeat it."""
        self.parked = False
        self.active_at = 0.0
        """The loop's time of its last step, or answer, or opening, or since when it is parked."""
        self._server = server
        self._wire_dtype = request.wire_dtype
        self._steering = steering
        self._last_answered: int | None = None
        self._last_step: int | None = None
        self._park_when_idle = False
        self._is_sealing = False
        self._is_copying = False

    @property
    def server(self) -> ShardServer:
        """The shard that it is a session of."""
        return self._server

    @property
    def is_open(self) -> bool:
        """Whether it has a cache and may compute."""
        return self.sequence is not None

    @property
    def is_loading(self) -> bool:
        """Whether the weights have to be read first."""
        return self._server.resident() is None

    @property
    def waiting(self) -> int:
        """How many accepted steps are not answered yet."""
        return 0 if self.sequence is None else len(self.sequence.waiting)

    def silent_since(self) -> float | None:
        """Since when its asker has been free to send a step and has not; None while it is not."""
        at_work = self.waiting or self._is_sealing or self._is_copying
        busy = self.sequence is None or self.closed or at_work
        return None if busy else self.active_at

    @property
    def next_growth(self) -> int:
        """By how many positions it will grow next, as far as that is known: what it once did."""
        return max(GROWTH, self.max_tokens // 4) if self.has_grown else 0

    # Opening

    def use(self, runtime: Runtime, hooks: Iterable[Hook] = ()) -> None:
        """Compute with this, and call these beside what steers it. Raises BadSteering."""
        all_hooks = (*self._steering.hooks(runtime), *hooks)
        self.sequence = Sequence(
            runtime,
            self.layers,
            runtime.new_cache(self.max_tokens, all_hooks),
            self._wire_dtype,
            self._server.settings,
            self._finished,
            all_hooks,
        )

    async def opened(self) -> None:
        """See `Session`. Raises what loading raises, BadSteering, DiskFull, and SessionGone when it
        was closed meanwhile."""
        if self.sequence is not None:
            return
        try:
            runtime = await self._server.weights.acquire()
            hooks = (
                await self.recording.start(runtime, self.layers)
                if self.recording is not None
                else ()
            )
            if self.closed:
                raise gone()  # noqa: TRY301 - as what loading raises
            self.use(runtime, hooks)
        except BaseException:
            self.close()
            raise
        self.active_at = _now()

    # Steps

    def submit(self, message: Step | Blob, reply: Reply) -> None:
        """See `Session`: a Step is answered with its Result or Failure.

        The last answered step is answered again from memory; one that is under way is not started
        twice. A session that needs more positions than it has room for gets them here. Raises
        SessionGone, BadRequest, ContextTooLong, CacheFull or Busy.
        """
        if self.closed:
            raise gone()
        if self.sequence is None:
            raise BadRequest("The session is still opening.", fix="Wait for its `Opened`.")
        if not isinstance(message, Step):
            raise BadRequest("A chat session takes steps.", fix="Send hidden states.")
        if self._is_repeated(message, self.sequence, reply):
            return
        self._check(message)
        self._server.scheduler.require_room(self.sequence)
        end = message.position + message.tensor.shape[1]
        if end > self.max_tokens:
            self._server.grow(self, end)
            self.sequence.cache.max_tokens = self.max_tokens
        self.active_at = _now()
        self._last_step, self.end = message.step, end
        self._server.scheduler.submit(self.sequence, message, reply)

    def _is_repeated(self, step: Step, sequence: Sequence, reply: Reply) -> bool:
        last = self.last_result
        if last is not None and step.step == last.step:
            reply(last)
            return True
        return any(step.step == task.step.step for task in sequence.waiting)

    def _check(self, step: Step) -> None:
        """Raise BadRequest when `step` cannot follow what was accepted."""
        if self._is_copying:
            raise BadRequest("The session begins as another.", fix="Wait for `PrefixCopied`.")
        if self.parked or self._park_when_idle:
            raise BadRequest("The session is parked.", fix="Resume it before sending steps.")
        if self._last_step is not None and step.step <= self._last_step:
            raise BadRequest(
                f"Step {step.step} comes after step {self._last_step}.",
                fix="Number the steps of a session upwards.",
                param="step",
            )
        _check_tensor(step, self._server.hidden_size)
        if not 0 <= step.position <= self.end:
            raise BadRequest(
                f"The step starts at position {step.position}; the session holds {self.end}.",
                fix="Replay the missing positions first.",
                param="position",
            )

    def _finished(self, result: Result | MeshError | None) -> None:
        self.active_at = _now()
        if self.closed:
            self._free()
        elif self.recording is None:
            self._answer(result)
        else:
            rows = result.tensor.shape[1] if isinstance(result, Result) else 0
            self.recording.keep(rows, lambda: self._answer(result))

    def _answer(self, result: Result | MeshError | None) -> None:
        if isinstance(result, Result):
            assert self.sequence is not None  # noqa: S101 - it has just computed
            self._server.computed(result)
            self._last_answered = result.step
            self.last_result = result
            self._server.scheduler.advance(self.sequence, result)
        else:
            # What follows a failed step starts beyond the cache's end: it cannot run either.
            _refuse(self._forget_waiting(), result or gone())
        if self._park_when_idle and not self.waiting:
            self.park()

    def _forget_waiting(self) -> list[Task]:
        """Take back every accepted step; the session stands where its last result left it."""
        self._last_step, self.end = self._last_answered, 0
        if self.sequence is None:
            return []
        self.end = self.sequence.cache.length
        return self._server.scheduler.withdraw(self.sequence)

    # Resting and ending

    def park(self) -> None:
        """Give the stream back once no step is under way; the cache stays for `park_lease_s`."""
        if self.closed or self.parked:
            return
        self._park_when_idle = self.waiting > 0
        if not self._park_when_idle:
            self.last_result = None  # activations are kept no longer than they are of use
            self._server.park(self)

    def resume(self, max_tokens: int) -> None:
        """See `Session`. Raises SessionGone, Busy, CacheFull, or BadRequest (not parked, no
        tokens); the session is then as before."""
        if self.closed or self.sequence is None:
            raise gone()
        if not self.parked or max_tokens < 1:
            raise BadRequest("Only a parked session is resumed.", fix="Park it first.")
        self._server.resume(self, max_tokens)
        self.sequence.cache.max_tokens = self.max_tokens

    async def copy_prefix(self, source: Session, positions: int) -> int:
        """See `Session`. None are copied where the weights of `source` were freed meanwhile, or its
        cache is of another kind; fewer, where it holds fewer.

        Raises SessionGone, BadRequest for a session that was fed already, ContextTooLong.
        """
        if self.sequence is None or self._last_step is not None or self._is_copying:
            raise BadRequest(
                "Only an open session that was fed nothing begins as another.",
                fix="Ask for it right after `Opened`.",
            )
        if not isinstance(source, ChatSession) or source.sequence is None or self.recording:
            return 0
        self._is_copying = True
        try:
            scheduler = self._server.scheduler
            self.end = await copy_prefix(scheduler, self.sequence, source.sequence, positions)
        finally:
            self._is_copying = False
            self.active_at = _now()
        if self.closed:
            raise gone()
        return self.end

    async def seal(self) -> list[dict[str, Any]]:
        """See `Recording.seal`. Raises BadRequest for one that records nothing, or is busy."""
        if self.recording is None or self.waiting:
            raise BadRequest(
                "The session has nothing to seal yet.", fix="Wait for the answers to its steps."
            )
        self._is_sealing = True
        try:
            return await self.recording.seal()
        finally:
            self._is_sealing = False
            self.active_at = _now()

    def close(self) -> None:
        """End it; steps that wait are not answered."""
        self.end_with(None)

    def end_with(self, error: MeshError | None) -> None:
        """Close it; steps that wait are answered with `error`, if there is one."""
        if self.closed:
            return
        self.closed = True
        if self.recording is not None:
            self.recording.abort()
        dropped = self._forget_waiting()
        if not any(task.is_running for task in dropped):
            self._free()
        if error is not None:
            _refuse(dropped, error)

    def _free(self) -> None:
        self.sequence = None
        self._server.freed(self)


def gone() -> SessionGone:
    """The error for a session that is not here (any more)."""
    return SessionGone(
        "The shard does not hold this session.", fix="Open a new one and replay the inputs."
    )


def _not_for_jobs(verb: str) -> BadRequest:
    return BadRequest(f"A job's session is not {verb}.", fix="Close it, or keep it open.")


def _refuse(tasks: list[Task], error: MeshError) -> None:
    for task in tasks:
        task.reply(Failure(error.to_dict(), task.step.session, task.step.step))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _check_tensor(step: Step, hidden_size: int) -> None:
    """Raise BadRequest unless the tensor is (1, rows > 0, hidden_size) in a floating wire dtype."""
    tensor = step.tensor
    shape_fits = len(tensor.shape) == 3 and tensor.shape[0] == 1 and tensor.shape[1] > 0
    if not shape_fits or tensor.shape[2] != hidden_size:
        raise BadRequest(
            f"The tensor has shape {tuple(tensor.shape)}; (1, rows, {hidden_size}) is expected.",
            fix="Send hidden states of this model.",
            param="tensor",
        )
    itemsize = 4 if tensor.dtype == "fp32" else 2
    whole = tensor.shape[1] * hidden_size * itemsize
    if tensor.dtype not in _WIRE_DTYPES or tensor.gradient or len(tensor.data) != whole:
        raise BadRequest(
            f"A {tensor.dtype} tensor of {len(tensor.data)} bytes is not a hidden state here.",
            fix="Send fp16, bf16 or fp32 activations of full length.",
            param="tensor",
        )
