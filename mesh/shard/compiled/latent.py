"""Keys and values that are made of a latent (https://arxiv.org/abs/2405.04434), as graphs compute
them.

Of each position what is cached is the latent, some hundred numbers for all heads together, and not
the keys and values that a module makes of it anew for each step. A key meets a query as well as the
latent meets what the matrix of keys, turned around, makes of that query; and the latents are added
up before the matrix of values is applied and not behind it. So the weights of one linear layer are
two products here, each of a matrix for each head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mesh.models.coded.numbers import layer_of_latents
from mesh.models.header import TensorEntry
from mesh.shard.compiled.formats import BlockMatrix, Quant, dense_weight, quantise, rows_of
from mesh.shard.compiled.parts_reader import Norm, NotCompilable, PartsReader
from mesh.shard.compiled.stored_matrices import matrix_of

DOWN = "kv_a_proj_with_mqa"
"""What the module that makes latents is called by all families that have some."""
_STACKS, _PARTS = ("keys", "values"), ("codes", "scales", "zeros")
"""Of a `LatentLinear`, and of a `BlockMatrix`."""


@dataclass(frozen=True, slots=True)
class Latent:
    """What attention over latents has beside the rest: of each head, `turned` numbers turn by
    position, which keys share, and `plain` do not.

    `rank` is how many numbers a latent has, normalised by `norm`. Where queries are made in two
    steps, `queries` is the second, behind `query_norm`; it may be gone when the graph is built.
    """

    rank: int
    plain: int
    turned: int
    norm: Norm
    query_norm: Norm | None
    queries: nn.Module | None
    keys: LatentRows | None
    values: LatentRows | None

    @property
    def width(self) -> int:
        """Of a query and a key."""
        return self.turned + self.rank


class LatentRows(nn.Module):
    """The matrices that make all heads' keys of a latent, turned around, or those that make their
    values, one behind the other, as one linear layer is seen."""

    bias = None

    def __init__(self, linear: nn.Module, heads: int, plain: int, *, is_of_keys: bool) -> None:
        """Of each head `linear` has `plain` rows that make keys, and others behind them."""
        super().__init__()
        self._of = (linear,)  # no child: its tensors are not this one's
        self.heads = heads
        self._plain = plain
        self.is_of_keys = is_of_keys

    @property
    def linear(self) -> nn.Module:
        """The layer that makes keys and values."""
        return self._of[0]

    @property
    def weight(self) -> torch.Tensor:
        """(heads * rank, plain) of keys, (heads * value width, rank) of values."""
        return self._cut(dense_weight(self.linear))

    def of_stored(self, entry: TensorEntry, quant: Quant) -> BlockMatrix:
        """The same where the layer's weight is stored in blocks. Where keys and values are stored
        apart it is what is stored; else keys, whose blocks lie across those, are rounded once more.
        Raises BadCheckpoint."""
        if entry.coding is not None and entry.coding.kind == "latent":
            part = entry.coding.parts["keys" if self.is_of_keys else "values"]
            return matrix_of(part, quant)
        if self.is_of_keys:
            return quantise(self._cut(matrix_of(entry, "int8").dense()), quant)
        matrix = matrix_of(entry, quant)
        numbers = torch.arange(matrix.shape[0]).view(self.heads, -1)
        return rows_of(matrix, numbers[:, self._plain :].flatten())

    def _cut(self, weight: torch.Tensor) -> torch.Tensor:
        each = weight.view(self.heads, -1, weight.shape[1])
        if self.is_of_keys:
            return each[:, : self._plain].transpose(1, 2).flatten(0, 1)
        return each[:, self._plain :].flatten(0, 1)


class LatentLinear(nn.Module):
    """The linear layer that two `LatentRows` are of, computed in torch from what they became; slow,
    as `BlockLinear`."""

    def __init__(self, keys: BlockMatrix, values: BlockMatrix) -> None:
        super().__init__()
        self._formats = [(each.bits, each.shape) for each in (keys, values)]
        for name, matrix in zip(_STACKS, (keys, values), strict=True):
            for part in _PARTS:
                self.register_buffer(f"{name}_{part}", getattr(matrix, part))

    @property
    def weight(self) -> torch.Tensor:
        """(out, in) fp32, made for whoever asks."""
        matrices = (
            BlockMatrix(bits, shape, *(getattr(self, f"{name}_{part}") for part in _PARTS))
            for name, (bits, shape) in zip(_STACKS, self._formats, strict=True)
        )
        return layer_of_latents(*(each.dense() for each in matrices))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, rank) -> (…, heads * (plain + value width))."""
        return F.linear(x, self.weight.to(x.dtype))


def latent_of(
    reader: PartsReader, module: Any, path: str
) -> tuple[Latent, tuple[nn.Module, ...]] | None:
    """What attention at `path` has of a latent, and its projections: to queries, or to what they
    are made of, and to latents. None where keys and values are made of the rows themselves. Raises
    NotCompilable."""
    down = reader.find(f"{path}.{DOWN}")
    if down is None:
        return None
    first: Any = reader.get(f"{path}.q_a_proj", f"{path}.q_proj")
    up: Any = reader.get(f"{path}.kv_b_proj")
    if up.bias is not None:
        raise NotCompilable("its latents become keys by adding something")
    norm = reader.norm(f"{path}.kv_a_layernorm")
    if norm is None:
        raise NotCompilable("its latents are not normalised")
    plain = int(module.qk_nope_head_dim)
    keys, values = (
        LatentRows(up, module.num_heads, plain, is_of_keys=each) for each in (True, False)
    )
    latent = Latent(
        int(module.kv_lora_rank),
        plain,
        int(module.qk_rope_head_dim),
        norm,
        reader.norm(f"{path}.q_a_layernorm"),
        reader.find(f"{path}.q_b_proj"),
        keys,
        values,
    )
    return latent, (first, down)
