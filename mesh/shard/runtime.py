"""What computes a span: hidden states in, hidden states out, for many sessions.

There is more than one way to (`torch_runtime`, `compiled`); everything else of a shard knows only
this. Synchronous and not thread-safe: whoever owns the device calls it from one place at a time.
Knows nothing of links, streams or budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from mesh.errors import BadRequest, SessionGone
from mesh.shard.hooks import Hook
from mesh.types import LayerRange

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mesh.models.load import LoadedSpan
    from mesh.shard.weight_check import Check


class KeyValueCache(Protocol):
    """The keys and values of one session. What lies beyond `length` does not exist."""

    max_tokens: int
    short: int
    """Where short texts are turned otherwise than long ones (`mesh.models.rope`), a session is of
    one of the two by the room that it begins with. How many positions one of a short text may have;
    0 for any other."""
    in_pieces: bool
    """Whether `copy` may be asked for a part at a time."""

    @property
    def length(self) -> int:
        """How many positions it holds."""

    @property
    def capacity(self) -> int:
        """Positions that it has memory for."""

    @property
    def allocated_bytes(self) -> int:
        """What its memory is on the device now."""

    def cut(self, position: int) -> None:
        """Forget everything from `position` on; a position beyond the end changes nothing.

        It forgets all there is where it cannot go back to that."""

    def held(self, positions: int) -> int:
        """How many of its first `positions` it can go back to, or another begin with."""

    def reserve(self, rows: int) -> None:
        """Make room for `rows` more positions. Raises ContextTooLong beyond `max_tokens`."""

    def commit(self, rows: int) -> None:
        """The forward over `rows` positions succeeded; they count from now on."""

    def copy(self, other: Self, stop: int) -> None:
        """Take over the positions of `other` from this one's `length` up to `stop`, which it has
        `held`.

        Both are of one runtime, and of one kind. Raises ContextTooLong beyond `max_tokens`.
        """


@dataclass(frozen=True, slots=True)
class StepInput:
    """`hidden` (1, rows, row size) for the positions from `position` on, of the session of `cache`.

    What the cache holds beyond `position` is forgotten; `position` beyond its end is refused.
    `hooks` see the session's own rows on their way through the layers.
    """

    cache: KeyValueCache
    position: int
    hidden: torch.Tensor
    hooks: tuple[Hook, ...] = ()


class Runtime(Protocol):
    """The layers of one shard on one device."""

    @property
    def layers(self) -> LayerRange:
        """Which."""

    @property
    def loaded(self) -> LoadedSpan:
        """What it was made of; interventions have their modules from here."""

    @property
    def device(self) -> torch.device:
        """What computes."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden states that it takes and gives."""

    @property
    def row_size(self) -> int:
        """How many numbers a row has that it takes or gives: those of a hidden state, and for some
        models more (`mesh.models.row_form`)."""

    @property
    def batch_rows(self) -> int:
        """How long a step may be that runs as one forward with steps of other sessions.

        0 where that would change the results of either."""

    @property
    def short_rows(self) -> int:
        """See `ShardDescriptor.short_rows`. Also 0 where longer steps differ in nothing that an
        answer could show."""

    @property
    def kernels(self) -> str:
        """What the last bits of its results depend on, beside dtype, device and threads."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it computes as it does, for people."""

    @property
    def weight_bytes(self) -> int:
        """What the weights take in the form in which they are computed with."""

    def new_cache(self, max_tokens: int, hooks: Sequence[Hook] = ()) -> KeyValueCache:
        """An empty cache for a session on any layers of this span, whose steps have these hooks."""

    def layer(self, number: int) -> nn.Module:
        """The decoder layer of that number in the whole model; LookupError when not here."""

    def weight_check(self) -> Check:
        """A check of the weights that it computes with."""

    def forward(
        self, steps: Sequence[StepInput], layers: LayerRange | None = None
    ) -> list[torch.Tensor]:
        """Run `layers` (all of the span's when None); returns (1, rows, hidden) per step, in order.

        One step of any length, or steps of up to `batch_rows` rows each of several sessions. No
        cache has changed its length when this raises: ContextTooLong, BadRequest (position beyond a
        cache's end), SessionGone (a cache cannot go back to it), or what the device raises.
        """


def prepare(step: StepInput) -> None:
    """Make its cache ready for it. Raises BadRequest, ContextTooLong, SessionGone."""
    if step.position > step.cache.length:
        raise BadRequest(
            f"The step starts at position {step.position}; the session holds {step.cache.length}.",
            fix="Replay the missing positions first.",
            param="position",
        )
    step.cache.cut(step.position)
    if step.cache.length < step.position:
        raise SessionGone(
            f"The shard cannot go back to position {step.position} in this session.",
            fix="Open a new one and replay the inputs.",
        )
    step.cache.reserve(step.hidden.shape[1])


def begun_short(max_tokens: int, short: int) -> int:
    """`KeyValueCache.short` of a session that begins with room for `max_tokens`, of a model whose
    short texts have up to `short` positions."""
    return short if max_tokens <= short else 0


def may_batch(runtime: Runtime, steps: Sequence[StepInput]) -> bool:
    """Whether one forward of `runtime` may take all of them."""
    most = runtime.batch_rows
    return len(steps) <= 1 or all(step.hidden.shape[1] <= most for step in steps)


def require_batch(runtime: Runtime, steps: Sequence[StepInput]) -> None:
    """Raise ValueError unless `may_batch`."""
    if not may_batch(runtime, steps):
        most = runtime.batch_rows
        raise ValueError(f"steps of up to {most} rows are computed together by this runtime")
