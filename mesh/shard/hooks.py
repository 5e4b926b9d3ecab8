"""Functions that see, and may change, the hidden states at a place of a span while it computes.

They hang on the modules for one forward only: a forward that nobody wants to look at is not one
instruction longer. In a batch each gets the row of its own session and no other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from mesh.errors import BadSteering
from mesh.types import Site


class Hook(Protocol):
    """One such function of one session."""

    @property
    def site(self) -> Site:
        """Where it is called, once per forward."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """What passes, (1, rows, hidden), to what the model goes on with, of the same shape.

        Must not write to what it is given.
        """


Placed = tuple[int, Hook]
"""A hook and the number of its session in the batch."""

Change = Callable[[Any], torch.Tensor]


def module_at(layer: nn.Module, site: Site) -> nn.Module:
    """The module of a decoder layer that a site names. Raises BadSteering."""
    try:
        return layer.get_submodule(site.part)
    except AttributeError:
        raise BadSteering(
            f"Layer {site.layer} of this model has no module {site.part!r}.",
            fix="Name one that it has, or the layer itself.",
            param="path",
        ) from None


@contextmanager
def hooked(
    layer: Callable[[int], nn.Module], placed: Sequence[Placed], shape: tuple[int, int]
) -> Iterator[None]:
    """Call these hooks in the one forward that runs inside, of (sessions, rows) `shape`.

    `layer` finds a decoder layer by its number. Raises BadSteering when the forward passed by one
    of the places, or not just once, or had something else there than the sessions' rows in order.
    """
    at: dict[Site, list[Placed]] = defaultdict(list)
    for row, hook in placed:
        at[hook.site].append((row, hook))
    passed: set[Site] = set()
    with ExitStack() as hanging:
        for site, hooks in at.items():
            module = module_at(layer(site.layer), site)
            handle = _hang(module, site, _change(site, hooks, passed, shape))
            hanging.callback(handle.remove)
        yield
    missed = at.keys() - passed
    if missed:
        raise unfit(next(iter(missed)), "is computed in a way that cannot be followed")


def _change(
    site: Site, hooks: Sequence[Placed], passed: set[Site], shape: tuple[int, int]
) -> Change:
    def change(hidden: Any) -> torch.Tensor:
        if site in passed:
            raise unfit(site, "is passed more than once")
        passed.add(site)
        # Experts, say, see rows of several sessions in an order of their own.
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3 or hidden.shape[:2] != shape:
            raise unfit(site, "does not pass hidden states")
        rows = list(hidden.tensor_split(len(hidden)))  # views: one session each
        for row, hook in hooks:
            edited = hook(rows[row])
            if edited.shape != rows[row].shape:
                raise unfit(site, f"passes hidden states of width {hidden.shape[2]}")
            rows[row] = edited
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    return change


def _hang(module: nn.Module, site: Site, change: Change) -> Any:
    def before(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs.get("hidden_states"))}

    def after(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    if site.side == "input":
        return module.register_forward_pre_hook(before, with_kwargs=True)
    return module.register_forward_hook(after)


def unfit(site: Site, why: str) -> BadSteering:
    """Why a place is none for a hook here."""
    what = f"{site.part} of layer {site.layer}" if site.part else f"layer {site.layer}"
    return BadSteering(
        f"The {site.side} of {what} {why} here.", fix="Choose another place.", param="path"
    )
