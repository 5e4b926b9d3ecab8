"""The routes that prompts of this node take, for the report on who can see what.

Asks the askers what runs, and the router's own rules what would. Words are `mesh.api.privacy`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mesh.api.privacy import Hop, Precautions, Route, report
from mesh.config import Config
from mesh.discovery.advertisement import decode
from mesh.errors import NoRoute
from mesh.health.detector import Verdict
from mesh.models.local import LocalModel
from mesh.pipeline.asker import AskerProcess
from mesh.routing.cover import Candidate, CoverRules, greedy_cover, home_layers
from mesh.types import LayerRange, ModelId, NodeId


class PrivacyReport:
    """`routable` gives the shards a model's routes are made of (see `AskerOwner`)."""

    def __init__(
        self,
        config: Config,
        own: NodeId,
        models: Sequence[LocalModel],
        askers: Mapping[ModelId, AskerProcess],
        routable: Callable[[ModelId], list[dict[str, Any]]],
    ) -> None:
        self._config = config
        self._own = own
        self._models = models
        self._askers = askers
        self._routable = routable

    def __call__(self) -> dict[str, Any]:
        """See `mesh.api.privacy.report`."""
        routing = self._config.routing
        precautions = Precautions(
            routing.keep_first,
            routing.keep_last,
            routing.activation_noise,
            self._config.distributed.spot_check_probability,
        )
        return report([r for model in self._models for r in self._routes(model)], precautions)

    def _routes(self, model: LocalModel) -> Iterator[Route]:
        asker = self._askers.get(model.model_id)
        for running in asker.generations if asker is not None else ():
            hops = tuple(
                Hop(row["node"], LayerRange.parse(row["layers"]), row["host"] == self._own)
                for row in running["route"]
            )
            yield Route(model.model_id, model.total_layers, running["id"], hops)
        yield self._next(model)

    def _next(self, model: LocalModel) -> Route:
        distributed, routing = self._config.distributed, self._config.routing
        home = home_layers(model.total_layers, routing.keep_first, routing.keep_last)
        rules = CoverRules(
            distributed.max_shards_per_request, distributed.allow_self_as_shard, home
        )
        candidates = [self._candidate(fields) for fields in self._routable(model.model_id)]
        same = [c for c in candidates if c.descriptor.weights_sha256 == model.weights_sha256]
        whole = LayerRange(0, model.total_layers)
        try:
            cover = greedy_cover(same, whole, rules)
        except NoRoute as error:
            return Route(model.model_id, model.total_layers, None, (), error.message)
        hops = tuple(
            Hop(hop.shard.node_name, hop.layers, hop.shard.host == self._own) for hop in cover
        )
        return Route(model.model_id, model.total_layers, None, hops)

    def _candidate(self, fields: dict[str, Any]) -> Candidate:
        shard = decode(fields, host=NodeId(fields["host"]))
        return Candidate(
            shard.descriptor,
            shard.health.queue_depth,
            streams_left=1,
            is_self=shard.descriptor.host == self._own,
            penalty=2 * (fields.get("verdict") == Verdict.SUSPECT),
        )
