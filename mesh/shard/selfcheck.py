"""Which attention a loaded span can run with, found by running it.

A span runs batched over sessions only after it gave the same numbers as transformers' own
implementation on a few rows; otherwise it runs stock and one session at a time. Slower is
acceptable, another answer is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mesh.errors import UnsupportedFamily
from mesh.models.families import has_states, layer_kinds
from mesh.models.rope import rope_types, short_positions
from mesh.models.row_form import RowForm
from mesh.models.span_cache import SpanCache
from mesh.shard import attention, int4
from mesh.shard.kv import BatchCache, SessionCache
from mesh.shard.states import StateCache
from mesh.shard.views import layer_view, layers_of
from mesh.types import LayerRange

_ROWS = 5
_SHORT = 3
_FAILURES = (
    attention.NotExpressible, AttributeError, IndexError, KeyError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""What a model raises that does more with its keys or masks than hand them on."""


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The attention implementation in use, whether sessions are batched with it, and why."""

    name: str
    batched: bool
    reason: str


def choose_attention(
    module: nn.Module, device: torch.device, dtype: torch.dtype
) -> AttentionChoice:
    """Pick for `module` and switch it over.

    Raises UnsupportedFamily when not even transformers' own implementation gives equal numbers with
    our cache.
    """
    attention.register()
    probe = _Probe(module, device, dtype)
    stock = "sdpa" if getattr(module, "_supports_sdpa", False) else "eager"
    expected = probe.reference(stock)
    keeps_states = has_states(module.config)
    try:
        agrees = probe.agrees(attention.CHECKING_NAME, expected, batched=not keeps_states)
        why_not = "it gave other numbers"
    except _FAILURES as error:
        agrees, why_not = False, f"the model uses {error}"
    if agrees:
        probe.use(attention.NAME)
        batched = _rope_ignores_neighbours(module.config) and not keeps_states
        return AttentionChoice(attention.NAME, batched, f"attention {attention.NAME}: checked")
    try:
        agrees = probe.agrees(stock, expected, batched=False)
    except _FAILURES as error:
        agrees, why_not = False, f"{why_not}; with {stock}: {error}"
    if not agrees:
        raise UnsupportedFamily(
            f"{type(module).__name__} cannot run with a cache that is cut back ({why_not}).",
            fix="Use a model of a supported family.",
        )
    return AttentionChoice(stock, False, f"attention {stock}, sessions one by one: {why_not}")


Forward = Callable[[torch.Tensor, torch.Tensor, Sequence[SessionCache], LayerRange], torch.Tensor]
"""As `mesh.shard.lean.LeanLayers.forward`."""


def lean_agrees(
    module: nn.Module, device: torch.device, dtype: torch.dtype, forward: Forward
) -> bool:
    """Whether lean layers give the numbers of the modules, which run with our attention."""
    probe = _Probe(module, device, dtype)
    expected = probe.reference(attention.NAME)
    return probe.agrees(attention.NAME, expected, batched=True, forward=forward)


def short_steps_keep_bits(
    module: nn.Module, device: torch.device, dtype: torch.dtype, forward: Forward
) -> bool:
    """Whether lean layers give each row of a step of a few rows the bits that it has alone."""
    return _Probe(module, device, dtype).is_row_exact(forward)


class _Probe:
    """The first layers of a span, as many as show every kind of layer, run on a few random rows."""

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        self._view = layer_view(module, 0, _layers_to_see_every_kind(module))
        self._device = device
        self._dtype = dtype
        seeded = torch.Generator().manual_seed(20)
        rows = torch.randn(1, _ROWS + 1, RowForm.of(module).size, generator=seeded)
        self._rows = rows.to(device, dtype)
        # The layers read the span's config, the view's own forward reads the cut one.
        self._configs: tuple[Any, Any] = (module.config, self._view.config)
        self._has_states = has_states(module.config)
        # On their way into and out of these, rows are rounded to bf16.
        self._is_rounded = any(isinstance(part, int4.Int4Linear) for part in module.modules())
        self._forward = self._by_modules

    def use(self, name: str) -> None:
        """Switch the span, not only the probe, to attention `name`."""
        for config in self._configs:
            config._attn_implementation = name  # noqa: SLF001 - its only setter

    @torch.inference_mode()
    def reference(self, name: str) -> torch.Tensor:
        """(3, hidden): the row after `_ROWS`, the last of them, the row after `_SHORT`."""
        self.use(name)
        answers = []
        for past in (_ROWS, _SHORT):
            cache = SpanCache(self._view.config)
            chunk = self._run(self._rows[:, :past], 0, cache)
            answers.append(self._run(self._rows[:, past : past + 1], past, cache)[:, -1])
            if past == _ROWS:
                answers.append(chunk[:, -1])
        return torch.cat(answers)

    @torch.inference_mode()
    def agrees(
        self,
        name: str,
        expected: torch.Tensor,
        *,
        batched: bool,
        forward: Forward | None = None,
    ) -> bool:
        """Whether implementation `name` with our caches gives `expected`, after a cut as well.

        By `forward` unless that is None.
        """
        self.use(name)
        if forward is not None:
            self._go_by(forward)
        caches = [self._cache() for _ in range(2)]
        for cache in caches:  # as transformers turns so few rows
            cache.short = short_positions(self._configs[1])
        chunk = self._step(caches[0], self._rows[:, :_ROWS])
        # Who goes back on running states has rows to compute again, and not with others.
        beyond = 0 if batched and self._has_states else 1
        self._step(caches[1], self._rows[:, : _SHORT + beyond])
        caches[1].cut(_SHORT)
        if batched:
            for cache in caches:
                cache.reserve(1)
            hidden = torch.cat([self._rows[:, _ROWS:], self._rows[:, _SHORT : _SHORT + 1]])
            positions = torch.tensor([[_ROWS], [_SHORT]], device=self._device)
            long, short = self._forward(hidden, positions, BatchCache(caches)).tensor_split(2)
        else:
            long = self._step(caches[0], self._rows[:, _ROWS:])
            short = self._step(caches[1], self._rows[:, _SHORT : _SHORT + 1])
        return self._close(torch.cat([long[:, -1], chunk[:, -1], short[:, -1]]), expected)

    @torch.inference_mode()
    def is_row_exact(self, forward: Forward) -> bool:
        """Whether the rows of steps of 2, 4, ... `SHORT_ROWS` are those of as many steps."""
        self._go_by(forward)
        seeded = torch.Generator().manual_seed(21)
        shape = 1, _SHORT + attention.SHORT_ROWS, self._rows.shape[2]
        rows = torch.randn(shape, generator=seeded).to(self._device, self._dtype)
        first, others = rows[:, :_SHORT], rows[:, _SHORT:]
        cache = self._cache()
        self._step(cache, first)
        alone = torch.cat([self._step(cache, row) for row in torch.split(others, 1, 1)], 1)
        count = 1
        while (count := 2 * count) <= attention.SHORT_ROWS:
            cache.cut(_SHORT)
            if not torch.equal(self._step(cache, others[:, :count]), alone[:, :count]):
                return False
        return True

    def _go_by(self, forward: Forward) -> None:
        layers = LayerRange(0, self._configs[1].num_hidden_layers)
        self._forward = lambda hidden, positions, cache: forward(
            hidden, positions, getattr(cache, "caches", [cache]), layers
        )

    def _cache(self) -> SessionCache:
        config = self._configs[1]
        kind = StateCache if self._has_states else SessionCache
        return kind(config.num_hidden_layers, 64)

    def _close(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        inputs = self._rows[0, [_ROWS, _ROWS - 1, _SHORT]].float()
        exact = self._dtype == torch.float32 and not self._is_rounded
        # Relative to what the layers add: the residual stream would hide what they do.
        allowed = (1e-4 if exact else 0.05) * (expected.float() - inputs).norm()
        allowed += 4 * torch.finfo(self._dtype).eps * expected.float().norm()
        return bool((found.float() - expected.float()).norm() <= allowed)

    def _step(self, cache: SessionCache, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.shape[1]
        cache.reserve(rows)
        if isinstance(cache, StateCache):
            hidden = cache.rows_for(hidden, lambda again: self._run(again, cache.computed, cache))
        output = self._run(hidden, cache.computed, cache)
        cache.commit(rows)
        return output[:, -rows:]

    def _run(self, hidden: torch.Tensor, past: int, cache: Any) -> torch.Tensor:
        positions = torch.arange(past, past + hidden.shape[1], device=self._device)
        return self._forward(hidden, positions[None], cache)

    def _by_modules(
        self, hidden: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        output: torch.Tensor = self._view(
            inputs_embeds=hidden, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state
        return output


def _rope_ignores_neighbours(config: Any) -> bool:
    # These pick their frequencies by the largest position in the batch.
    return not rope_types(config) & {"dynamic", "longrope"}


def _layers_to_see_every_kind(module: nn.Module) -> int:
    config: Any = module.config
    types = layer_kinds(config) or [""] * config.num_hidden_layers
    kinds = [
        (kind, *(type(part).__name__ for part in layer.modules()))
        for kind, layer in zip(types, layers_of(module), strict=True)
    ]
    return max(kinds.index(kind) for kind in set(kinds)) + 1
