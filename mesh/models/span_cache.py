"""The cache that transformers makes for a span, also where no layer of that has keys."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)


class SpanCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped here
    """A `DynamicCache` whose length may be asked for where all layers keep states only.

    It is 0 then: what follows from it, masks, is for layers with keys. Positions come with a step.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self._has_keys = any(isinstance(layer, CacheLayerMixin) for layer in self.layers)
        for layer in self.layers:
            layer.__class__ = _KINDS.get(type(layer), type(layer))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """See `Cache`."""
        return int(super().get_seq_length(layer_idx)) if self._has_keys else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """See `Cache`."""
        if not self._has_keys:
            return query_length, 0
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        return int(length), int(offset)


class _States(LinearAttentionLayer):  # type: ignore[misc]
    """transformers' own marks its tensors for torch's compiler, and imports that for it: a second,
    and 75 MB that stay."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """See `LinearAttentionLayer`."""
        if args:  # keys and values
            super().lazy_initialization(*args)
            return
        number, conv = kwargs.get("state_idx", 0), kwargs.get("conv_states")
        recurrent = kwargs.get("recurrent_states")
        if conv is not None:
            self.dtype, self.device = conv.dtype, conv.device
            width = kwargs.get("conv_kernel_size") or conv.shape[-1]
            self.conv_kernel_size[number] = width
            self.conv_states[number] = conv.new_zeros((*conv.shape[:-1], width))
            self.is_conv_states_initialized[number] = True
        if recurrent is not None:
            self.recurrent_states[number] = torch.zeros_like(recurrent)
            self.is_recurrent_states_initialized[number] = True


class _StatesAndKeys(_States, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    pass


class _StatesAndWindow(_States, LinearAttentionAndSlidingWindowAttentionLayer):  # type: ignore[misc]
    pass


_KINDS = {
    LinearAttentionLayer: _States,
    LinearAttentionAndFullAttentionLayer: _StatesAndKeys,
    LinearAttentionAndSlidingWindowAttentionLayer: _StatesAndWindow,
}
