"""Tensors whose gradient would come out incomplete, and the refusal to give it.

See `mesh.shard.taps.joints` for how that happens. The values of such tensors are right, and so are
the gradients of everything before them; only asking for their own is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils.weak import WeakTensorKeyDictionary

from mesh.errors import BadRequest

# Not an attribute of the tensor: it would be saved with it, and loaded where we are not installed.
_INCOMPLETE = WeakTensorKeyDictionary()


def mark_incomplete(tensor: torch.Tensor) -> None:
    """Refuse this tensor's gradient from now on."""
    _INCOMPLETE[tensor] = True


def watch_gradients() -> None:
    """Make torch's ways to ask for a gradient look first. For a job's process; safe to repeat."""
    for owner, name, wrap in (
        (torch.Tensor, "register_hook", _checking_self),
        (torch.Tensor, "retain_grad", _checking_self),
        (torch.autograd, "grad", _checking_inputs),
        (torch.autograd, "backward", _checking_inputs),
    ):
        asks = getattr(owner, name)
        if not hasattr(asks, "_hearthnet"):
            setattr(owner, name, wrap(asks))


def _checking_self(asks: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(asks)
    def checked(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _check([tensor])
        return asks(tensor, *args, **kwargs)

    checked._hearthnet = True  # type: ignore[attr-defined]
    return checked


def _checking_inputs(asks: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(asks)

    @functools.wraps(asks)
    def checked(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        inputs = bound.arguments.get("inputs")
        if isinstance(inputs, torch.Tensor | GradientEdge):
            _check([inputs])
        elif isinstance(inputs, Mapping):
            _check(inputs.values())
        elif inputs is not None:
            bound.arguments["inputs"] = tuple(inputs)  # it may be gone through once only
            _check(bound.arguments["inputs"])
        return asks(*bound.args, **bound.kwargs)

    checked._hearthnet = True  # type: ignore[attr-defined]
    return checked


def _check(tensors: Iterable[Any]) -> None:
    if any(map(_is_incomplete, tensors)):
        raise BadRequest(
            "The gradient of this value would miss what flows through values read before it, or"
            " through others in its memory.",
            fix="Read it where it is made, before what is computed from it.",
        )


def _is_incomplete(wanted: Any) -> bool:
    if isinstance(wanted, GradientEdge):
        place = (wanted.node, wanted.output_nr)
        return any(place == (known.grad_fn, known.output_nr) for known in _INCOMPLETE)
    return isinstance(wanted, torch.Tensor) and wanted in _INCOMPLETE
