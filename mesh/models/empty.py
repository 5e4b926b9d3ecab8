"""Lay out the modules of a config: shapes without values.

A config may say anything. What it is asked for here is bounded, and what foreign modelling code
raises over it is said to be the config's fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import initialization

from mesh.errors import BadCheckpoint
from mesh.models.filling import Placement

_INITIALIZING = frozenset({nn.init.__name__, initialization.__name__})
_MOST_NUMBERS = 1 << 28
"""Twice what the masks of gpt_neo are, the largest tables that a real model computes."""


def empty_model(cls: type[Any], config: Any, placement: Placement) -> Any:
    """A model of this config on the meta device. Raises BadCheckpoint where there is none."""
    wanted = placement.attn_implementation
    # Some classes refuse sdpa because their attention does what sdpa cannot (soft-capping).
    implementation = "eager" if wanted == "sdpa" and not cls._supports_sdpa else wanted
    try:
        with _WithoutWeights():
            module = cls._from_config(
                config, dtype=placement.dtype, attn_implementation=implementation
            )
    except Exception as error:  # a head of no width, an unknown activation: any class's own
        found = f"{type(error).__name__}: {str(error)[:200].rstrip('.')}"
        raise BadCheckpoint(
            f"Its config describes no {config.model_type} model: {found}.",
            fix="Download config.json again, from the same revision as the weights.",
        ) from error
    for owner in module.modules():
        for name, weight in owner.named_parameters(recurse=False):
            if not weight.is_meta:
                empty = torch.empty_like(weight, device="meta")
                setattr(owner, name, nn.Parameter(empty, requires_grad=False))
    return module.eval().requires_grad_(requires_grad=False)


class Bounded(TorchFunctionMode):
    """Meanwhile ValueError is raised where more numbers are made than a small model has."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = 0

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in _LENGTHS:
            self._numbers += _LENGTHS[func](*args, **given)
            if self._numbers > _MOST_NUMBERS:
                raise ValueError(f"it takes more than {_MOST_NUMBERS} numbers that no file holds")
        return func(*args, **given)


class _WithoutWeights(Bounded):
    """Meanwhile weights have a shape and no values.

    ``torch.device("meta")`` would do, but torch knows many functions only in Python there, and
    those import its compiler on first use: a second, and 75 MB that stay. So only what allocates
    weights goes to the meta device; the few small things that are computed are computed.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", None) in _INITIALIZING:
            return args[0] if args else given["tensor"]
        if func is torch.empty and given.get("device") is None:
            return func(*args, **{**given, "device": "meta"})
        return super().__torch_function__(func, types, args, given)


def _numbers_between(start: float, end: float | None = None, step: float = 1, **_: Any) -> int:
    return int((start if end is None else end - start) / step)


def _numbers_of(*size: Any, **given: Any) -> int:
    first = given.get("size", size[0] if size else ())
    return math.prod(size if isinstance(first, int) else first)


def _numbers_of_product(*factors: Any, **_: Any) -> int:
    shapes = (reversed(each.shape) for each in factors if isinstance(each, torch.Tensor))
    return math.prod(map(max, zip_longest(*shapes, fillvalue=1)))


_LENGTHS: Mapping[Any, Callable[..., int]] = {
    torch.arange: _numbers_between, torch.empty: _numbers_of, torch.full: _numbers_of,
    torch.ones: _numbers_of, torch.zeros: _numbers_of, torch.Tensor.mul: _numbers_of_product,
}  # fmt: skip
