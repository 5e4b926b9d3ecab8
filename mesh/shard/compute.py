"""One visit to the device: wire tensors in, wire tensors out, errors kept apart per step.

Runs on the event loop or on the compute thread, wherever `mesh.shard.batcher` calls it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from mesh.errors import DeviceFailed, MeshError
from mesh.shard.device import is_lost
from mesh.shard.failures import lost
from mesh.shard.hooks import Hook
from mesh.shard.kv import SessionCache
from mesh.shard.memory import trim_heap
from mesh.shard.runtime import SpanRuntime, StepInput
from mesh.types import LayerRange, WireDtype
from mesh.wire.activations import to_torch, to_wire
from mesh.wire.messages import WireTensor

logger = logging.getLogger(__name__)

SHORT_ROWS = 16
"""Steps of up to this many rows (decode, verifying drafted tokens) do not wait for long ones."""


class Lane:
    """A loaded span with what was learnt about how long its steps take."""

    def __init__(self, runtime: SpanRuntime, *, inline_ms: float, prefill_rows: int) -> None:
        self.runtime = runtime
        self.prefill_rows = prefill_rows
        self._inline_ms = inline_ms
        self._took_ms: dict[tuple[LayerRange, int], float] = {}

    def is_quick(self, layers: LayerRange, rows: int) -> bool:
        """Whether the step is expected to take less than `inline_ms`; what was never run is not."""
        expected = self._took_ms.get((layers, rows.bit_length()))
        return expected is not None and expected < self._inline_ms

    def took(self, layers: LayerRange, rows: int, ms: float) -> None:
        """Learn from a step that ran."""
        key = (layers, rows.bit_length())
        before = self._took_ms.get(key, ms)
        self._took_ms[key] = before + 0.2 * (ms - before)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step: a tensor, or an error, or neither when nobody waits any more."""

    tensor: WireTensor | None
    error: MeshError | None
    compute_us: int
    queue_us: int


@dataclass(slots=True, eq=False)
class PendingStep:
    """A step on its way through the device. `done` is called on the event loop."""

    lane: Lane
    layers: LayerRange
    cache: SessionCache
    position: int
    tensor: WireTensor
    wire_dtype: WireDtype
    done: Callable[[Outcome], None]
    hooks: tuple[Hook, ...] = ()
    cancelled: bool = False
    accepted_at: float = field(default_factory=time.perf_counter)
    compute_s: float = 0.0
    inputs: torch.Tensor | None = None
    outputs: list[torch.Tensor] = field(default_factory=list)
    rows_done: int = 0
    running: bool = False

    @property
    def rows(self) -> int:
        """How many positions the step covers."""
        return self.tensor.shape[1]

    @property
    def is_short(self) -> bool:
        """Whether it goes before the pieces of long steps."""
        return self.rows <= SHORT_ROWS

    @property
    def piece_rows(self) -> int:
        """How many of them the next visit computes."""
        return min(self.lane.prefill_rows, self.rows - self.rows_done)

    def joins(self, other: PendingStep) -> bool:
        """Whether both, of one row each, can run as one batch."""
        return self.rows == 1 and self.lane is other.lane and self.layers == other.layers

    def restarted(self) -> PendingStep:
        """The same step before its first visit."""
        self.rows_done = 0
        self.outputs.clear()
        return self

    def next_piece(self) -> StepInput:
        """The input of the next visit. Raises BadRequest when the tensor cannot be read."""
        if self.inputs is None:
            runtime = self.lane.runtime
            self.inputs = to_torch(self.tensor).to(runtime.device, runtime.dtype)
        first = self.rows_done
        piece = self.inputs[:, first : first + self.piece_rows]
        return StepInput(self.cache, self.position + first, piece, self.hooks)


@dataclass(slots=True)
class Turn:
    """Steps that visit the device together: a batch of single rows, or one longer step."""

    steps: list[PendingStep]

    @property
    def rows(self) -> int:
        """Rows computed in this visit."""
        return sum(step.piece_rows for step in self.steps)

    @property
    def is_quick(self) -> bool:
        """Whether the event loop can afford to compute it."""
        first = self.steps[0]
        return first.is_short and first.lane.is_quick(first.layers, self.rows)


def compute(turn: Turn) -> list[Outcome | None]:
    """Run one visit; None for a step that needs another one. A step's error is its own.

    A step that fails leaves its session as long as it was before the step.
    """
    started = time.perf_counter()
    first, rows = turn.steps[0], turn.rows
    results: list[WireTensor | MeshError | None]
    try:
        results = [*map(_advance, turn.steps, _forward(turn.steps))]
    except Exception as error:  # noqa: BLE001 - whatever a device raises is that session's failure
        if len(turn.steps) > 1 and not is_lost(error):
            # One of them may be at fault: find out which, the others go on.
            return [compute(Turn([step.restarted()]))[0] for step in turn.steps]
        for step in turn.steps:
            step.cache.cut(step.position)
        results = [_as_mesh_error(error, step) for step in turn.steps]
    took = time.perf_counter() - started
    first.lane.took(first.layers, rows, took * 1000)
    return [_timed(step, result, took) for step, result in zip(turn.steps, results, strict=True)]


def _forward(steps: list[PendingStep]) -> list[torch.Tensor]:
    first = steps[0]
    return first.lane.runtime.forward([step.next_piece() for step in steps], first.layers)


def _advance(step: PendingStep, output: torch.Tensor) -> WireTensor | None:
    step.rows_done += output.shape[1]
    if step.rows_done < step.rows:
        step.outputs.append(output)
        return None
    whole = torch.cat([*step.outputs, output], dim=1) if step.outputs else output
    tensor = to_wire(whole, step.wire_dtype)
    if not step.is_short:
        step.inputs, step.outputs = None, []
        trim_heap()  # the scratch memory of a chunk is many times that of a decode step
    return tensor


def _timed(
    step: PendingStep, result: WireTensor | MeshError | None, took_s: float
) -> Outcome | None:
    step.compute_s += took_s
    if result is None:
        return None
    compute_us = int(step.compute_s * 1e6)
    queue_us = int((time.perf_counter() - step.accepted_at) * 1e6) - compute_us
    if isinstance(result, MeshError):
        return Outcome(None, result, compute_us, max(0, queue_us))
    return Outcome(result, None, compute_us, max(0, queue_us))


def _as_mesh_error(error: Exception, step: PendingStep) -> MeshError:
    if isinstance(error, MeshError):
        return error
    if (gone := lost(error)) is not None:
        return gone
    if _is_out_of_memory(error):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return DeviceFailed(
            f"The device has no memory left for {step.rows} rows at position {step.position}.",
            fix="Use another shard, or lower kv_tokens or max_concurrent_streams here.",
        )
    logger.error("step failed layers=%s rows=%d", step.layers, step.rows, exc_info=error)
    return DeviceFailed(
        f"The shard could not compute this step ({type(error).__name__}).",
        fix="Use another shard; the details are in this node's log.",
    )


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
