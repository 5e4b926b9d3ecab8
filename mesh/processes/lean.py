"""torch and transformers' modelling code, imported without what a node's processes never use: the
compiler, distributed tensors, and what `postponed` names.

A few of its functions are decorated for ``torch.compile``, which at import brings in
``torch._dynamo`` with sympy, ONNX and DTensor: 75 MB of memory and a third of a process's start. A
process that compiles nothing does without. Should anything ask for ``torch._dynamo`` later, it is
imported then, as torch itself does.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from mesh.logs import log_to_stderr
from mesh.paths import cache_dir
from mesh.processes import model_names, postponed

logger = logging.getLogger(__name__)

_PLAINLY = "plainly"
"""The last argument of a process that has begun again."""
_COMPILER = "torch._dynamo"
_MODELLING = (
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.modeling_layers",
    "transformers.modeling_rope_utils",
    "transformers.processing_utils",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
    "transformers.models.llama.modeling_llama",
)
"""What every model of transformers imports, the first two of which import the compiler; and the
family of the built-in model."""


def import_modelling() -> None:
    """Import what all models share; does nothing where it, or the compiler, is imported already."""
    if _COMPILER in sys.modules or _MODELLING[0] in sys.modules:
        return
    can_do_without = postponed.import_torch()
    with (
        postponed.postponing() if can_do_without else nullcontext(),
        model_names.remembered(cache_dir()),
        _without_compiler(),
        _without_distributed_tensors(),
    ):
        for name in _MODELLING:
            importlib.import_module(name)


def import_modelling_or_begin_again() -> None:
    """`import_modelling`. Where this torch or transformers cannot be imported so, what is half
    imported stays so: the process runs its own command line anew, and this imports nothing then."""
    if sys.argv[-1] == _PLAINLY:
        return
    try:
        import_modelling()
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        log_to_stderr("warning")
        logger.warning("%s imports torch and transformers plainly: %s", sys.argv[0], error)
        arguments = [sys.executable, *sys.orig_argv[1:], _PLAINLY]
        os.execv(sys.executable, arguments)  # noqa: S606 - without a shell, as it should be


@contextmanager
def _without_compiler() -> Iterator[None]:
    import torch

    stand_in = _DecoratorsOnly(_COMPILER)
    # A class of one of its submodules is inherited from; that file needs nothing of the package.
    stand_in.__path__ = [str(Path(torch.__file__).with_name("_dynamo"))]
    sys.modules[_COMPILER] = stand_in
    torch._dynamo = stand_in  # noqa: SLF001
    try:
        yield
    finally:
        del sys.modules[_COMPILER], torch._dynamo  # noqa: SLF001


@contextmanager
def _without_distributed_tensors() -> Iterator[None]:
    from transformers import utils

    places = (utils, utils.import_utils)
    real = utils.is_torch_distributed_available
    for place in places:
        place.is_torch_distributed_available = lambda: False
    try:
        yield
    finally:
        for place in places:
            place.is_torch_distributed_available = real


class _DecoratorsOnly(ModuleType):
    """In place of the compiler: its decorators, which hand a function back as it is."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in {"disable", "assume_constant_result", "allow_in_graph"}:
            return _as_it_is
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def _as_it_is(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    return _as_it_is if function is None else function
