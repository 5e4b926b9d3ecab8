"""The compiled runtime: the layers of a span in 8 or 4 bit, each as one graph on the CPU.

A graph for each layer and not one for all: a route may use a part of a span, hooks stand between
layers, and a row's way through the Python between two of them takes 40 us. Synchronous and not
thread-safe, as the torch runtime.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import torch
from torch import nn

from mesh.shard.compiled.canary import CanaryCheck
from mesh.shard.compiled.engine import Binding, compiled
from mesh.shard.compiled.graph import layer_model, padding
from mesh.shard.compiled.parts import LayerParts, NotCompilable
from mesh.shard.compiled.slots import SPARE, Bank, Banks, CacheShape, SlotCache, neighbours
from mesh.shard.compiled.store import GraphSpan
from mesh.shard.hooks import Hook
from mesh.shard.kv import SessionCache
from mesh.shard.memory import settle
from mesh.shard.runtime import KeyValueCache, StepInput, prepare
from mesh.shard.selfcheck import rope_types
from mesh.shard.torch_runtime import TorchRuntime
from mesh.shard.views import layer_list_name
from mesh.types import LayerRange

Int32 = npt.NDArray[np.int32]

_KEPT_PASSES = 64
"""Ways through the layers whose buffers are kept: the slots that are busy change now and then."""

_KEPT_ROWS = 16
"""Longer ones are not kept: their buffers are large, and what they compute takes long."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """Buffers and bindings for so many rows in slots that lie beside each other."""

    bindings: tuple[Binding, ...]
    """One for each layer."""
    states: tuple[torch.Tensor, ...]
    """(slots, rows, hidden) before the first layer and behind each."""
    queries: Int32
    last: Int32
    total: Int32
    """Memory of the tensors of those names: writing through numpy takes a tenth of the time."""


class CompiledRuntime:
    """See `mesh.shard.runtime.Runtime`.

    A session with hooks inside a layer, where a graph has no place for them, is computed by the
    torch runtime on the same weights; that is slow, as those are made dense again for each step.
    """

    def __init__(
        self, span: GraphSpan, *, threads: int, positions: int, batch_invariant: bool = False
    ) -> None:
        """`positions` are the most that a session may have. Raises NotCompilable."""
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.quant = span.quant
        self.loaded = span.loaded
        self.layers = span.loaded.layers
        self.hidden_size: int = span.loaded.config.hidden_size
        self._module: Any = span.loaded.module.eval()
        self._twin: TorchRuntime | None = None
        parts = [layer.parts for layer in span.layers]
        tables = _rotary_tables(self._module, parts, positions)
        self._tables_of = [tables.get(each.attention.table, {}) for each in parts]
        self._banks = Banks(_cache_shape(parts, positions))
        self._sessions = [
            compiled(layer_model(layer.parts, layer.products), threads, layer.folder)
            for layer in span.layers
        ]
        self._passes: OrderedDict[tuple[int, int, int, int, LayerRange], _Pass] = OrderedDict()
        self.batched = not batch_invariant
        alone = "" if self.batched else "+alone"
        self.kernels = f"onnxruntime-{onnxruntime.__version__}+{span.quant or 'fp32'}{alone}"
        self.weight_bytes = span.weight_bytes
        size = f"{self.weight_bytes / 2**20:.0f} MB"
        self.reasons: tuple[str, ...] = (
            f"runtime compiled: {len(parts)} layers in {span.quant or 'fp32'}, {size}",
        )
        for pages in span.loaded.pages:
            pages.forget()  # the sessions have taken what they need of them
        settle()

    def new_cache(self, max_tokens: int, hooks: Sequence[Hook] = ()) -> KeyValueCache:
        """See `Runtime`."""
        if any(hook.site.part for hook in hooks):
            return self._reference().new_cache(max_tokens)
        return self._banks.open(max_tokens)

    def layer(self, number: int) -> nn.Module:
        """See `Runtime`."""
        layers: Any = self._module.get_submodule(layer_list_name(self._module))
        module: nn.Module = layers[number - self.layers.start]
        return module

    def weight_check(self) -> CanaryCheck:
        """See `Runtime`."""
        return CanaryCheck(self)

    def probe(self, layer: int) -> torch.Tensor:
        """What layer `layer` makes of a row that is always the same, (1, 1, hidden).

        Touches no session; another thread may compute meanwhile.
        """
        index = layer - self.layers.start
        shape = self._banks.shape
        x = torch.linspace(-1, 1, self.hidden_size).view(1, 1, -1)
        y = torch.empty_like(x)
        keys, values = (torch.zeros(1, shape.kv_heads, 2, shape.width) for _ in range(2))
        place = [torch.tensor(n, dtype=torch.int32) for n in ([2], [1], 2)]
        own = {"x": x, "keys": keys, "values": values}
        own |= dict(zip(("queries", "last", "total"), place, strict=True))
        inputs = own | _row_shape(1) | self._tables_of[index]
        outputs = {"y": y, "new_keys": keys, "new_values": values}
        Binding.of(self._sessions[index], inputs, outputs).run()
        return y

    def forward(
        self, steps: Sequence[StepInput], layers: LayerRange | None = None
    ) -> list[torch.Tensor]:
        """See `Runtime`."""
        if len(steps) > 1 and not (self.batched and all(s.hidden.shape[1] == 1 for s in steps)):
            raise ValueError("only single rows of a batched runtime are computed together")
        by_torch = [i for i, step in enumerate(steps) if isinstance(step.cache, SessionCache)]
        outputs: dict[int, torch.Tensor] = {}
        for number in by_torch:
            outputs[number] = self._reference().forward([steps[number]], layers)[0]
        rest = [i for i in range(len(steps)) if i not in outputs]
        for number in rest:
            prepare(steps[number])
        caches = [_slot(steps[number]) for number in rest]
        for group in neighbours(caches):
            together = [(steps[rest[i]], caches[i]) for i in group]
            found = self._run(together, layers or self.layers)
            outputs.update(zip((rest[i] for i in group), found, strict=True))
        for number, cache in zip(rest, caches, strict=True):
            cache.commit(steps[number].hidden.shape[1])
        return [outputs[number] for number in range(len(steps))]

    def _run(
        self, steps: Sequence[tuple[StepInput, SlotCache]], layers: LayerRange
    ) -> list[torch.Tensor]:
        """Steps whose slots lie beside each other, in that order."""
        bank, first, stop = steps[0][1].bank, steps[0][1].slot, steps[-1][1].slot + 1
        rows = steps[0][0].hidden.shape[1]
        at = self._pass(bank, slice(first, stop), rows, layers)
        # An idle slot between them has no rows of its own, and one position at least.
        queries, ends = [0] * (stop - first), [max(1, n) for n in bank.lengths[first:stop]]
        given = rows + padding(rows)
        for step, cache in steps:
            slot = cache.slot - first
            queries[slot], ends[slot] = given, cache.length + given
            at.states[0][slot] = step.hidden[0]
        at.queries[:], at.last[:], at.total[0] = queries, [end - 1 for end in ends], max(ends)
        hooks = [(cache.slot - first, hook) for step, cache in steps for hook in step.hooks]
        for number, binding in enumerate(at.bindings):
            if hooks:
                _call(hooks, layers.start + number, "input", at.states[number])
            binding.run()
            if hooks:
                _call(hooks, layers.start + number, "output", at.states[number + 1])
        return [at.states[-1][cache.slot - first][None].clone() for _, cache in steps]

    def _pass(self, bank: Bank, slots: slice, rows: int, layers: LayerRange) -> _Pass:
        key = (id(bank), slots.start, slots.stop, rows, layers)
        known = self._passes.get(key)
        if known is not None:
            self._passes.move_to_end(key)
            return known
        made = self._new_pass(bank, slots, rows, layers)
        if rows <= _KEPT_ROWS:
            self._passes[key] = made
            if len(self._passes) > _KEPT_PASSES:
                self._passes.popitem(last=False)
        return made

    def _new_pass(self, bank: Bank, slots: slice, rows: int, layers: LayerRange) -> _Pass:
        sessions = slots.stop - slots.start
        # What a layer gives is what the next one takes; hooks find each in its place.
        states = [
            torch.zeros(sessions, rows, self.hidden_size) for _ in range(min(3, len(layers) + 1))
        ]
        flow = [states[0], *(states[1 + i % (len(states) - 1)] for i in range(len(layers)))]
        queries, last = (torch.zeros(sessions, dtype=torch.int32) for _ in range(2))
        total = torch.zeros(1, dtype=torch.int32)
        shape = _row_shape(rows)
        bindings = []
        for number, layer in enumerate(range(layers.start, layers.stop)):
            index = layer - self.layers.start
            keys, values = bank.keys[index][slots], bank.values[index][slots]
            cache = {"keys": keys, "values": values}
            inputs = {"x": flow[number], "queries": queries, "last": last, "total": total[0]}
            inputs |= shape | self._tables_of[index]
            outputs = {"y": flow[number + 1], "new_keys": keys, "new_values": values}
            bindings.append(Binding.of(self._sessions[index], inputs | cache, outputs))
        return _Pass(tuple(bindings), tuple(flow), queries.numpy(), last.numpy(), total.numpy())

    def _reference(self) -> TorchRuntime:
        if self._twin is None:
            self._twin = TorchRuntime(self.loaded, device=self.device, dtype=self.dtype)
        return self._twin


def _slot(step: StepInput) -> SlotCache:
    assert isinstance(step.cache, SlotCache)  # noqa: S101 - what `new_cache` gives otherwise
    return step.cache


def _call(hooks: Sequence[tuple[int, Hook]], layer: int, side: str, states: torch.Tensor) -> None:
    """Let the hooks at this place see, and change, their rows of `states`."""
    for row, hook in hooks:
        if hook.site.layer == layer and hook.site.side == side:
            states[row : row + 1] = hook(states[row : row + 1].clone())


def _row_shape(rows: int) -> dict[str, torch.Tensor]:
    """What tells a graph how many rows there are, and how many attention gets beyond them."""
    return {
        "padding": torch.tensor([0, 0, 0, 0, padding(rows), 0]),
        "rows": torch.tensor([rows]),
    }


def _rotary_tables(
    module: Any, parts: Sequence[LayerParts], positions: int
) -> dict[str | None, dict[str, torch.Tensor]]:
    """``cos`` and ``sin`` (positions, half the turned width) by the tables' names."""
    if rope_types(module.config) & {"dynamic", "longrope"}:
        raise NotCompilable("its rotary embedding depends on how long a session is")
    tables: dict[str | None, dict[str, torch.Tensor]] = {}
    for name in {each.attention.table for each in parts}:
        if name is None:
            continue
        kind = (name,) if name else ()
        # A float tells it in which dtype to answer, its value nothing.
        both = module.rotary_emb(torch.zeros(1), torch.arange(positions + SPARE)[None], *kind)
        half = both[0].shape[-1] // 2
        cos, sin = (each[0, :, :half].float().contiguous() for each in both)
        tables[name] = {"cos": cos, "sin": sin}
    return tables


def _cache_shape(parts: Sequence[LayerParts], positions: int) -> CacheShape:
    shapes = {(each.attention.kv_heads, each.attention.width) for each in parts}
    if len(shapes) != 1:
        raise NotCompilable("its layers cache keys and values of different shapes")
    return CacheShape(len(parts), *shapes.pop(), positions)
