"""Mamba's first form (Mamba, Falcon Mamba, Jamba) as other layers are computed: behind a past.

What transformers computes of several rows without Mamba's own kernels begins at the beginning of a
text, whatever came before, and holds numbers for each of these rows, channel and state at once.
Here rows go on from the states that the cache has, one after the other.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_MIXERS = frozenset({"MambaMixer", "FalconMambaMixer", "JambaMambaMixer"})


def going_on(base: Any) -> None:
    """Have the layers of `base` that are of this form go on from what their cache has."""
    for part in [each for each in base.modules() if type(each).__name__ in _MIXERS]:
        part.dt_proj.__class__ = _Kept
        _become(part, _GoesOn)


def taking_cache(base: Any) -> None:
    """Have `base` be called as other models are, who have another name for the cache; its layers go
    on as above."""
    going_on(base)
    _become(base, _TakesCache)


def name_of_cache(model: Any) -> str:
    """What a causal model of transformers calls its cache."""
    is_own = "cache_params" in signature(model.forward).parameters
    return "cache_params" if is_own else "past_key_values"


def _become(part: Any, beside: type[Any]) -> None:
    kind = type(part)
    # By these names transformers knows what may be seen of its layers.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    part.__class__ = type(kind.__name__, (beside, kind), names)


class _Kept(nn.Linear):
    """Its weight is used without it: it is not packed."""


class _TakesCache:
    """The forward of a base model whose layers keep states only."""

    def forward(self, *given: Any, past_key_values: Any = None, **options: Any) -> Any:
        """As that of the base model, with rows of the dtype that it was given."""
        if past_key_values is not None:
            options["cache_params"] = past_key_values
        for name in ("position_ids", "cache_position"):  # the state stands where it stands
            options.pop(name, None)
        output = super().forward(*given, **options)  # type: ignore[misc] # of the base model
        rows = options.get("inputs_embeds")
        if rows is not None:  # between its layers they may be fp32
            output.last_hidden_state = output.last_hidden_state.to(rows.dtype)
        return output


class _GoesOn:
    """The forward of such a layer, of several rows."""

    def forward(
        self, hidden_states: torch.Tensor, cache_params: Any = None, *given: Any, **options: Any
    ) -> torch.Tensor:
        """As that of the layer; there is no padding."""
        if cache_params is None or hidden_states.shape[1] == 1:
            found: torch.Tensor = super().forward(  # type: ignore[misc] # of the layer
                hidden_states, cache_params, *given, **options
            )
            return found
        return _several_rows(self, hidden_states, cache_params)


def _several_rows(layer: Any, hidden: torch.Tensor, cache: Any) -> torch.Tensor:
    """(1, rows, hidden) behind what `cache` has."""
    rows, number, width = hidden.shape[1], layer.layer_idx, layer.conv_kernel_size
    state = cache.get_recurrent_state(number)
    inputs, gate = layer.in_proj(hidden).transpose(1, 2).chunk(2, dim=1)
    inputs = F.pad(cache.update_conv_state(inputs, number, conv_kernel_size=width), (width, 0))
    inputs = inputs[..., -(rows + width - 1) :]
    conv = layer.conv1d
    inputs = layer.act(F.conv1d(inputs, conv.weight, conv.bias, groups=len(conv.weight)))
    sizes = layer.time_step_rank, layer.ssm_state_size, layer.ssm_state_size
    step, entry, exit_ = layer.x_proj(inputs.transpose(1, 2)).split(sizes, -1)
    if hasattr(layer, "dt_layernorm"):
        step, entry, exit_ = (
            layer.dt_layernorm(step), layer.b_layernorm(entry), layer.c_layernorm(exit_)
        )  # fmt: skip
    step = F.linear(step, layer.dt_proj.weight).transpose(1, 2)
    step = F.softplus(step + layer.dt_proj.bias.float()[:, None])
    decay, taken, found = -torch.exp(layer.A_log.float()), step * inputs.float(), []
    state = inputs.new_zeros((), dtype=torch.float32) if state is None else state
    for row in range(rows):
        kept = torch.exp(decay * step[:, :, row, None])
        state = kept * state + taken[:, :, row, None] * entry[:, row, None].float()
        found.append(state.to(exit_.dtype) @ exit_[:, row, :, None])
    cache.update_recurrent_state(state, number)
    output = torch.cat(found, -1) + inputs * layer.D.float()[:, None]
    output = output * F.silu(gate)
    mixed: torch.Tensor = layer.out_proj(output.transpose(1, 2).to(hidden.dtype))
    return mixed
