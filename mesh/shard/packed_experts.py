"""The experts of a mixture in the layouts of oneDNN and fbgemm, each by itself.

transformers keeps one tensor for the matrices of all experts and lets others compute with it by a
name (https://huggingface.co/docs/transformers/experts_interface): by `PACKED` a model's own modules
compute with what is packed here, and so do layers without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from mesh.models.late_experts import stacks_in
from mesh.models.progress import Progress
from mesh.shard.packed import Packed, packed_products

PACKED = "hearthnet-packed"


class PackedMatrices(nn.Module):
    """What stands where a module had one tensor for the matrices of all its experts."""

    def __init__(self, each: Sequence[nn.Module], shape: torch.Size) -> None:
        """`shape` is that of the tensor."""
        super().__init__()
        self._each = nn.ModuleList(each)
        self.shape = shape

    def product(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """(rows, in) through the matrix of one of them and what is added: (rows, out)."""
        output: torch.Tensor = self._each[expert].forward(x)
        return output


def mixtures_of(module: nn.Module) -> list[Any]:
    """The modules of experts in it whose matrices are still tensors."""
    return [each for each in module.modules() if all(map(_is_stack, _stacks(each)))]


def stacks_bytes(mixtures: Sequence[Any]) -> int:
    """What the matrices of these take."""
    return sum(stack.nbytes for experts in mixtures for stack in _stacks(experts))


def pack_experts(mixtures: Sequence[Any], kind: type[Packed], progress: Progress) -> int:
    """Pack the matrices of these, freeing what they were; how many. Where one of a layer would give
    other numbers, that layer's stay as they are."""
    packed = 0
    for experts in mixtures:
        for name in stacks_in(experts):
            matrices = _packed(experts, name, kind, progress)
            if matrices is not None:
                packed += matrices.shape[0]
                put_packed(experts, name, matrices)
        compute_packed(experts)
    return packed


def put_packed(experts: Any, name: str, matrices: PackedMatrices) -> None:
    """Have these stand where this module of experts has a tensor by that name."""
    delattr(experts, name)
    setattr(experts, name, matrices)


def compute_packed(experts: Any) -> None:
    """Have this module compute with what is packed of it."""
    experts.config._experts_implementation = PACKED  # noqa: SLF001 - there is no other setter


def _packed(
    experts: Any, name: str, kind: type[Packed], progress: Progress
) -> PackedMatrices | None:
    stack: torch.Tensor = getattr(experts, name).detach()
    found = []
    matrices = (_layer(experts, name, number) for number in range(len(stack)))
    for number, product in enumerate(packed_products(kind, matrices)):
        if product is None:
            return None
        found.append(product)
        progress.add(stack[number].nbytes)
    return PackedMatrices(found, stack.shape)


def _layer(experts: Any, name: str, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight, (out, in), and the bias of expert `number`."""
    weight: torch.Tensor = getattr(experts, name)[number].detach()
    bias = getattr(experts, f"{name}_bias", None)
    return (
        weight.t() if experts.is_transposed else weight,
        None if bias is None else bias[number].detach(),
    )


def _stacks(experts: Any) -> Iterator[Any]:
    return (getattr(experts, name, None) for name in stacks_in(experts))


def _is_stack(stack: Any) -> bool:
    return isinstance(stack, nn.Parameter) and stack.dim() == 3


def _mixed(
    experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """(rows, hidden) through the experts `index` (rows, chosen) of each, which count by `weights`
    (rows, chosen): as `hidden`. Added up in fp32 and in the order of `index`, so that a row has the
    same bits in any company."""
    up, down = stacks_in(experts)
    activated = experts._apply_gate if experts.has_gate else experts.act_fn  # noqa: SLF001
    rows, chosen = index.shape
    flat = index.flatten()
    by_expert = flat.argsort(stable=True)
    given = hidden.new_empty(rows * chosen, hidden.shape[1])
    counts = flat.bincount().tolist()
    met = [expert for expert, count in enumerate(counts) if count]
    some = torch.split(by_expert, [counts[expert] for expert in met])
    for expert, places in zip(met, some, strict=True):
        own = hidden[places // chosen] if rows > 1 else hidden
        given[places] = _product(
            experts, down, expert, activated(_product(experts, up, expert, own))
        )
    each, parts = given.view(rows, chosen, -1).float(), weights.float()[..., None]
    y = each[:, 0] * parts[:, 0]
    for number in range(1, chosen):
        y.addcmul_(each[:, number], parts[:, number])
    return y.to(hidden.dtype)


def _product(experts: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    matrices = getattr(experts, name)
    if isinstance(matrices, PackedMatrices):
        return matrices.product(expert, x)
    return F.linear(x, *_layer(experts, name, expert))


ALL_EXPERTS_FUNCTIONS.register(PACKED, _mixed)
