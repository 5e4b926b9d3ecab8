"""The sessions of chat on one shard. Knows neither links nor what else is computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mesh.clock import loop_time
from mesh.errors import BadRequest, MeshError
from mesh.shard.ends import SessionEnds
from mesh.shard.prefixes import copy_prefix, visited
from mesh.shard.scheduler import Reply, Sequence, Task
from mesh.shard.session import Session, gone
from mesh.types import HIDDEN_DTYPES, Principal
from mesh.wire.messages import Blob, Failure, Open, OpenEnds, Result, Step
from mesh.wire.tensors import ITEMSIZE

if TYPE_CHECKING:
    import torch

    from mesh.shard.ends import LoadedEnds
    from mesh.shard.hooks import Hook
    from mesh.shard.recording import Recording
    from mesh.shard.runtime import Runtime
    from mesh.shard.server import ShardServer
    from mesh.shard.steering import SessionEdits

GROWTH = 256
"""Positions that a cache grows by at least, where there is room; a quarter of it if that is more,
so that what is copied meanwhile stays a small part of what is computed."""


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
        self._asks_ends = request if isinstance(request, OpenEnds) else None
        self._ends: SessionEnds | None = None
        self._is_asked_row = False

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
        return not self._server.is_loaded(ends=self.needs_ends)

    @property
    def needs_ends(self) -> bool:
        """Whether the shard runs the model's ends for it."""
        return self._asks_ends is not None

    @property
    def waiting(self) -> int:
        """How many accepted steps are not answered yet."""
        return 0 if self.sequence is None else len(self.sequence.waiting)

    def silent_since(self) -> float | None:
        """Since when its asker has been free to send a step and has not; None while it is not."""
        at_work = self.waiting or self._is_sealing or self._is_copying or self._is_asked_row
        busy = self.sequence is None or self.closed or at_work
        return None if busy else self.active_at

    @property
    def next_growth(self) -> int:
        """By how many positions it will grow next, as far as that is known: what it once did."""
        return max(GROWTH, self.max_tokens // 4) if self.has_grown else 0

    # What it has been given

    def has_room(self, positions: int) -> None:
        """It may cache so many in all from now on."""
        self.max_tokens = positions
        if self.sequence is not None:
            cache = self.sequence.cache
            cache.max_tokens = min(positions, cache.short or positions)

    def grows_to(self, positions: int) -> None:
        """`has_room`, as it came to the end of what it had."""
        self.has_room(positions)
        self.has_grown = True

    def rests(self, now: float) -> None:
        """Its stream is somebody else's at the loop's time `now`."""
        self.parked, self.active_at = True, now

    def goes_on(self, now: float) -> None:
        """It has a stream from the loop's time `now` on."""
        self.parked, self.active_at = False, now

    # Opening

    def use(
        self, runtime: Runtime, hooks: Iterable[Hook] = (), ends: LoadedEnds | None = None
    ) -> None:
        """Compute with this, and with these `ends` where the session needs them; call these hooks
        beside what steers it. Raises BadSteering."""
        if self._asks_ends is not None and ends is not None:
            self._ends = SessionEnds(ends, self._asks_ends)
        all_hooks = (*self._steering.hooks(runtime), *hooks)
        self.sequence = Sequence(
            runtime,
            self.layers,
            runtime.new_cache(self.max_tokens, all_hooks),
            self._wire_dtype,
            self._server.settings,
            self._finished,
            all_hooks,
            self._ends,
        )

    async def opened(self) -> None:
        """See `Session`. Raises what loading raises, BadSteering, DiskFull, and SessionGone when it
        was closed meanwhile."""
        if self.sequence is not None:
            return
        try:
            # What loads for one that is closed already would stay: nobody else leaves it idle.
            self._require_not_closed()
            runtime = await self._server.weights.acquire()
            self._require_not_closed()
            ends = await self._server.acquire_ends() if self.needs_ends else None
            hooks = (
                await self.recording.start(runtime, self.layers)
                if self.recording is not None
                else ()
            )
            self._require_not_closed()
            self.use(runtime, hooks, ends)
        except BaseException:
            self.close()
            raise
        self.active_at = loop_time()

    def _require_not_closed(self) -> None:
        if self.closed:
            raise gone()

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
        self.active_at = loop_time()
        self._last_step, self.end = message.step, end
        self._server.scheduler.submit(self.sequence, message, reply)

    async def row(self, position: int) -> torch.Tensor:
        """See `Session`. Raises SessionGone, BadRequest, and what the device raises."""
        if self.closed or self.sequence is None:
            raise gone()
        ends = self._ends
        if ends is None or self.waiting or self.parked or self._is_asked_row:
            raise BadRequest(
                "The session has no row to give now.",
                fix="Ask once, after a step was answered with candidates.",
            )
        self._is_asked_row = True
        try:
            return await visited(self._server.scheduler, lambda: ends.row(position))
        finally:
            self._is_asked_row, self.active_at = False, loop_time()

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
        if self._ends is not None and self._ends.takes_ids:
            self._ends.check(step)
        else:
            _require_rows(step, self._server.shape.row_size)
        if not 0 <= step.position <= self.end:
            raise BadRequest(
                f"The step starts at position {step.position}; the session holds {self.end}.",
                fix="Replay the missing positions first.",
                param="position",
            )

    def _finished(self, result: Result | MeshError | None) -> None:
        self.active_at = loop_time()
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
            self.active_at = loop_time()
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
            self.active_at = loop_time()

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


def _refuse(tasks: list[Task], error: MeshError) -> None:
    for task in tasks:
        task.reply(Failure(error.to_dict(), task.step.session, task.step.step))


def _require_rows(step: Step, row_size: int) -> None:
    """Raise BadRequest unless the tensor is (1, rows > 0, row_size) in a floating wire dtype."""
    tensor = step.tensor
    shape_fits = len(tensor.shape) == 3 and tensor.shape[0] == 1 and tensor.shape[1] > 0
    if not shape_fits or tensor.shape[2] != row_size:
        raise BadRequest(
            f"The tensor has shape {tuple(tensor.shape)}; (1, rows, {row_size}) is expected.",
            fix="Send hidden states of this model.",
            param="tensor",
        )
    whole = tensor.shape[1] * row_size * ITEMSIZE.get(tensor.dtype, 0)
    if tensor.dtype not in HIDDEN_DTYPES or tensor.gradient or len(tensor.data) != whole:
        raise BadRequest(
            f"A {tensor.dtype} tensor of {len(tensor.data)} bytes is not a hidden state here.",
            fix="Send fp16, bf16 or fp32 activations of full length.",
            param="tensor",
        )
