"""Mixers that keep a running state, as graphs are built of them: of what they are made.

The rates of a `DeltaNet` say how fast its states decay. They are a small part of its numbers and
count much, so they have 8 bit where the others have 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mesh.shard.compiled.parts_reader import Norm, NotCompilable, OutputGate, PartsReader, rows_out

if TYPE_CHECKING:
    from torch import nn

_UNLIMITED = tuple((least, math.inf) for least in (0.0, math.ulp(0.0)))
"""Of time steps, the second as `mesh.models.families` has it."""
UNIT_EPSILON = 1e-6
"""Of queries and keys of a `DeltaNet`, which are made one long."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """A short one along the text, each channel by itself: `taps` (channels, 1, width)."""

    taps: torch.Tensor
    bias: torch.Tensor | None

    @property
    def state(self) -> tuple[int, ...]:
        """The shape of the inputs that it still needs."""
        channels, _, width = self.taps.shape
        return 1, width - 1, channels


class _OfHeads:
    """What gives so many numbers for each of its heads."""

    __slots__ = ()
    heads: int
    width: int

    @property
    def attended(self) -> int:
        """How wide a row is behind it."""
        return self.heads * self.width


@dataclass(frozen=True, slots=True)
class DeltaNet(_OfHeads):
    """Gated linear attention by the delta rule (https://arxiv.org/abs/2412.06464).

    `projections` give queries, keys and values, which go through a `convolution`, and the gate's
    numbers; `rates` how much of a value is written, and what `steps` and `decay` (heads,) make the
    decay of. Queries and keys have fewer heads than values, in turns. Where they are
    `is_interleaved`, each of those heads has what belongs to it beside the others', in one module
    for all and one for the rates.
    """

    projections: tuple[nn.Module, ...]
    rates: tuple[nn.Module, ...]
    output: nn.Module
    convolution: Convolution
    steps: torch.Tensor
    decay: torch.Tensor
    heads: int
    key_heads: int
    width: int
    key_width: int
    gate: OutputGate
    is_interleaved: bool

    @property
    def mixed(self) -> int:
        """How many numbers go through the convolution."""
        return 2 * self.key_heads * self.key_width + self.attended

    @property
    def projected(self) -> int:
        """How wide a row is before it."""
        return self.mixed + 2 * self.heads


@dataclass(frozen=True, slots=True)
class ChannelDeltaNet(_OfHeads):
    """The same where each number of a key decays by itself (Kimi Delta Attention,
    https://arxiv.org/abs/2510.26692), and queries, keys and values have as many heads.

    `projections` give queries, keys and values and what `gates` make the gate's numbers of;
    `rates` how much of a value is written and what `forgetting` makes the decays of, with `steps`
    and `decay` (heads * width,). Both may be gone when the graph is built.
    """

    projections: tuple[nn.Module, ...]
    rates: tuple[nn.Module, ...]
    output: nn.Module
    convolution: Convolution
    steps: torch.Tensor
    decay: torch.Tensor
    heads: int
    width: int
    inner: int
    """How wide is what gates and decays are made of."""
    gate: OutputGate
    gates: nn.Module | None
    forgetting: nn.Module | None

    @property
    def key_heads(self) -> int:
        """As many as there are for values."""
        return self.heads

    @property
    def key_width(self) -> int:
        """As wide as values."""
        return self.width

    @property
    def mixed(self) -> int:
        """How many numbers go through the convolution."""
        return 3 * self.attended

    @property
    def projected(self) -> int:
        """How wide a row is before it."""
        return self.mixed + self.heads + self.attended


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A convolution between two gates (LFM2): `projections` give both and what it is made of."""

    projections: tuple[nn.Module, ...]
    output: nn.Module
    convolution: Convolution
    width: int
    gate: OutputGate
    rates: tuple[nn.Module, ...] = ()

    @property
    def projected(self) -> int:
        """How wide a row is before it."""
        return self.width

    @property
    def attended(self) -> int:
        """How wide a row is behind it."""
        return self.width


@dataclass(frozen=True, slots=True)
class StateSpace(_OfHeads):
    """A selective state space model (Mamba 2, https://arxiv.org/abs/2405.21060).

    `projections` give the gate's numbers, values with what is written and read of the states, all
    of which go through a `convolution`, and the time steps of each head, of which `steps` and
    `decay` (heads,) make the decay. Values pass by their states as far as `passed` (heads,) says.
    What is written and read is the same in each of `groups`.
    """

    projections: tuple[nn.Module, ...]
    output: nn.Module
    convolution: Convolution
    steps: torch.Tensor
    decay: torch.Tensor
    passed: torch.Tensor
    heads: int
    width: int
    groups: int
    key_width: int
    gate: OutputGate
    rates: tuple[nn.Module, ...] = ()

    @property
    def mixed(self) -> int:
        """How many numbers go through the convolution."""
        return self.attended + 2 * self.groups * self.key_width

    @property
    def projected(self) -> int:
        """How wide a row is before it."""
        return self.mixed + self.heads


Recurrence = DeltaNet | ChannelDeltaNet | ShortConvolution | StateSpace
"""Mixers that keep a running state."""


def recurrence_of(reader: PartsReader) -> Recurrence | None:
    """That of a layer, None where it has none that is known. Raises NotCompilable."""
    layer: Any = reader.layer
    if hasattr(layer, "linear_attn"):
        return _delta_net(reader, "linear_attn")
    if hasattr(getattr(layer, "self_attn", None), "forget_gate"):
        return _channel_delta_net(reader, "self_attn")
    if hasattr(layer, "conv"):
        return _short_convolution(reader, "conv")
    if getattr(layer, "mamba", None) is not None:
        return state_space(reader, "mamba")
    return None


def _delta_net(reader: PartsReader, path: str) -> DeltaNet:
    module: Any = reader.get(path)
    whole = reader.find(f"{path}.in_proj_qkvz")
    if whole is None:
        projections = tuple(reader.get(f"{path}.in_proj_{name}") for name in ("qkv", "z"))
        rates = tuple(reader.get(f"{path}.in_proj_{name}") for name in ("b", "a"))
    else:
        projections, rates = (whole,), (reader.get(f"{path}.in_proj_ba"),)
    output, norm = reader.get(f"{path}.out_proj"), reader.get(f"{path}.norm")
    found = DeltaNet(
        projections, rates, output, _convolution(reader, f"{path}.conv1d"),
        module.dt_bias.detach().float().clone(), -module.A_log.detach().float().exp(),
        module.num_v_heads, module.num_k_heads, module.head_v_dim, module.head_k_dim,
        _output_gate("silu", norm), is_interleaved=whole is not None,
    )  # fmt: skip
    if sum(map(rows_out, projections)) != found.mixed + found.attended:
        raise NotCompilable("its queries, keys and values have widths of their own")
    _require_silu(module)
    return found


def _channel_delta_net(reader: PartsReader, path: str) -> ChannelDeltaNet:
    module: Any = reader.get(path)
    forget: Any = reader.get(f"{path}.forget_gate")
    inner = reader.get(f"{path}.forget_gate.f_a_proj")
    heads, width = module.num_heads, module.head_dim
    projections = tuple(reader.get(f"{path}.{name}_proj") for name in ("q", "k", "v", "g_a"))
    decay = -forget.A_log.detach().float().exp().flatten()
    found = ChannelDeltaNet(
        projections, (reader.get(f"{path}.b_proj"), inner), reader.get(f"{path}.o_proj"),
        _convolution(reader, f"{path}.conv1d"), forget.dt_bias.detach().float().clone(),
        decay.repeat_interleave(width), heads, width, rows_out(inner),
        _output_gate("sigmoid", reader.get(f"{path}.o_norm")),
        reader.get(f"{path}.g_b_proj"), reader.get(f"{path}.forget_gate.f_b_proj"),
    )  # fmt: skip
    if sum(map(rows_out, projections)) != found.mixed + found.inner:
        raise NotCompilable("its queries, keys and values have widths of their own")
    _require_silu(module)
    return found


def state_space(reader: PartsReader, path: str) -> StateSpace:
    """That which stands at `path` in the layer. Raises NotCompilable."""
    module: Any = reader.get(path)
    both, output = reader.get(f"{path}.in_proj"), reader.get(f"{path}.out_proj")
    norm = reader.get(f"{path}.norm")
    found = StateSpace(
        (both,), output, _convolution(reader, f"{path}.conv1d"),
        module.dt_bias.detach().float().clone(), -module.A_log.detach().float().exp(),
        module.D.detach().float().clone(), module.num_heads, module.head_dim, module.n_groups,
        module.ssm_state_size, _output_gate("silu", norm, is_first=True),
    )  # fmt: skip
    if rows_out(both) != found.attended + found.projected:
        raise NotCompilable("its projections have widths of their own")
    if tuple(module.time_step_limit) not in _UNLIMITED:
        raise NotCompilable("its time steps are limited")
    _require_silu(module)
    return found


def _require_silu(module: Any) -> None:
    if module.activation != "silu":
        raise NotCompilable("its convolution has another activation than SiLU")


def _short_convolution(reader: PartsReader, path: str) -> ShortConvolution:
    reader.get(path)
    both, output = reader.get(f"{path}.in_proj"), reader.get(f"{path}.out_proj")
    convolution = _convolution(reader, f"{path}.conv")
    return ShortConvolution((both,), output, convolution, rows_out(output), OutputGate(None))


def _convolution(reader: PartsReader, path: str) -> Convolution:
    module: Any = reader.get(path)
    weight, bias = module.weight.detach().float().clone(), module.bias
    if weight.dim() != 3 or weight.shape[1] != 1:
        raise NotCompilable("its convolution mixes channels")
    return Convolution(weight, None if bias is None else bias.detach().float().clone())


def _output_gate(activation: str, norm: Any, *, is_first: bool = False) -> OutputGate:
    """Of a norm that takes the gate as well. Raises NotCompilable for what is none."""
    if not hasattr(norm, "variance_epsilon"):
        raise NotCompilable(f"it normalises by {type(norm).__name__}")
    gamma, epsilon = norm.weight.detach().float().clone(), float(norm.variance_epsilon)
    size = getattr(norm, "group_size", len(gamma))  # Granite's from transformers 5.23 on
    if size == len(gamma):
        return OutputGate(activation, Norm(gamma, None, epsilon), is_first)
    each = Norm(torch.ones(size, device=gamma.device), None, epsilon)
    return OutputGate(activation, each, is_first, gamma)
