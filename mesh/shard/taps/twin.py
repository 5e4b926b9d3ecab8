"""A second set of module objects over the weights of a span that serves chat."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import chain
from typing import Any

from mesh.models.load import LoadedSpan
from mesh.shard.linear import PackedLinear


def twin(loaded: LoadedSpan) -> LoadedSpan | None:
    """`loaded` with its own modules and config, sharing every weight; costs no memory to speak of.

    None when weights were repacked: nothing can be shared with those.
    """
    module: Any = loaded.module
    if any(isinstance(part, PackedLinear) for part in module.modules()):
        return None
    weights: dict[int, Any] = {id(t): t for t in chain(module.parameters(), module.buffers())}
    copied = copy.deepcopy(module, weights)
    return replace(loaded, module=copied, config=copied.config)
