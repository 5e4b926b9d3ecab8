"""Picks the pipeline of a request, and picks again when a part of it is lost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from mesh.errors import NoRoute, WeightsMismatch
from mesh.routing import cheapest
from mesh.routing.cover import Candidate, CoverRules, ShardKey, key_of, missing_layers
from mesh.types import LayerRange, ModelId, Pipeline, RouteHop, ShardDescriptor

UNSERVED = (NoRoute, WeightsMismatch)
"""What the router raises when nobody serves the layers: none at all, or none of these weights."""


class ShardSource(Protocol):
    """Where the router looks up who serves what (`mesh.discovery` keeps the real one)."""

    def candidates(self, model_id: ModelId) -> Sequence[Candidate]:
        """Every fresh, reachable shard of the model, whatever its weights."""


class ShardRouter:
    """Covers a model's layers from the shards a store knows."""

    def __init__(self, store: ShardSource, rules: CoverRules) -> None:
        self._store = store
        self._rules = rules

    def pick(
        self,
        model_id: ModelId,
        weights_sha256: str,
        total_layers: int,
        *,
        exclude: Collection[ShardKey] = (),
    ) -> Pipeline:
        """A route over all layers.

        Raises:
            NoRoute: no cover exists.
            WeightsMismatch: a cover exists only with shards of other weights.
        """
        hops = self.cover(model_id, weights_sha256, LayerRange(0, total_layers), exclude)
        return Pipeline(model_id, weights_sha256, total_layers, hops)

    def are_as_free(self, hops: Sequence[RouteHop], others: Sequence[RouteHop]) -> bool:
        """Whether each of these shards is still there, and has neither failed more nor more to do
        than those of the `others` that hold its layers."""
        model_id = hops[0].shard.model_id
        now = {
            key_of(each.descriptor): (each.penalty, each.queue_depth)
            for each in self._store.candidates(model_id)
        }
        return {key_of(hop.shard) for hop in (*hops, *others)} <= now.keys() and all(
            now[key_of(hop.shard)] <= now[key_of(other.shard)]
            for hop in hops
            for other in others
            if hop.layers.overlaps(other.layers)
        )

    def repick(
        self, pipeline: Pipeline, lost: int, exclude: Collection[ShardKey]
    ) -> tuple[RouteHop, ...]:
        """What replaces hop number `lost`: one or more hops over the same layers.

        Shards of its number format and kernels come before idle ones: with others, later tokens
        may differ from what it would have said.

        Raises:
            NoRoute: nobody but the excluded serves those layers.
        """
        hop = pipeline.hops[lost]
        return self.cover(
            pipeline.model_id, pipeline.weights_sha256, hop.layers, exclude, like=hop.shard
        )

    def cover(
        self,
        model_id: ModelId,
        weights_sha256: str,
        span: LayerRange,
        exclude: Collection[ShardKey] = (),
        *,
        like: ShardDescriptor | None = None,
    ) -> tuple[RouteHop, ...]:
        """Hops over `span` with exactly these weights; `like` as in `greedy_cover`.

        Raises as `pick` does.
        """
        everyone = self._store.candidates(model_id)
        same = [c for c in everyone if c.descriptor.weights_sha256 == weights_sha256]
        admitted = [c for c in same if self._rules.admits(c.descriptor)]
        try:
            return cheapest.cover(admitted, span, self._rules, exclude, like)
        except NoRoute:
            if missing_layers(admitted, span) and not missing_layers(same, span):
                raise _no_ends(model_id, span, same) from None
            other = [c for c in everyone if c.descriptor.weights_sha256 != weights_sha256]
            if other and missing_layers(same, span) and not missing_layers(everyone, span):
                raise _mismatch(model_id, weights_sha256, other) from None
            raise


def _no_ends(model_id: ModelId, span: LayerRange, held: Sequence[Candidate]) -> NoRoute:
    shards = [c.descriptor for c in held]
    first = any(shard.embeds for shard in shards) or span.start > 0
    last = any(shard.head for shard in shards) or span.stop < shards[0].total_layers
    lacking = " or the ".join(
        name for name, there in (("embedding", first), ("head", last)) if not there
    )
    return NoRoute(
        f"this node holds no embedding and no head of {model_id}, and none of the nodes that serve"
        f" layers {span} runs {f'the {lacking}' if lacking else 'both'} for it.",
        fix=f"Fetch them here (`hearthnet pull {model_id} --layers none`), or where the first and"
        " the last layers are served.",
    )


def _mismatch(model_id: ModelId, wanted: str, other: Sequence[Candidate]) -> WeightsMismatch:
    named = ", ".join(
        sorted(
            {
                f"{c.descriptor.node_name} ({c.descriptor.layers}, "
                f"{c.descriptor.weights_sha256[:12]})"
                for c in other
            }
        )
    )
    return WeightsMismatch(
        f"the weights of {model_id!r} differ between nodes: here {wanted[:12]}, at {named}.",
        fix="Put the same checkpoint on every node, or give the other one its own id "
        "(`--model PATH=ID`).",
    )
