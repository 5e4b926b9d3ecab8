"""What stands behind attention where it is the same for all rows, as a graph is built of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.nn import functional

from mesh.models.standard import ACTIVATION_FIELDS
from mesh.shard.compiled.parts_reader import NotCompilable, PartsReader, rows_out

if TYPE_CHECKING:
    from torch import nn

ACTIVATION_NAMES = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu": "gelu", "relu": "relu", "relu2": "squared_relu",
    "xielu": "xielu",
}  # fmt: skip


_PATHS = ("mlp", "feed_forward", "shared_mlp")
"""What layers call it."""

_FIRSTS, _SECONDS = ("fc1", "dense_h_to_4h"), ("fc2", "dense_4h_to_h")
"""Its products where nothing is gated."""


@dataclass(frozen=True, slots=True)
class Xielu:
    """``positive * x² + beta * x`` above 0, and ``negative * (exp(min(x, limit)) - 1 - x) + beta *
    x`` below (https://arxiv.org/abs/2411.13010)."""

    positive: float
    negative: float
    beta: float
    limit: float


@dataclass(frozen=True, slots=True)
class FeedForward:
    """`up` gives the gate and what it is multiplied with: one module for both, or one for each;
    or, where nothing `is_gated`, just what is activated. `xielu` are the numbers of an activation
    that each layer has learned for itself."""

    up: tuple[nn.Module, ...]
    down: nn.Module
    activation: str
    is_gated: bool
    width: int
    xielu: Xielu | None = None


def feed_forward_of(reader: PartsReader, config: Any, path: str | None = None) -> FeedForward:
    """What stands at `path` in the layer. Raises NotCompilable."""
    path = path or next((each for each in _PATHS if hasattr(reader.layer, each)), _PATHS[0])
    said = (getattr(config, name, None) for name in ACTIVATION_FIELDS)
    named = next((name for name in said if name), None)
    activation = ACTIVATION_NAMES.get(str(named or "silu"))
    if activation is None:
        raise NotCompilable(f"its activation is {named}")
    both = reader.find(f"{path}.gate_up_proj", f"{path}.input_linear")
    gate = reader.find(f"{path}.gate_proj", f"{path}.w1")
    up: tuple[nn.Module, ...]
    if both is not None:
        up = (both,)
    elif gate is not None:
        up = (gate, reader.get(f"{path}.up_proj", f"{path}.w3"))
    else:
        up = (reader.get(*(f"{path}.{name}" for name in ("c_fc", "up_proj", *_FIRSTS))),)
    is_gated = both is not None or gate is not None
    width = sum(rows_out(each) for each in up) // (2 if is_gated else 1)
    down = reader.get(
        *(f"{path}.{name}" for name in ("down_proj", "c_proj", "w2", "output_linear", *_SECONDS))
    )
    xielu = _xielu_of(reader, path) if activation == "xielu" else None
    return FeedForward(up, down, activation, is_gated, width, xielu)


def _xielu_of(reader: PartsReader, path: str) -> Xielu:
    module: Any = reader.get(f"{path}.act_fn")
    beta = float(module.beta)
    positive, negative = (
        float(functional.softplus(each.detach().float()))
        for each in (module.alpha_p, module.alpha_n)
    )
    return Xielu(positive, beta + negative, beta, float(module.eps))
