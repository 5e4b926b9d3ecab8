"""The weights of a mixture's experts, put into their module when they are wanted and not before.

Files hold a matrix for each expert, and modules compute with one tensor for all: nothing of it can
be mapped, and all layers at once would be the whole checkpoint in memory. Whoever rounds them
wants one layer after the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mesh.models.filling import Placement, fill
from mesh.models.header import TensorEntry

if TYPE_CHECKING:
    from mesh.models.span import LoadedSpan

GATE_UP = "gate_up_proj"
_STACKS = (GATE_UP, "down_proj")

_WITHOUT_GATE = ("up_proj", "down_proj")

_LAYER = re.compile(r".*?\.\d+\.")

Late = Mapping[str, Mapping[str, TensorEntry]]
"""By the paths of modules in a span, the stored tensors that they are made of."""


def stacks_in(experts: Any) -> tuple[str, str]:
    """What this module calls the tensors of its experts: some have no gate."""
    return _STACKS if getattr(experts, "has_gate", True) else _WITHOUT_GATE


def late_experts(base: Any, names: Mapping[str, TensorEntry]) -> Late:
    """Those of `names`, which are to be put into `base`, that make its experts."""
    paths = [
        path
        for path, module in base.named_modules()
        if all(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in stacks_in(module))
    ]
    found = {
        path: {
            name: entry
            for name, entry in names.items()
            if name.startswith(_layer_of(path)) and ".experts." in name
            if not name.endswith("bias")
        }
        for path in paths
    }
    return {path: entries for path, entries in found.items() if entries}


def _layer_of(path: str) -> str:
    """How names of the layer begin: what is in it may be called otherwise in files."""
    found = _LAYER.match(path)
    return path if found is None else found[0]


def stacks_of(base: Any, late: Late) -> set[str]:
    """What `base` calls the weights that `late` makes."""
    paths = {path: base.get_submodule(path) for path in late}
    return {f"{path}.{name}" for path, each in paths.items() for name in stacks_in(each)}


def fill_late(loaded: LoadedSpan, path: str) -> None:
    """Put the weights of the experts at `path` in the span into their module. Raises as `fill`."""
    some = next(each for each in loaded.module.parameters() if not each.is_meta)
    placement = Placement(some.dtype, some.device)
    pages, _ = fill(loaded.module, loaded.late[path], placement, same={}, absent=("",))
    loaded.pages.update(pages)
