"""The reference runtime: transformers' own model code on sliced layers.

With our cache, our attention where it was checked, and faster linear kernels. Runs every family and
every hook, on every device. Where it is told that it may, steps without hooks go through the same
weights by `lean`, and on CUDA those of few rows by graphs that were captured of it (`cuda`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mesh.models.families import has_states
from mesh.models.progress import Progress
from mesh.models.rope import short_positions
from mesh.models.row_form import RowForm
from mesh.shard import attention as own_attention
from mesh.shard import int4
from mesh.shard.compiled.parts import NotCompilable
from mesh.shard.cuda.captured import CapturedLayers
from mesh.shard.cuda.pool import PoolCache
from mesh.shard.cuda.rows import FULL_ROWS
from mesh.shard.hooks import Hook, Placed, hooked
from mesh.shard.kv import BatchCache, OneSession, SessionCache
from mesh.shard.lean import LeanLayers, fused_places
from mesh.shard.linear import PLAIN, Kernels, Place, choose_kernels
from mesh.shard.packed import Packed
from mesh.shard.protection import Protection
from mesh.shard.rotary import ModuleRopes
from mesh.shard.runtime import StepInput, begun_short, prepare, require_batch
from mesh.shard.selfcheck import (
    AttentionChoice,
    choose_attention,
    lean_agrees,
    short_steps_keep_bits,
)
from mesh.shard.states import StateCache
from mesh.shard.views import layer_view, layers_of
from mesh.shard.weight_check import WeightCheck
from mesh.types import LayerRange

if TYPE_CHECKING:
    from torch import nn

    from mesh.models.load import LoadedSpan


_FEW_ROWS = 1, 4
"""For so many, products in 4 bit on CUDA take half the time that they take for sixteen."""


@dataclass(frozen=True, slots=True)
class _Made:
    """What the layers of a module have become."""

    kernels: Kernels
    attention: AttentionChoice
    lean: LeanLayers | None


def _made(
    module: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None,
    *,
    halved: bool,
    lean: bool,
) -> _Made:
    together = _together(module) if lean else None
    with torch.inference_mode():
        kernels = _in_4_bit(module) or choose_kernels(
            module, dtype, device, progress, halved=halved, together=together or ()
        )
    attention = choose_attention(module, device, dtype)
    pays = kernels.name != PLAIN or device.type == "cuda"
    is_own = attention.name == own_attention.NAME
    layers = _lean(module, device, dtype) if together is not None and pays and is_own else None
    return _Made(kernels, attention, layers)


class TorchRuntime:
    """The layers of one shard on one device. See `mesh.shard.runtime.Runtime`."""

    def __init__(
        self,
        loaded: LoadedSpan,
        *,
        device: torch.device,
        dtype: torch.dtype,
        batch_invariant: bool = False,
        lean: bool = False,
        positions: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """Take over `loaded`: its linear layers may be repacked, its attention replaced.

        With `dtype` fp32 and weights that are not, those of its linear layers stay in 16 bit.
        `lean`: steps without hooks need not go through its modules; with `positions`, which are
        those of all sessions together, short ones are captured on CUDA. Raises UnsupportedFamily
        when the family cannot run on our cache.
        """
        self.layers = loaded.layers
        halved = _is_halved(loaded.module, dtype)
        # What is widened has other bytes than the file.
        self.loaded = replace(loaded, sha256={}) if halved else loaded
        self.device = device
        self.dtype = dtype
        self.row_size = RowForm.of(loaded.module).size
        self._module: nn.Module = loaded.module.eval().requires_grad_(requires_grad=False)
        self._has_states = has_states(loaded.config)
        made = _made(self._module, device, dtype, progress, halved=halved, lean=lean)
        self._lean = made.lean
        few = _FEW_ROWS if made.kernels.name == int4.KERNELS else ()
        self._captured, why_captured = self._capture(positions, few)
        self.protection = Protection(self._module, loaded.pages, *self._beside)
        at_once = 1 if self._captured is None else FULL_ROWS
        are_together = made.attention.batched or self.is_lean
        self.batch_rows = at_once if are_together and not batch_invariant else 0
        self.kernels = self._names(made)
        exact = self._exact_rows()
        # In fp32 other last bits tell no tokens apart, unless they are rounded to bf16 on the way.
        is_fine = dtype == torch.float32 and made.kernels.name != int4.KERNELS
        self.short_rows = 0 if is_fine else exact
        said = (self._said_of_layers(), why_captured or self._said_of_rows(exact)) if lean else ()
        reasons = made.kernels.reason, made.attention.reason, self.protection.reason, *said
        self.reasons = tuple(filter(None, reasons))
        self.weight_bytes = _weight_bytes(self._module)
        """What the weights take in the form in which they are computed with."""
        self._views: dict[LayerRange, nn.Module] = {}
        self._ropes = ModuleRopes(self._module)

    @property
    def is_lean(self) -> bool:
        """Whether steps without hooks go through `lean`."""
        return self._lean is not None

    def _capture(self, positions: int, few: Sequence[int]) -> tuple[CapturedLayers | None, str]:
        """Its short steps captured, where that is possible, and what is to be said of it."""
        if self._lean is None or self.device.type != "cuda" or not positions:
            return None, ""
        if self._lean.short_positions:
            return None, "steps captured: no, long texts are turned otherwise than short ones"
        try:
            captured = CapturedLayers(
                self._lean, self.device, self.dtype,
                hidden_size=self.row_size, positions=positions, few=few,
            )  # fmt: skip
        except NotCompilable as error:
            return None, f"steps captured: no, {error}"
        return captured, captured.reason

    def _names(self, made: _Made) -> str:
        """What the last bits depend on."""
        names = {
            made.kernels.name: True, "lean": self.is_lean, "captured": self._captured is not None,
            made.attention.name: True, "alone": not self.batch_rows,
        }  # fmt: skip
        return "+".join(name for name, holds in names.items() if holds)

    def _said_of_layers(self) -> str:
        return "layers lean: no, by their modules" if self._lean is None else "layers lean: checked"

    def _said_of_rows(self, exact: int) -> str:
        if self._lean is None or self.device.type != "cpu":
            return ""
        bits = "the same bits" if exact else "other last bits on this CPU"
        return f"rows: {bits} in steps of up to {own_attention.SHORT_ROWS} as alone"

    def _exact_rows(self) -> int:
        """Of the longest step of which it is known that each row has the bits that it has alone."""
        if self._captured is not None:
            return FULL_ROWS
        if self._lean is None or self.device.type != "cpu":
            return 0
        exact = short_steps_keep_bits(self._module, self.device, self.dtype, self._lean.forward)
        return own_attention.SHORT_ROWS if exact else 0

    @property
    def _beside(self) -> tuple[nn.Module, ...]:
        """What has weights of its own beside the module."""
        return () if self._lean is None else (self._lean,)

    def new_cache(self, max_tokens: int, hooks: Sequence[Hook] = ()) -> SessionCache | PoolCache:
        if self._captured is not None:
            return self._captured.pool.open(max_tokens)
        kind = StateCache if self._has_states else SessionCache
        cache = kind(len(self.layers), max_tokens)
        cache.short = begun_short(max_tokens, short_positions(self.loaded.config))
        return cache

    def layer(self, number: int) -> nn.Module:
        """The decoder layer of that number in the whole model; LookupError when not here."""
        layer: nn.Module = layers_of(self._module)[number - self.layers.start]
        return layer

    def weight_check(self) -> WeightCheck:
        return WeightCheck(self._module, self.loaded.sha256, *self._beside)

    @torch.inference_mode()
    def forward(
        self, steps: Sequence[StepInput], layers: LayerRange | None = None
    ) -> list[torch.Tensor]:
        require_batch(self, steps)
        for step in steps:
            prepare(step)
        found = self._computed(layers or self.layers, steps)
        for step in steps:
            step.cache.commit(step.hidden.shape[1])
        return found

    def _computed(self, layers: LayerRange, steps: Sequence[StepInput]) -> list[torch.Tensor]:
        if self._lean is None:
            return self._by_modules(layers, steps)
        # Who has none of them keeps the bits that it has without those that have.
        outputs: dict[int, torch.Tensor] = {}
        for hooked_ones in (False, True):
            numbers = [i for i, step in enumerate(steps) if bool(step.hooks) is hooked_ones]
            if numbers:
                run = self._by_modules if hooked_ones else self._run_quickly
                found = run(layers, [steps[i] for i in numbers])
                outputs.update(zip(numbers, found, strict=True))
        return [outputs[i] for i in range(len(steps))]

    def _by_modules(self, layers: LayerRange, steps: Sequence[StepInput]) -> list[torch.Tensor]:
        view = self._view(layers)
        are_single = all(step.hidden.shape[1] == 1 for step in steps)
        if len(steps) > 1 and are_single and not self._has_states and not self._ropes.are_apart:
            return self._together(view, steps)
        return [self._alone(view, step) for step in steps]

    def _run_quickly(self, layers: LayerRange, steps: Sequence[StepInput]) -> list[torch.Tensor]:
        first = self.layers.start
        own = LayerRange(layers.start - first, layers.stop - first)
        if self._captured is not None and all(map(self._captured.takes, steps)):
            return self._captured.forward(steps, own)
        return self._run_lean(own, steps)

    def _run_lean(self, layers: LayerRange, steps: Sequence[StepInput]) -> list[torch.Tensor]:
        run = partial(self._run_lean_rows, layers)
        rows = [self._rows_of(step, run) for step in steps]
        single = [i for i, each in enumerate(rows) if each.shape[1] == 1]
        outputs: dict[int, torch.Tensor] = {}
        # Who has rows to compute once more is not computed with others.
        for group in (single, *([i] for i in range(len(steps)) if i not in single)):
            if group:
                found = run(
                    [_own_cache(steps[i]) for i in group], torch.cat([rows[i] for i in group])
                )
                outputs.update(zip(group, torch.split(found, 1), strict=True))
        return [outputs[i][:, -step.hidden.shape[1] :] for i, step in enumerate(steps)]

    def _run_lean_rows(
        self, layers: LayerRange, caches: Sequence[OneSession], hidden: torch.Tensor
    ) -> torch.Tensor:
        """(sessions, rows, hidden) where each of them is computed up to."""
        assert self._lean is not None  # noqa: S101 - asked before
        rows = range(hidden.shape[1])
        positions = [[cache.computed + row for row in rows] for cache in caches]
        return self._lean.forward(
            hidden, torch.tensor(positions, device=self.device), caches, layers
        )

    def _rows_of(
        self, step: StepInput, run: Callable[[Sequence[OneSession], torch.Tensor], object]
    ) -> torch.Tensor:
        """What is to be computed for a step, (1, rows, hidden) of which its own come last; `run`
        has computed what comes before them by itself."""
        cache, hidden = _own_cache(step), step.hidden.to(self.device, self.dtype)
        if not isinstance(cache, StateCache):
            return hidden
        return cache.rows_for(hidden, partial(run, [cache]))

    def _alone(self, view: nn.Module, step: StepInput) -> torch.Tensor:
        def run(caches: Sequence[OneSession], hidden: torch.Tensor) -> torch.Tensor:
            return self._run_behind(view, hidden, caches[0], step.hooks)

        return run([_own_cache(step)], self._rows_of(step, run))[:, -step.hidden.shape[1] :]

    def _run_behind(
        self, view: nn.Module, hidden: torch.Tensor, cache: OneSession, hooks: Sequence[Hook]
    ) -> torch.Tensor:
        first = cache.computed
        positions = torch.arange(first, first + hidden.shape[1], device=self.device)[None]
        return self._run(view, hidden, positions, cache, [(0, hook) for hook in hooks])

    def _together(self, view: nn.Module, steps: Sequence[StepInput]) -> list[torch.Tensor]:
        hidden = torch.cat([step.hidden for step in steps])
        positions = torch.tensor([[step.position] for step in steps], device=self.device)
        placed = [(row, hook) for row, step in enumerate(steps) for hook in step.hooks]
        cache = BatchCache([_own_cache(step) for step in steps])
        output = self._run(view, hidden, positions, cache, placed)
        return list(output.tensor_split(len(steps)))

    def _run(
        self,
        view: nn.Module,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
        placed: Sequence[Placed],
    ) -> torch.Tensor:
        if placed:
            with hooked(self.layer, placed, (hidden.shape[0], hidden.shape[1])):
                return self._run(view, hidden, positions, cache, ())
        with self._ropes.of(cache):
            output: torch.Tensor = view(
                inputs_embeds=hidden.to(self.device, self.dtype),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
        return output

    def _view(self, layers: LayerRange) -> nn.Module:
        view = self._views.get(layers)
        if view is None:
            first = self.layers.start
            view = layer_view(self._module, layers.start - first, layers.stop - first)
            self._views[layers] = view
        return view


def _is_halved(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether its weights are still in the 16 bits they are stored in, though fp32 is computed."""
    if dtype != torch.float32:
        return False
    halves = (torch.bfloat16, torch.float16)
    return any(parameter.dtype in halves for parameter in module.parameters())


def _in_4_bit(module: nn.Module) -> Kernels | None:
    """What multiplies in a module whose layers are packed in 4 bit already."""
    packed = sum(isinstance(part, int4.Int4Linear) for part in module.modules())
    why = f"kernels {int4.KERNELS}: {packed} matrices in 4 bit, checked"
    return Kernels(int4.KERNELS, why) if packed else None


def _together(module: nn.Module) -> list[list[Place]] | None:
    """Which of its layers become one product; None when it is not made of standard layers."""
    try:
        return fused_places(module)
    except NotCompilable:
        return None


def _lean(module: nn.Module, device: torch.device, dtype: torch.dtype) -> LeanLayers | None:
    """Lean layers over its packed products, if they give the same numbers here."""
    try:
        with torch.inference_mode():
            layers = LeanLayers(module)
            return layers if lean_agrees(module, device, dtype, layers.forward) else None
    except NotCompilable:
        return None


def _weight_bytes(module: nn.Module) -> int:
    plain = {t.data_ptr(): t.nbytes for t in _tensors(module)}
    packed = (part.weight_bytes for part in module.modules() if isinstance(part, Packed))
    return sum(plain.values()) + sum(packed)


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _own_cache(step: StepInput) -> OneSession:
    """Its cache, which `new_cache` made."""
    assert isinstance(step.cache, OneSession)  # noqa: S101 - as said
    return step.cache
