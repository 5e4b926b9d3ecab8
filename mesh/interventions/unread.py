"""Weights that are somewhere else and look as if they were here: read at the first need of a value.

Who lists a model's weights mostly wants to count, to freeze or to name them; a model may be larger
than the job that does so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from mesh.interventions.unseen import give_out
from mesh.shard.taps.codec import storage_of

_NAMES = (
    "shape", "dtype", "layout", "ndim", "itemsize", "nbytes", "is_leaf", "grad_fn", "grad",
    "is_cuda", "is_mps", "is_sparse", "is_quantized",
)  # fmt: skip
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point",
    "is_complex", "requires_grad_", "__len__",
)  # fmt: skip
_Tensor: Any = torch.Tensor
_KNOWN = {
    *(getattr(_Tensor, name).__get__ for name in _NAMES),
    *(getattr(_Tensor, name) for name in _METHODS),
    *(_Tensor.requires_grad.__get__, _Tensor.requires_grad.__set__),
    *(torch.numel, torch.is_floating_point, torch.is_complex),
}
"""What needs no values."""
_HERE = {
    _Tensor.device.__get__: torch.device("cpu"),
    _Tensor.is_cpu.__get__: True,
    _Tensor.is_meta.__get__: False,
}
"""What is said of one although it has no values yet."""


class UnreadTensor(torch.Tensor):
    """A tensor, or parameter, of known shape and type; an ordinary one as soon as it is read."""

    _read: Callable[[], torch.Tensor]

    @staticmethod
    def of(shape: Iterable[int], dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> Any:
        """One without a gradient, with the values that `read` gives."""
        # What does not ask `__torch_function__` fails on the meta device, and computes no nonsense.
        empty = torch.empty(tuple(shape), dtype=dtype, device="meta")
        unread: Any = torch.Tensor._make_subclass(UnreadTensor, empty)
        unread._read = read
        return unread

    def filled(self) -> torch.Tensor:
        """The same object, with its values. Raises as reading does."""
        unread: Any = self
        own = self.__dict__
        # Whatever mode it is first read in, it is read in others later.
        with (
            torch.inference_mode(mode=False),
            _disable_current_modes(),
            temporarily_clear_interpreter_stack(),
        ):
            values = own["_read"]().detach()
            values.requires_grad_(self.requires_grad)
            torch._C._swap_tensor_impl(unread, values)
        # A tensor that torch made a parameter itself has this mark.
        unread.__class__ = nn.Parameter if own.pop("_is_param", False) else torch.Tensor
        del own["_read"]
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do `func`, with values if it needs them."""
        given = kwargs or {}
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        if func in _HERE:
            return _HERE[func]
        if func in (_Tensor.detach, torch.detach, _Tensor.data.__get__):
            return _alias(args[0])
        weights = [
            v for v in tree_leaves((args, given)) if isinstance(v, UnreadTensor | nn.Parameter)
        ]
        held = []  # reading one may let go of another; what a view holds stays
        for weight in sorted(weights, key=lambda one: isinstance(one, UnreadTensor)):
            read = weight.filled() if isinstance(weight, UnreadTensor) else weight
            held.append(read.detach())
        return func(*args, **given)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.filled(), memo)

    def __repr__(self, **_more: Any) -> str:  # type: ignore[override]  # torch's has no such name
        return repr(self.filled())

    def __reduce_ex__(self, protocol: Any) -> Any:
        read: Any = self.filled()
        return read.__reduce_ex__(protocol)


def unread_parameter(like: torch.Tensor, read: Callable[[], torch.Tensor]) -> nn.Parameter:
    """A frozen parameter of that shape and type, with the values that `read` gives."""
    unread = UnreadTensor.of(like.shape, like.dtype, read)
    unread._is_param = True
    parameter: nn.Parameter = unread
    return parameter


def unread_again(parameter: nn.Parameter, read: Callable[[], torch.Tensor]) -> bool:
    """Let go of a frozen parameter's values, which `read` gives again at the next need; whether
    that could be: what a view, a graph or an array holds as well stays."""
    anew: Any = parameter
    # One holder is the parameter, and one whoever counts.
    if anew._use_count() > 1 or torch._C._storage_Use_Count(storage_of(parameter)._cdata) > 2:
        return False
    with torch.inference_mode(mode=False), _disable_current_modes():
        torch._C._swap_tensor_impl(anew, unread_parameter(parameter, read))
    anew.__class__ = UnreadTensor
    anew._read, anew._is_param = read, True
    return True


def watch_transforms() -> None:
    """Make torch.func read what it differentiates by: its own tensors are made around the values
    there are. For a job's process; safe to repeat."""
    transforms: Any = eager_transforms
    wrap = transforms._wrap_for_grad
    if hasattr(wrap, "_hearthnet"):
        return

    def wrap_filled(tensor: torch.Tensor, level: int) -> Any:
        return wrap(tensor.filled() if isinstance(tensor, UnreadTensor) else tensor, level)

    wrap_filled._hearthnet = True  # type: ignore[attr-defined]
    transforms._wrap_for_grad = wrap_filled


def _alias(tensor: torch.Tensor) -> Any:
    def read() -> torch.Tensor:
        values = tensor.filled() if isinstance(tensor, UnreadTensor) else tensor
        give_out(values)  # the alias has versions of its own
        return values.detach()

    return UnreadTensor.of(tensor.shape, tensor.dtype, read)
