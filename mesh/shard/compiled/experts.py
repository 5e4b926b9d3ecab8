"""A mixture of experts, in the terms in which a graph is built, and its weights in few bits.

A router scores the experts for each row, the row goes through the few with the highest scores, and
what those give is added up. Reads transformers' modules, which keep one tensor for all experts;
what it has understood is shown by `proof`, as of all parts. Layout of the operator, ``QMoE``:
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from mesh.models.late_experts import GATE_UP, stacks_in
from mesh.shard.compiled.feed_forward import FeedForward, feed_forward_of
from mesh.shard.compiled.formats import BLOCK, BlockMatrix, rows_of
from mesh.shard.compiled.parts_reader import NotCompilable, PartsReader

_BLOCKS = ("mlp", "feed_forward", "block_sparse_moe", "mixer")
"""What layers call the part in which they have them."""
_BESIDE = "experts"
"""And what they call them where they are in none."""
_SCALE = "routed_scaling_factor"


@dataclass(frozen=True, slots=True)
class Groups:
    """Experts in `count` groups, of which those `kept` are chosen from whose `best` together have
    the highest scores (DeepSeek V3 and, by one of each, V2)."""

    count: int
    kept: int
    best: int


@dataclass(frozen=True, slots=True)
class Router:
    """`weight` (experts, hidden) scores them, by softmax or, where it `is_sigmoid`, each by itself;
    `correction` (experts,) is added only while the `count` best are chosen. Their scores are
    divided by their sum where it `normalises`, and what they give is multiplied by `scale`. Where
    there are `groups` they are of some of those alone. `softcap` bounds what they are scored by.
    All of that is what `module` does, which is in the `block` of the mixture."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    correction: torch.Tensor | None
    count: int
    is_sigmoid: bool
    normalises: bool
    scale: float
    groups: Groups | None
    module: nn.Module
    block: nn.Module
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class Experts:
    """``down(g * sigmoid(slope * g) * (u + shift))`` of `count` experts, each `width` wide inside,
    where g and u are limited to `limit` if there is one; and what is `shared`, which every row goes
    through, added to that, as far as the sigmoid of what its `shared_gate` gives, if it has one.
    Where both are `averaged`, what comes out is half of that."""

    router: Router
    up: ExpertMatrices
    down: ExpertMatrices
    count: int
    width: int
    slope: float
    shift: float
    limit: float | None
    shared: FeedForward | None
    shared_gate: nn.Module | None = None
    is_gated: bool = True
    """Else ``down(activated(u))``."""
    narrowing: nn.Module | None = None
    widening: nn.Module | None = None
    """What rows go through before these experts, and what they give behind them, where that is of
    another width than the layer's rows."""
    averaged: bool = False
    scale: float = 1.0
    """What these experts give together is multiplied by that."""


class ExpertMatrices(nn.Module):
    """The matrices of all experts one behind the other, as one linear layer is seen.

    Of the first, rows of gate and of what it is multiplied with are in turns.
    """

    def __init__(self, owner: nn.Module, name: str, fill: Callable[[], None]) -> None:
        """Those that `owner` has by this `name`; `fill` puts them there if they are not yet."""
        super().__init__()
        self._of = (owner,)  # no child: its tensors are not this one's
        self.name = name
        self._fill = fill

    @property
    def owner(self) -> Any:
        """transformers' module of the experts."""
        return self._of[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """How many there are, and the rows and columns of each."""
        count, rows, columns = getattr(self.owner, self.name).shape
        return (count, columns, rows) if self.owner.is_transposed else (count, rows, columns)

    @property
    def is_apart(self) -> bool:
        """Whether the owner has the rows of gate before those of what it is multiplied with."""
        return self.name == GATE_UP and bool(self.owner.is_concatenated)

    @property
    def weight(self) -> torch.Tensor:
        """(experts * rows, columns)."""
        if getattr(self.owner, self.name).is_meta:
            self._fill()
        stack: torch.Tensor = getattr(self.owner, self.name).detach()
        stack = stack.transpose(1, 2) if self.owner.is_transposed else stack
        if self.is_apart:
            stack = stack.view(len(stack), 2, -1, stack.shape[2]).transpose(1, 2)
        return stack.reshape(-1, self.shape[2])

    @property
    def bias(self) -> torch.Tensor | None:
        """(experts * rows,)."""
        bias = getattr(self.owner, f"{self.name}_bias", None)
        return None if bias is None else bias.detach().reshape(-1)


class BlockExperts:
    """What stands where a module had a tensor of all experts: those in few bits, of which one is
    made dense when it is asked for."""

    def __init__(self, matrix: BlockMatrix, of: ExpertMatrices) -> None:
        """`matrix` is what those have become."""
        self._matrix = matrix
        self._rows = of.shape[1]
        self._is_transposed = bool(of.owner.is_transposed)
        self._is_apart = of.is_apart

    @property
    def shape(self) -> torch.Size:
        """Of the tensor that the module had."""
        rows, columns = self._rows, self._matrix.shape[1]
        each = (columns, rows) if self._is_transposed else (rows, columns)
        return torch.Size((self._matrix.shape[0] // rows, *each))

    def matrix_of(self, expert: int) -> BlockMatrix:
        """That of one, (out, in), its rows in the order of the module."""
        first = expert * self._rows
        if not self._is_apart:
            return rows_of(self._matrix, slice(first, first + self._rows))
        order = torch.arange(first, first + self._rows).view(-1, 2)
        return rows_of(self._matrix, order.t().reshape(-1))

    def __getitem__(self, expert: int | torch.Tensor) -> torch.Tensor:
        """The matrix of one, fp32, in the shape that the module had it in."""
        dense = self.matrix_of(int(expert)).dense()
        return dense.t() if self._is_transposed else dense


def put_blocks(experts: ExpertMatrices, matrix: BlockMatrix) -> None:
    """Have the module compute with these, one expert after the other."""
    owner, name = experts.owner, experts.name
    blocks = BlockExperts(matrix, experts)
    delattr(owner, name)
    setattr(owner, name, blocks)
    # Other ways to compute them want one tensor for all.
    owner.config._experts_implementation = "eager"  # noqa: SLF001 - there is no other setter


def path_of_experts(layer: nn.Module) -> str:
    """Where a layer has them: in a block, or beside it; an empty string where it has none."""
    blocks = (b for b in _BLOCKS if hasattr(getattr(layer, b, None), "experts"))
    beside = _BESIDE if hasattr(layer, _BESIDE) else ""
    return next((f"{block}.experts" for block in blocks), beside)


def both_matrices(
    reader: PartsReader, module: Any, fill: Callable[[], None]
) -> tuple[ExpertMatrices, ExpertMatrices]:
    """What rows go through first in this module of experts, and then. Raises NotCompilable."""
    names = stacks_in(module)
    packed = (getattr(module, name) for name in names)
    within = (each.modules() for each in packed if isinstance(each, nn.Module))
    reader.read.update(map(id, chain.from_iterable(within)))
    up, down = (ExpertMatrices(module, name, fill) for name in names)
    if any(columns % BLOCK for _, _, columns in (up.shape, down.shape)):
        raise NotCompilable(f"its experts have no multiple of {BLOCK} columns")
    return up, down


def experts_of(reader: PartsReader, config: Any, fill: Callable[[], None]) -> Experts | None:
    """The mixture of a layer, None where it has none; `fill` puts its weights there. Raises
    NotCompilable."""
    path = path_of_experts(reader.layer)
    block = path.rpartition(".")[0]
    if not block:
        return None
    module: Any = reader.get(path)
    is_gated = getattr(module, "has_gate", None)
    if is_gated is None or getattr(module, "has_post_expert_norm", False):
        raise NotCompilable(f"its experts are {type(module).__name__}")

    up, down = both_matrices(reader, module, fill)
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    slope, shift = (1.0, 0.0) if alpha is None else (float(alpha), 1.0)
    if alpha is None and is_gated:
        _require_silu(module)
    router = _router(reader, block)
    return Experts(
        router, up, down, up.shape[0], down.shape[2], slope, shift,
        None if limit is None else float(limit), _shared(reader, config, block),
        reader.find(f"{block}.shared_expert_gate"), is_gated,
        _linear(reader, f"{block}.fc1_latent_proj"), _linear(reader, f"{block}.fc2_latent_proj"),
        averaged=getattr(reader.get(block), "shared_expert_combination_strategy", "") == "average",
        scale=_scale_beside(router),
    )  # fmt: skip


def _scale_beside(router: Router) -> float:
    """What the block multiplies by itself, where its router does not."""
    has_own = hasattr(router.module, _SCALE)
    return 1.0 if has_own else float(getattr(router.block, _SCALE, 1.0))


def _linear(reader: PartsReader, path: str) -> nn.Module | None:
    found = reader.find(path)
    return None if isinstance(found, nn.Identity) else found


def _shared(reader: PartsReader, config: Any, block: str) -> FeedForward | None:
    within = (f"{block}.{name}" for name in ("shared_experts", "shared_expert", "shared_mlp"))
    paths = *within, "shared_mlp"
    path = next((each for each in paths if reader.find(each) is not None), None)
    return None if path is None else feed_forward_of(reader, config, path)


def _require_silu(module: Any) -> None:
    row = torch.linspace(-4, 4, 9)
    if not torch.allclose(module.act_fn(row), nn.functional.silu(row)):
        raise NotCompilable("its experts have another activation than SiLU")


def _router(reader: PartsReader, block: str) -> Router:
    owner: Any = reader.get(block)
    found: Any = reader.get(f"{block}.gate", f"{block}.router")
    # Arcee's and Hunyuan's; others score by themselves
    linear = reader.find(f"{block}.router.gate", f"{block}.gate.wg")
    weight = getattr(linear or found, "weight", None)
    # Of one that is packed nothing is told: who needs it has not packed anything.
    if weight is None or (weight.dim() != 2 and weight.numel()):
        raise NotCompilable(f"its experts are chosen by {type(found).__name__}")
    # ERNIE's is beside counts of how often each was chosen, and those are by softmax.
    statics: Any = reader.find(f"{block}.gate.moe_statics")
    correction = getattr(
        statics or found, "e_score_correction_bias", getattr(owner, "expert_bias", None)
    )
    bias, said = getattr(found, "bias", None), getattr(found, "expert_selection_fn", None)
    is_sigmoid = statics is None and (
        said == "sigmoid" or correction is not None or hasattr(owner, "use_expert_bias")
    )
    return Router(
        weight.detach().float().clone(),
        None if bias is None else bias.detach().float().clone(),
        None if correction is None else correction.detach().float().flatten().clone(),
        int(found.top_k),
        is_sigmoid=is_sigmoid,
        normalises=bool(getattr(found, "norm_topk_prob", not hasattr(found, "topk_method")))
        or said == "softmax",
        scale=float(getattr(found, _SCALE, getattr(found, "route_scale", 1.0))),
        groups=_groups(found),
        module=found,
        block=owner,
        softcap=float(getattr(found, "router_logit_softcapping", 0.0)),
    )


def _groups(found: Any) -> Groups | None:
    count = int(getattr(found, "num_group", None) or getattr(found, "n_group", None) or 1)
    method = getattr(found, "topk_method", None)
    if count == 1 or method == "greedy":
        return None
    return Groups(count, int(found.topk_group), 2 if method is None else 1)
