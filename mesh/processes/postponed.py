"""Parts of torch that are imported only when somebody touches them.

``import torch`` also brings in what serves its compiler, its exporter and its old quantisation:
half a second of processor time and 25 MB in every process, where none of that is used. In
the place of each stands an empty module that hands over to the real one at the first look at any
name in it, or at the first import of something below it. Only what has an effect by being imported
has to be asked for: `import_meta_kernels`.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_META_KERNELS = ("torch._meta_registrations", "torch.distributed._meta_registrations")
_IMPORTED_FROM = {"torch.fx.experimental.symbolic_shapes": frozenset({"has_free_unbacked_symbols"})}
"""Functions that others import by name from such a module (no package), to call them later: this
one is imported by ``torch.nn.attention.flex_attention``, and sympy by its module."""

POSTPONED = frozenset(
    {
        *_META_KERNELS, *_IMPORTED_FROM, "torch.ao", "torch.distributions", "torch.export",
        "torch.masked", "torch.nn.intrinsic", "torch.nn.qat", "torch.nn.quantizable",
        "torch.nn.quantized", "torch.profiler", "torch.quantization", "torch.utils.data",
    }
)  # fmt: skip
"""What torch imports for others' sake and does not look into itself."""

_FIRST_TO_IMPORT_FX = "torch.export"
"""``torch.fx`` and ``torch._logging`` import each other, which succeeds only when it is the first
of them that is asked for; torch asks for it through this one."""

_LOOKED_INTO = frozenset({"__path__", "__all__"})
"""Names with underscores that an import asks for; whoever lists modules asks for others."""


def import_torch() -> bool:
    """Import torch without `POSTPONED` modules, or, where it cannot do without: with, and False."""
    with postponing():
        import torch
    try:
        _complete_generator(torch)
        _try(torch)
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        logger.warning("torch is imported as a whole: %s", error)
        for name in POSTPONED:
            _complete(name)
        return False
    return True


def _complete_generator(torch: Any) -> None:
    """Without this it cannot be made. Torch does it in ``torch._prims.rng_prims``, which comes with
    a postponed module, and at whose import it is done again."""
    try:
        metaclass = importlib.import_module("torch._custom_class_base").CustomClassBaseMeta
    except ImportError:  # before torch 2.15
        metaclass = importlib.import_module("torch._opaque_base").OpaqueBaseMeta
    torch._C._set_generator_metaclass(metaclass)  # noqa: SLF001


def _try(torch: Any) -> None:
    """The simplest of what all processes do, as far as it starts no threads (`nursery`)."""
    drawn = torch.rand(2, 2, generator=torch.Generator().manual_seed(1))
    drawn.add(torch.nn.Parameter(drawn))
    torch.empty_like(drawn, device="meta").expand(2, 2, 2)


@contextmanager
def postponing() -> Iterator[None]:
    """Meanwhile `POSTPONED` modules are put off when they are imported for the first time."""
    finder = _Postponing()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def import_meta_kernels() -> None:
    """Have torch know how every operator computes shapes without data; done once, then free.

    Without it tensors on the meta device serve those operators alone that know it in C++, and the
    others raise NotImplementedError.
    """
    for name in _META_KERNELS:
        _complete(name)


def _complete(name: str) -> None:
    if isinstance(sys.modules.get(name), _Postponed):
        _import(name)


class _Postponed(ModuleType):
    """In the place of a module that nobody has touched yet; hands on whatever it is asked for."""

    def __getattr__(self, name: str) -> Any:
        late = _IMPORTED_FROM.get(self.__name__, frozenset())
        if name.startswith("__") and (late or name not in _LOOKED_INTO):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in late:
            return partial(_call, self.__name__, name)
        return getattr(_import(self.__name__), name)


def _call(module: str, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(_import(module), name)(*args, **kwargs)


def _import(name: str) -> ModuleType:
    """The real one; whoever comes meanwhile waits for it as for any import."""
    if isinstance(sys.modules.get(name), _Postponed):
        del sys.modules[name]
    finders = [finder for finder in sys.meta_path if isinstance(finder, _Postponing)]
    for finder in finders:
        finder.touched.add(name)
    return importlib.import_module(name)


class _Postponing(MetaPathFinder, Loader):
    def __init__(self) -> None:
        self.touched: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in POSTPONED or fullname in self.touched:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None:
            spec.loader = self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == _FIRST_TO_IMPORT_FX:
            importlib.import_module("torch.fx")
        # An import of something below it finds none, asks for it, and so gets the real one.
        vars(module).pop("__path__", None)
        module.__class__ = _Postponed
