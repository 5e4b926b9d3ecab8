"""The routes that prompts of this node take, for the report on who can see what.

Asks the askers what runs, and the router's own rules what would. Words are `mesh.api.privacy`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mesh.api.privacy import Exposure, Precautions, ReportedRoute, expose, report
from mesh.config import Config
from mesh.errors import NoRoute
from mesh.models.local import LocalModel
from mesh.node.wiring import route_limits
from mesh.pipeline.commands import Offer
from mesh.pipeline.supervisor import AskerSupervisor
from mesh.routing import cheapest
from mesh.types import LayerRange, ModelId, NodeId


class PrivacyReport:
    """`routable` gives the shards a model's routes are made of (see `AskerOwner`)."""

    def __init__(
        self,
        config: Config,
        own: NodeId,
        models: Mapping[ModelId, LocalModel],
        askers: Mapping[ModelId, AskerSupervisor],
        routable: Callable[[ModelId], Sequence[Offer]],
    ) -> None:
        self._config = config
        self._own = own
        self._models = models
        self._askers = askers
        self._routable = routable

    def __call__(self) -> dict[str, Any]:
        """Who can see what of prompts and answers now, ready for JSON."""
        routing = self._config.routing
        precautions = Precautions(
            routing.keep_first,
            routing.keep_last,
            routing.activation_noise,
            self._config.distributed.spot_check_probability,
            self._config.distributed.spot_check_home_mb,
        )
        models = list(self._models.values())
        return report([r for model in models for r in self._routes(model)], precautions)

    def _routes(self, model: LocalModel) -> Iterator[ReportedRoute]:
        asker = self._askers.get(model.model_id)
        is_thin = asker is not None and asker.loaded.is_thin
        for running in asker.report.generations if asker is not None else ():
            if running.queued:
                continue  # nothing of it has left this machine
            hops = tuple(
                self._hop(model, NodeId(hop.host), hop.node, hop.layers) for hop in running.route
            )
            yield ReportedRoute(model.model_id, running.id, hops, is_thin=is_thin)
        yield self._next(model, is_thin=is_thin)

    def _next(self, model: LocalModel, *, is_thin: bool) -> ReportedRoute:
        limits = route_limits(self._config)
        rules = limits.cover_rules(model, remote_ends=is_thin)
        candidates = [offer.candidate(self._own) for offer in self._routable(model.model_id)]
        same = [
            c
            for c in candidates
            if c.descriptor.weights_sha256 == model.weights_sha256 and rules.admits(c.descriptor)
        ]
        whole = LayerRange(0, model.total_layers)
        try:
            cover = cheapest.cover(same, whole, rules)
        except NoRoute as error:
            return ReportedRoute(model.model_id, None, (), error.message)
        hops = tuple(
            self._hop(model, hop.shard.host, hop.shard.node_name, hop.layers) for hop in cover
        )
        return ReportedRoute(model.model_id, None, hops, is_thin=is_thin)

    def _hop(self, model: LocalModel, host: NodeId, name: str, layers: LayerRange) -> Exposure:
        """As spot checks see it: who is to check has all of its layers, in the same format."""
        holding = [
            each.shard.descriptor
            for each in self._routable(model.model_id)
            if each.shard.descriptor.weights_sha256 == model.weights_sha256
            and each.shard.descriptor.layers.covers(layers)
        ]
        formats = {each.dtype for each in holding if each.host == host}
        others = [each for each in holding if each.host != host and each.dtype in formats]
        return expose(
            name, layers, model.total_layers, is_own=host == self._own, is_checkable=bool(others),
            noisy=self._config.routing.activation_noise > 0,
        )  # fmt: skip
