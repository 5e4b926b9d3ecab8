"""Several processes of one thread each that train one model together.

Each has the whole model and the same stream of texts, computes the gradients of its share of a
step's batches, and adds up what the others have. On a busy machine this loses less than threads do,
which wait for each other many hundred times a step instead of once. Knows gradients and batches;
nothing of recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from tools.builtin_model.batching import Batch


def together(count: int, work: Callable[..., None], *arguments: Any) -> None:
    """Call `work(*arguments)` in `count` processes at once; in this one where it is one.

    Raises what torch's spawn raises where one of them fails.
    """
    if count == 1:
        _alone()
        work(*arguments)
        return
    with TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        spawn(_work, (count, meeting, work, arguments), nprocs=count)  # type: ignore[no-untyped-call]


def is_first() -> bool:
    """Whether this process is the one that reports and writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


def share(parts: list[Batch]) -> list[Batch]:
    """The batches of a step that this process computes: about as many tokens as any other's."""
    if not dist.is_initialized():
        return parts
    loads = [0] * dist.get_world_size()
    shares: list[list[Batch]] = [[] for _ in loads]
    for part in sorted(parts, key=lambda part: part.ids.numel(), reverse=True):
        lightest = loads.index(min(loads))
        loads[lightest] += part.ids.numel()
        shares[lightest].append(part)
    return shares[dist.get_rank()]


def add_up(parameters: Iterable[torch.nn.Parameter], loss: float) -> float:
    """Add the gradients over all processes, in place, and return the sum of their losses.

    A process without a share of this step adds zeros.
    """
    if not dist.is_initialized():
        return loss
    trained = list(parameters)
    flat = torch.cat([_gradient(p) for p in trained] + [torch.tensor([loss])])
    dist.all_reduce(flat)
    at = 0
    for parameter in trained:
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    return float(flat[-1])


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel())
    return parameter.grad.flatten()


def _alone() -> None:
    torch.set_num_threads(1)


def _work(rank: int, count: int, meeting: Path, work: Callable[..., None], arguments: Any) -> None:
    _alone()
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
    try:
        work(*arguments)
    finally:
        dist.destroy_process_group()
