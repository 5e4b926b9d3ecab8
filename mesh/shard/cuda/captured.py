"""Layers whose steps of few rows are captured once as CUDA graphs and replayed from then on.

There is a graph for each stretch of layers and each of a few numbers of rows; a step is filled up
to the next one with rows that nobody wants. Where kernels compute a row alike in any place, as
those of cuBLAS do for one number of rows, it has the same bits in each step of that number: so one
number serves all steps of up to `FULL_ROWS`, in any company. Kernels that are faster for fewer have
graphs of their own for those, where these give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mesh.shard.compiled.parts import NotCompilable
from mesh.shard.cuda.pool import Pool, PoolCache, PoolShape
from mesh.shard.cuda.rows import (
    FULL_ROWS,
    Behind,
    PooledRows,
    Row,
    RowAttention,
    flash_attention,
    plain_attention,
)
from mesh.shard.lean import LeanLayers
from mesh.shard.lean_attention import AttentionPlace
from mesh.shard.runtime import StepInput
from mesh.types import LayerRange

MANY_ROWS = 64
"""The most that are computed at once."""

_WARM_UPS = 2
"""Runs before a capture, in which libraries choose kernels and take their memory."""

_ATTENTION_TOLERANCE = 0.02


@dataclass(slots=True, eq=False)
class _Captured:
    """What computes `rows` rows: fill `hidden` (rows, 1, hidden) and have `past` stand; `replay`
    gives as much."""

    hidden: torch.Tensor
    past: PooledRows
    replay: Callable[[], torch.Tensor]


class CapturedLayers:
    """The layers of a span. Used from one place at a time."""

    def __init__(
        self,
        layers: LeanLayers,
        device: torch.device,
        dtype: torch.dtype,
        *,
        hidden_size: int,
        positions: int,
        few: Sequence[int] = (),
    ) -> None:
        """`positions` are those of all sessions together; with `few` rows the products are faster.
        Raises NotCompilable where this device or torch has no such attention."""
        shape = _pool_shape(layers, dtype)
        self.pool = Pool(shape, device, positions)
        self._layers = layers
        self._device = device
        self._hidden_size = hidden_size
        self._positions = positions
        self._attend = _attention_of(layers, shape, device)
        self._captured: dict[tuple[LayerRange, int], _Captured] = {}
        self._generation = self.pool.generation
        self._memory = _graph_memory(device)
        self.sizes: tuple[int, ...] = (FULL_ROWS, MANY_ROWS)
        """How many rows a step may be filled up to."""
        self.sizes = (*filter(self._is_exact, few), *self.sizes)

    @property
    def reason(self) -> str:
        """What it does, for people."""
        sizes = ", ".join(map(str, self.sizes))
        return f"steps captured: filled up to {sizes} rows, the same bits in up to {FULL_ROWS}"

    @staticmethod
    def takes(step: StepInput) -> bool:
        """Whether it is short enough."""
        return step.hidden.shape[1] <= FULL_ROWS

    @torch.inference_mode()
    def forward(self, steps: Sequence[StepInput], layers: LayerRange) -> list[torch.Tensor]:
        """(1, rows, hidden) of each, in order. `layers` are counted within the span; their caches
        have room."""
        found: list[torch.Tensor] = []
        for group in _groups(steps):
            hidden = torch.cat([step.hidden[0] for step in group]).to(self._device)
            rows = [
                Row(step.position + i, _cache(step).start)
                for step in group
                for i in range(step.hidden.shape[1])
            ]
            output = self._rows(hidden, rows, layers)
            found += torch.split(output, [step.hidden.shape[1] for step in group], 1)
        return found

    @torch.inference_mode()
    def _is_exact(self, few: int) -> bool:
        """Whether rows have the same bits among so few as among `FULL_ROWS`."""
        seeded = torch.Generator().manual_seed(0)
        hidden = torch.randn(few, self._hidden_size, generator=seeded)
        every = LayerRange(0, len(self._layers.places))
        cache = self.pool.open(few)
        cache.reserve(few)
        rows = [Row(position, cache.start) for position in range(few)]
        found, expected = (
            self._rows(hidden.to(self._device), rows, every, count) for count in (few, FULL_ROWS)
        )
        return torch.equal(found, expected)

    def _rows(
        self,
        hidden: torch.Tensor,
        rows: Sequence[Row],
        layers: LayerRange,
        count: int | None = None,
    ) -> torch.Tensor:
        """(1, rows, hidden) of (rows, hidden), filled up to `count` rows."""
        count = count or next(size for size in self.sizes if size >= len(rows))
        if self._generation != self.pool.generation:
            self._captured.clear()
            self._generation = self.pool.generation
            self._memory = _graph_memory(self._device)
        captured = self._captured.get((layers, count))
        if captured is None:
            captured = self._captured[layers, count] = self._capture(layers, count)
        captured.past.stand(rows)
        captured.hidden[: len(rows), 0] = hidden
        return captured.replay()[: len(rows), 0].clone()[None]

    def _capture(self, layers: LayerRange, count: int) -> _Captured:
        shape = count, 1, self._hidden_size
        hidden = torch.zeros(shape, dtype=self.pool.shape.dtype, device=self._device)
        past = PooledRows(self.pool, count, self._positions, self._attend)
        past.stand([])

        def run() -> torch.Tensor:
            return self._layers.through(hidden, past.begin(), past, layers)

        return _Captured(hidden, past, _replayed(run, self._device, self._memory))


def _graph_memory(device: torch.device) -> Any:
    """What graphs that never run at once share; torch ends it with the last of them."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def _replayed(
    run: Callable[[], torch.Tensor], device: torch.device, memory: Any
) -> Callable[[], torch.Tensor]:
    """`run` as a graph; itself on a device that has none."""
    if device.type != "cuda":
        return run
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            run()
        # Other threads load and free memory meanwhile, which concerns no capture but their own.
        graph.capture_begin(pool=memory, capture_error_mode="thread_local")
        try:
            output = run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(side)

    def replay() -> torch.Tensor:
        graph.replay()
        return output

    return replay


def _groups(steps: Sequence[StepInput]) -> Iterator[list[StepInput]]:
    """Of at most `MANY_ROWS` rows each."""
    group: list[StepInput] = []
    rows = 0
    for step in steps:
        if rows + step.hidden.shape[1] > MANY_ROWS:
            yield group
            group, rows = [], 0
        group.append(step)
        rows += step.hidden.shape[1]
    yield group


def _cache(step: StepInput) -> PoolCache:
    assert isinstance(step.cache, PoolCache)  # noqa: S101 - what the runtime gives
    return step.cache


def _pool_shape(layers: LeanLayers, dtype: torch.dtype) -> PoolShape:
    places = layers.places
    shapes = {(each.kv_heads, each.width) for each in places}
    if len(shapes) != 1:
        raise NotCompilable("its layers cache keys and values of different shapes")
    return PoolShape(len(places), *shapes.pop(), dtype)


def _attention_of(layers: LeanLayers, shape: PoolShape, device: torch.device) -> RowAttention:
    if device.type != "cuda":
        return plain_attention
    if any(place.softcap is not None for place in layers.places):
        raise NotCompilable("its attention is capped, which torch's flash kernel is not")
    for place in {each.window: each for each in layers.places}.values():
        if not _agrees(place, shape, device):
            raise NotCompilable("torch's flash kernel gave other numbers")
    return flash_attention


@torch.inference_mode()
def _agrees(place: AttentionPlace, shape: PoolShape, device: torch.device) -> bool:
    """Whether the flash kernel attends as `plain_attention`, over a few rows of some lengths."""
    seeded = torch.Generator().manual_seed(0)
    longest = 2 * (place.window or 64) + 3

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=seeded).to(device, shape.dtype)

    keys, values = (drawn(longest + 8, shape.kv_heads, shape.width) for _ in range(2))
    query = drawn(FULL_ROWS, place.heads, place.width)
    counts = torch.linspace(1, longest, FULL_ROWS, device=device).to(torch.int32)
    each = torch.arange(FULL_ROWS + 1, device=device, dtype=torch.int32)
    behind = Behind(each, each % 8, counts, longest)
    try:
        found = flash_attention(query, keys, values, behind, place)
    except RuntimeError as error:
        raise NotCompilable(f"torch's flash kernel refuses ({str(error)[:200]})") from error
    expected = plain_attention(query, keys, values, behind, place).float()
    return bool((found.float() - expected).norm() <= _ATTENTION_TOLERANCE * expected.norm())
