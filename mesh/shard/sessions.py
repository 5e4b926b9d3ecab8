"""The sessions of one shard and the two limits they share: streams and cache positions.

Admission is decided here, at once and strictly; nothing is ever queued behind a limit. Knows
neither links nor torch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesh.errors import BadRequest, Busy, CacheFull, ContextTooLong, SessionGone
from mesh.shard.settings import ShardSettings
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

_WIRE_DTYPES = frozenset({"fp16", "bf16", "fp32"})


@dataclass(frozen=True, slots=True)
class Place:
    """The loaded span a session runs on, its cache there, and what steers it."""

    lane: Lane
    cache: SessionCache
    hooks: tuple[Hook, ...] = ()


class Session:
    """One generation's state on this shard. Changed only by `ShardServer` and `SessionTable`."""

    def __init__(
        self, request: Open, steering: Steering, recording: Recording | None = None
    ) -> None:
        self.number = request.session
        self.layers = steering.layers
        self.max_tokens = request.max_tokens
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
        self.closed = False
        self.lease: asyncio.TimerHandle | None = None

    def check(self, step: Step, hidden_size: int) -> None:
        """Raise BadRequest, ContextTooLong or Busy when `step` cannot follow what was accepted."""
        if self.parked or self.park_when_idle:
            raise BadRequest("The session is parked.", fix="Resume it before sending steps.")
        if self.last_step is not None and step.step <= self.last_step:
            raise BadRequest(
                f"Step {step.step} comes after step {self.last_step}.",
                fix="Number the steps of a session upwards.",
                param="step",
            )
        check_tensor(step, hidden_size)
        rows = step.tensor.shape[1]
        if not 0 <= step.position <= self.end:
            raise BadRequest(
                f"The step starts at position {step.position}; the session holds {self.end}.",
                fix="Replay the missing positions first.",
                param="position",
            )
        if step.position + rows > self.max_tokens:
            raise ContextTooLong(
                f"The session holds {self.max_tokens} positions; the step ends at"
                f" {step.position + rows}.",
                fix="Open the session with more max_tokens, or shorten the prompt.",
                param="position",
            )
        if len(self.waiting) >= MAX_WAITING_STEPS:
            raise Busy(
                f"{len(self.waiting)} steps of this session are under way.",
                fix="Wait for a result before sending more.",
            )

    def forget_waiting(self) -> list[tuple[Step, Reply]]:
        """Take back every accepted step; the session stands where its last result left it."""
        dropped = [*self.waiting]
        self.waiting.clear()
        self.pending = None
        self.last_step = self.last_answered
        self.end = 0 if self.place is None else self.place.cache.length
        return dropped


def check_tensor(step: Step, hidden_size: int) -> None:
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


class SessionTable:
    """Who is in, and how much is left."""

    def __init__(self, settings: ShardSettings) -> None:
        self._settings = settings
        self._active: set[Session] = set()
        self._parked: dict[Session, None] = {}  # the one parked longest comes first

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
        """The sum of `max_tokens` over all sessions."""
        return sum(session.max_tokens for session in self)

    @property
    def kv_bytes(self) -> int:
        """What the caches of all sessions take on the device now."""
        return sum(s.place.cache.allocated_bytes for s in self if s.place is not None)

    def __iter__(self) -> Iterator[Session]:
        return iter([*self._active, *self._parked])

    def admit(self, session: Session) -> list[Session]:
        """Let `session` in; returns the parked sessions that have to go for it, oldest first.

        Raises Busy when no stream is free, CacheFull when it does not fit beside the active ones,
        ContextTooLong when it would not fit alone.
        """
        evicted = self._make_room(session, session.max_tokens)
        self._active.add(session)
        return evicted

    def park(self, session: Session) -> None:
        """Give the session's stream back."""
        self._active.discard(session)
        self._parked[session] = None
        session.parked = True

    def resume(self, session: Session, max_tokens: int) -> list[Session]:
        """Take a stream again, with room for `max_tokens`. Returns and raises as `admit` does."""
        evicted = self._make_room(session, max_tokens)
        self._parked.pop(session, None)
        self._active.add(session)
        session.parked = False
        session.max_tokens = max_tokens
        return evicted

    def remove(self, session: Session) -> None:
        """Forget the session and what it held."""
        self._active.discard(session)
        self._parked.pop(session, None)

    def _make_room(self, session: Session, max_tokens: int) -> list[Session]:
        limit, budget = self._settings.max_concurrent_streams, self._settings.kv_tokens
        if max_tokens > budget:
            raise ContextTooLong(
                f"The request needs {max_tokens} cached positions; the shard has {budget} in all.",
                fix="Shorten the prompt, lower max_tokens, or raise kv_tokens where it runs.",
                param="max_tokens",
            )
        if len(self._active) >= limit:
            raise Busy(
                f"The shard serves {limit} streams at a time and all are taken.",
                fix="Use another shard, or try again when a stream has ended.",
            )
        held = sum(active.max_tokens for active in self._active)
        if held + max_tokens > budget:
            raise CacheFull(
                f"The shard caches {budget} positions, {held} are taken; {max_tokens} do not fit.",
                fix="Ask for fewer max_tokens, or use another shard.",
            )
        others = [parked for parked in self._parked if parked is not session]
        held += sum(parked.max_tokens for parked in others)
        evicted = []
        for parked in others:
            if held + max_tokens <= budget:
                break
            evicted.append(parked)
            held -= parked.max_tokens
        return evicted


def gone() -> SessionGone:
    """The error for a session that is not here (any more)."""
    return SessionGone(
        "The shard does not hold this session.", fix="Open a new one and replay the inputs."
    )
