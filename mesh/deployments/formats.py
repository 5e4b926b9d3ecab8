"""Whether a shard that is loaded is what is wished: its number format and its caches. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mesh.deployments.wishes import Wish
from mesh.routing.cover import QUANTISED


@dataclass(frozen=True, slots=True)
class LoadedFormat:
    """How a shard is loaded, as far as one knows: '' and 0 where one does not.

    `dtype` is what it computes with, `quant` how that was asked for, which earlier versions say of
    their own shards only, `kv_tokens` how many positions its caches have, and `own` the quant of
    its node's settings.
    """

    dtype: str = ""
    quant: str = ""
    kv_tokens: int = 0
    own: str = ""


UNTOLD = LoadedFormat()
"""Of a shard of which nobody says how it is loaded."""


def is_as_wished(loaded: LoadedFormat, wish: Wish) -> bool:
    """Whether a shard fulfils a wish, or nobody knows that it does not.

    What was loaded as ``auto`` fulfils ``auto``, whatever came of that there.
    """
    if 0 < loaded.kv_tokens < wish.context:
        return False
    quant = wish.quant or loaded.own
    if not quant or (quant == "auto" and not loaded.quant):
        return True
    if quant == "auto" or not loaded.dtype:
        return loaded.quant in ("", quant)
    return loaded.dtype == quant or (quant == "none" and loaded.dtype not in QUANTISED)
