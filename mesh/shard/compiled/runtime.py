"""The compiled runtime: the layers of a span in 8 or 4 bit, as graphs on the CPU.

Each layer has its own and there is not one for all: a route may use a part of a span, hooks stand
between layers, and sessions meet everywhere but in the mixer. Synchronous and not thread-safe, as
the torch runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import onnxruntime
import torch
from torch import nn

from mesh.models.rope import short_positions
from mesh.models.row_form import RowForm
from mesh.shard.attention import SHORT_ROWS
from mesh.shard.compiled.attention_graph import may_group, reach
from mesh.shard.compiled.canary import CanaryCheck
from mesh.shard.compiled.lone_rows import fewest_rows, is_grouped
from mesh.shard.compiled.parts import Attention, LayerParts
from mesh.shard.compiled.passes import (
    KEPT_ROWS,
    Attending,
    BoundProducts,
    PassPlace,
    Workspace,
    layer_sessions,
)
from mesh.shard.compiled.recurrence_graph import states_of
from mesh.shard.compiled.slots import (
    SPARE,
    Bank,
    Cached,
    CacheShape,
    KeyShape,
    SeenKeys,
    SlotCache,
)
from mesh.shard.compiled.state_slots import Banks, StateSlotCache
from mesh.shard.compiled.store import GraphSpan
from mesh.shard.hooks import Hook
from mesh.shard.kv import SessionCache
from mesh.shard.memory import settle
from mesh.shard.rotary import Rotary
from mesh.shard.runtime import KeyValueCache, StepInput, begun_short, prepare, require_batch
from mesh.shard.torch_runtime import TorchRuntime
from mesh.shard.views import layers_of
from mesh.types import LayerRange

_SCORES_BYTES = 32 << 20
"""What a piece of a prompt may take at once in attention that holds all its weights over positions:
half of what a shard has to spare."""

_BATCH_ROWS = 1024
"""A row has the same bits whatever it is computed with, so pieces of prompts may join as well; but
with experts, where rows of short steps are computed one by one, and longer pieces by themselves."""


class CompiledRuntime:
    """See `mesh.shard.runtime.Runtime`.

    A session with hooks inside a layer, where a graph has no place for them, is computed by the
    torch runtime on the same weights; that is slow, as those are made dense again for each step.
    """

    probes = 64
    """How many rows there are to ask a layer with: so many miss hardly any of 128 experts of which
    each meets eight; and what one does not tell, as it is rounded to 8 bit before a product,
    another may."""

    def __init__(
        self, span: GraphSpan, *, threads: int, positions: int, batch_invariant: bool = False
    ) -> None:
        """`positions` are the most that a session may have. Raises NotCompilable."""
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.quant = span.quant
        self.loaded = span.loaded
        self.layers = span.loaded.layers
        self._module: Any = span.loaded.module.eval()
        self._form = RowForm.of(self._module)
        self.row_size = self._form.size
        self._twin: TorchRuntime | None = None
        parts = [layer.parts for layer in span.layers]
        attentions = [each.mixer for each in parts if isinstance(each.mixer, Attention)]
        rotary = _rotary_tables(self._module, attentions, positions)
        self._banks = Banks(_cache_shape(parts, positions))
        self._sessions = layer_sessions(span, threads, *rotary)
        self._fewest_rows = fewest_rows(
            product for layer in span.layers for product in layer.products.values()
        )
        self._kept = self._workspace(KEPT_ROWS)
        self._is_mixed = any(each.is_mixed for each in self._sessions)
        at_once = SHORT_ROWS if self._is_mixed else _BATCH_ROWS
        self.batch_rows = 0 if batch_invariant else at_once
        self.short_rows = SHORT_ROWS if self._is_mixed else 0
        how = "" if self.batch_rows else "+alone"
        grouped = [each for each in attentions if is_grouped(each)]
        latent = [each for each in attentions if each.latent is not None]
        self._scores = {(each.heads, reach(each)) for each in grouped + latent}
        if grouped:
            may_be = sum(map(may_group, attentions))
            how += "+grouped" if len(grouped) == may_be else f"+grouped{len(grouped)}"
        self.kernels = f"onnxruntime-{onnxruntime.__version__}+{span.quant or 'fp32'}{how}"
        self.weight_bytes = span.weight_bytes
        size = f"{self.weight_bytes / 2**20:.0f} MiB"
        self.reasons: tuple[str, ...] = (
            f"runtime compiled: {len(parts)} layers in {span.quant or 'fp32'}, {size}",
        )
        for pages in span.loaded.pages:
            pages.forget()  # the sessions have taken what they need of them

    def new_cache(self, max_tokens: int, hooks: Sequence[Hook] = ()) -> KeyValueCache:
        if any(hook.site.part for hook in hooks):
            return self._reference().new_cache(max_tokens)
        cache = self._banks.open(max_tokens)
        cache.short = begun_short(max_tokens, short_positions(self.loaded.config))
        return cache

    def layer(self, number: int) -> nn.Module:
        layer: nn.Module = layers_of(self._module)[number - self.layers.start]
        return layer

    def weight_check(self) -> CanaryCheck:
        return CanaryCheck(self)

    def probe(self, layer: int, number: int = 0) -> torch.Tensor:
        """What layer `layer` makes of a row that is always the same, for its mixer and in the end,
        (numbers,): there is one for each `number` below `probes`.

        Touches no session; another thread may compute meanwhile.
        """
        index = layer - self.layers.start
        rows = self._fewest_rows
        workspace = Workspace(self._sessions[index : index + 1], self._form, rows)
        row = torch.linspace(-1, 1, self.row_size)
        if number:
            row = torch.randn(self.row_size, generator=torch.Generator().manual_seed(number))
        workspace.put(row.expand(1, rows, -1), slice(rows), 0, LayerRange(layer, layer + 1))
        cached = self._banks.shape.layers[index]
        shape = CacheShape((cached.of if isinstance(cached, SeenKeys) else cached,), SPARE)
        place = PassPlace(Bank(shape), 0, 0, 1)
        attending = workspace.attending(place)
        attending.stand(0)
        _run_layer(workspace.products(rows, 1)[0], 0, [attending])
        # Of queries and keys the answer of a row that is alone says nothing.
        found = *workspace.before_mixer(0, 1), workspace.state(1, 1)
        return torch.cat([each.flatten() for each in found])

    def forward(
        self, steps: Sequence[StepInput], layers: LayerRange | None = None
    ) -> list[torch.Tensor]:
        require_batch(self, steps)
        hooked = [i for i, step in enumerate(steps) if isinstance(step.cache, SessionCache)]
        try:
            return self._computed(steps, hooked, layers or self.layers)
        except BaseException:
            for number in hooked:  # each of them is committed when it is computed
                steps[number].cache.cut(steps[number].position)
            raise

    def _computed(
        self, steps: Sequence[StepInput], by_torch: Sequence[int], layers: LayerRange
    ) -> list[torch.Tensor]:
        outputs: dict[int, torch.Tensor] = {}
        for number in by_torch:
            outputs[number] = self._reference().forward([steps[number]], layers)[0]
        rest = [i for i in range(len(steps)) if i not in outputs]
        for number in rest:
            prepare(steps[number])
        # In the order of their slots, so that the same sessions meet at the same places again.
        rest.sort(key=lambda number: _slot(steps[number]).slot)
        if rest:
            whole = [self._with_rows_again(steps[number], layers) for number in rest]
            found = self._run(whole, layers)
            outputs.update(zip(rest, found, strict=True))
        for number in rest:
            rows = steps[number].hidden.shape[1]
            steps[number].cache.commit(rows)
            outputs[number] = outputs[number][:, -rows:]
        return [outputs[number] for number in range(len(steps))]

    def _with_rows_again(self, step: StepInput, layers: LayerRange) -> StepInput:
        """What is computed for a step: its rows, where there are running states perhaps behind
        others that their session has to compute once more."""
        cache = step.cache
        if not isinstance(cache, StateSlotCache):
            return step

        def run(again: torch.Tensor) -> None:
            self._run([replace(step, hidden=again)], layers)

        return replace(step, hidden=cache.rows_for(step.hidden, run))

    def _run(self, steps: Sequence[StepInput], layers: LayerRange) -> list[torch.Tensor]:
        places, count = _places(steps)
        rows = max(count, self._fewest_rows)
        workspace = self._kept if rows <= KEPT_ROWS else self._workspace(rows)
        begin, end = (each - self.layers.start for each in (layers.start, layers.stop))
        for step, place in zip(steps, places, strict=True):
            workspace.put(step.hidden, place.slice, begin, self.layers)
        if rows > count:
            workspace.state(begin, rows)[:, count:] = 0.0
        attending = []
        for step, place in zip(steps, places, strict=True):
            before = _slot(step).computed
            for piece in place.pieces(self._rows_at_once(before, place.rows)):
                attending.append(workspace.attending(piece))
                attending[-1].stand(before + piece.start - place.start)
        hooks = [
            (p.slice, hook) for step, p in zip(steps, places, strict=True) for hook in step.hooks
        ]
        is_short = max(place.rows for place in places) <= SHORT_ROWS
        products = workspace.products(rows, count if self._is_mixed and is_short else 0)
        for number in range(begin, end):
            if hooks:
                at = self.layers.start + number
                _call(hooks, at, "input", workspace.state(number, rows))
            _run_layer(products[number], number, attending)
            if hooks:
                _call(hooks, at, "output", workspace.state(number + 1, rows))
        found = workspace.state(end, rows)
        return [
            self._form.with_states(step.hidden, found[:, place.slice].clone())
            for step, place in zip(steps, places, strict=True)
        ]

    def _rows_at_once(self, before: int, rows: int) -> int:
        """How many of so many `rows` have their weights over positions held at once by attention
        that is grouped; an even number, as `padding` asks for."""
        if not self._scores:
            return 1 << 30
        most = max(
            heads * (rows + (before if far is None else min(before, far)))
            for heads, far in self._scores
        )
        at_once = max(2, _SCORES_BYTES // (4 * most))
        return 1 << (at_once.bit_length() - 1)  # few lengths, so that few are bound

    def _workspace(self, rows: int) -> Workspace:
        return Workspace(self._sessions, self._form, rows)

    def _reference(self) -> TorchRuntime:
        if self._twin is None:
            self._twin = TorchRuntime(self.loaded, device=self.device, dtype=self.dtype)
            settle()
        return self._twin


def _run_layer(products: BoundProducts, number: int, attending: Sequence[Attending]) -> None:
    if products.front is not None:
        products.front.run()
        for each in attending:
            each.bindings[number].run()
    for part in products.back:
        part.run()


def _slot(step: StepInput) -> SlotCache:
    assert isinstance(step.cache, SlotCache)  # noqa: S101 - what `new_cache` gives otherwise
    return step.cache


def _places(steps: Sequence[StepInput]) -> tuple[list[PassPlace], int]:
    """Where each stands among all rows, and how many those are."""
    places, start = [], 0
    for step in steps:
        cache, rows = _slot(step), step.hidden.shape[1]
        reads = cache.copy_read
        copies = reads, 1 - reads
        places.append(PassPlace(cache.bank, cache.slot, start, rows, *copies, not cache.short))
        start += rows
    return places, start


def _call(hooks: Sequence[tuple[slice, Hook]], layer: int, side: str, state: torch.Tensor) -> None:
    """Let the hooks at this place see, and change, their rows of `state`."""
    for rows, hook in hooks:
        if hook.site.layer == layer and hook.site.side == side:
            state[:, rows] = hook(state[:, rows].clone())


_Tables = dict[str | None, dict[str, torch.Tensor]]


def _rotary_tables(
    module: Any, attentions: Sequence[Attention], positions: int
) -> tuple[_Tables, _Tables]:
    """``cos`` and ``sin`` (positions, half the turned width) by the tables' names, and ``growth``
    (positions,) where queries grow: of short texts, and of long ones, which are mostly the same."""
    rotary = Rotary(module, (each.table for each in attentions if each.table is not None))
    at, like = torch.arange(positions + SPARE), torch.zeros(1)

    def tables(at: torch.Tensor, *, are_long: bool) -> _Tables:
        found: _Tables = {}
        for name, growth, is_back in {(a.table, a.growth, a.turns_back) for a in attentions}:
            if name is None:
                continue
            both = rotary.halves(like, at[None], name, [are_long])
            cos, sin = (each[0].float().contiguous() for each in both)
            found[name] = {"cos": cos, "sin": -sin if is_back else sin}
            if growth is not None:
                found[name]["growth"] = growth.factors(at)
        return found

    if not rotary.short:
        same = tables(at, are_long=False)
        return same, same
    # A short text has no more positions; the padding behind its last row is turned somehow.
    within = at[: rotary.short + SPARE].clamp(max=rotary.short - 1)
    return tables(within, are_long=False), tables(at, are_long=True)


def _cache_shape(parts: Sequence[LayerParts], positions: int) -> CacheShape:
    return CacheShape(tuple(map(_cached, parts)), positions)


def _cached(parts: LayerParts) -> Cached | None:
    mixer = parts.mixer
    if mixer is None:
        return None
    if not isinstance(mixer, Attention):
        return states_of(mixer)
    keys = KeyShape(mixer.kv_heads, mixer.width, has_values=mixer.latent is None)
    return keys if mixer.sees is None else SeenKeys(mixer.sees, keys)
