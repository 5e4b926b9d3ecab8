"""Where a model may be cut: not before layers that use what an earlier one of the same model made.

What is handed on is not on the wire between machines: keys and values (Gemma 4's last layers), or
which positions are attended to (GLM 5's layers without an indexer of their own). Known from a
config alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from mesh.types import LayerRange


@dataclass(frozen=True, slots=True)
class Cuts:
    """`followers` are the layers that lie on one machine with the layer before them."""

    followers: frozenset[int] = frozenset()

    def allow(self, layers: LayerRange) -> bool:
        """Whether a machine can have these without the others."""
        return self.followers.isdisjoint((layers.start, layers.stop))

    def first(self, layer: int) -> int:
        """The last layer up to this one that may be the first of a machine."""
        while layer in self.followers:
            layer -= 1
        return layer

    def around(self, layers: LayerRange) -> LayerRange:
        """The fewest layers with all of these that a machine can have without the others."""
        stop = layers.stop
        while stop in self.followers:
            stop += 1
        return LayerRange(self.first(layers.start), stop)

    def groups(self, layers: LayerRange) -> tuple[LayerRange, ...]:
        """These layers in parts that are not parted any further."""
        each = range(layers.start, layers.stop)
        starts = [layer for layer in each if layer == layers.start or layer not in self.followers]
        return tuple(LayerRange(*ends) for ends in pairwise((*starts, layers.stop)))

    def parts(self, layers: LayerRange, count: int) -> list[LayerRange]:
        """Up to so many parts, as even as they can be, in their order."""
        if self.followers.isdisjoint(range(layers.start, layers.stop)):
            return layers.parts(count)
        return list(_even(self.groups(layers), count))

    def part(self, layers: LayerRange) -> Cuts:
        """Those of a model of these layers only."""
        own = (layer for layer in self.followers if layers.start < layer < layers.stop)
        return Cuts(frozenset(layer - layers.start for layer in own))

    def refusal(self, layers: LayerRange, total: int) -> tuple[str, str]:
        """Why a machine cannot have these without the others of so many, and what to do."""
        ends = [str(end) for end in (layers.start, layers.stop) if end in self.followers]
        uses = f"layer {ends[0]} uses" if len(ends) == 1 else f"layers {' and '.join(ends)} use"
        cuts = LayerRange.runs(n for n in range(1, total) if n not in self.followers)
        said = ", ".join(str(each) if len(each) > 1 else f"{each.start}" for each in cuts)
        where = f"It may be cut before layers {said}" if said else "It cannot be cut"
        return (
            f"{uses} what earlier layers have made, which does not go from machine to machine",
            f"Have layers {self.around(layers)} there. {where}.",
        )


ANYWHERE = Cuts()
_USUAL = {"hy_v4": 4}
"""How many layers apart those that choose for themselves are, where a config does not say so."""


def cuts_of(config: Mapping[str, Any], total: int) -> Cuts:
    """Where the model of this config may be cut, which has so many layers."""
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config
    seeing = range(_seen_from(text, total) + 1, total)
    return Cuts(frozenset((*seeing, *_without_indexer(text, total))))


def _seen_from(text: Mapping[str, Any], total: int) -> int:
    """The first layer whose keys others see; `total` where none are seen.

    Layers that see the keys of others take those of the last layer of their kind that has its own.
    """
    shared = _count(text, "num_kv_shared_layers", 0)
    if not 0 < shared < total:
        return total
    kinds = text.get("layer_types") or ()
    if len(kinds) != total:
        return 0  # nothing tells which they are
    own, seeing = [*kinds[: total - shared]], {*kinds[total - shared :]}
    return min(len(own) - 1 - own[::-1].index(k) if k in own else 0 for k in seeing)


def _without_indexer(text: Mapping[str, Any], total: int) -> Iterable[int]:
    """The layers that attend to what the one before them attended to."""
    kinds = text.get("indexer_types") or text.get("index_topk_pattern")
    if isinstance(kinds, list | str):  # the second may be one letter for each layer
        return [i for i, kind in enumerate(kinds[:total]) if i and kind in ("shared", "S")]
    usual = _USUAL.get(str(text.get("model_type")), 1)
    every = max(1, _count(text, "index_topk_freq", usual))
    skipped = _count(text, "index_skip_topk_offset", 2)
    return [i for i in range(1, total) if max(i - skipped + 1, 0) % every]


def _count(text: Mapping[str, Any], name: str, default: int) -> int:
    said = text.get(name)
    return said if isinstance(said, int) else default


@lru_cache(maxsize=128)
def _even(groups: tuple[LayerRange, ...], count: int) -> tuple[LayerRange, ...]:
    """Those of the least sum of squares."""
    at = (*(group.start for group in groups), groups[-1].stop)
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for _ in range(min(count, len(groups))):
        best = {
            stop: min(
                (cost + (at[stop] - at[start]) ** 2, (*cuts, at[start]))
                for start, (cost, cuts) in best.items()
                if start < stop
            )
            for stop in range(min(best) + 1, len(at))
        }
    return tuple(LayerRange(*ends) for ends in pairwise((*best[len(at) - 1][1], at[-1])))
