"""Layers for jobs, with the very weights that chat has on the device: a copy would be as large."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import chain
from typing import Any

from mesh.models.load import LoadedSpan
from mesh.shard.int4 import Int4Linear
from mesh.shard.packed import Packed


def sharing(loaded: LoadedSpan) -> LoadedSpan | None:
    """`loaded` with its own modules and config, sharing every weight; costs no memory to speak of.

    None when weights were repacked: nothing can be shared with those.
    """
    module: Any = loaded.module
    if any(isinstance(part, Packed) for part in module.modules()):
        return None
    weights: dict[int, Any] = {id(t): t for t in chain(module.parameters(), module.buffers())}
    copied = copy.deepcopy(module, weights)
    for part in copied.modules():
        if isinstance(part, Int4Linear):  # else numbers were others where a job differentiates
            part.be_plain()
    return replace(loaded, module=copied, config=copied.config)
