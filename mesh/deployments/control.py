"""The verbs of deployments: deploy, scale, evict, and what has become of each.

The HTTP API's `mesh.api.services.DeploymentControl`; JSON-able values in and out. A verb signs a
wish and the plan for it; what the machines do about that is `mesh.deployments.actor`'s.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from mesh.deployments.phases import Phase, Phases, Progress
from mesh.deployments.placement import Machine, make_plan
from mesh.deployments.reconcile import Served
from mesh.deployments.weights import WeightsSource
from mesh.deployments.wishes import Deployment, Plan, Quant, Replica, Span, Wish, live
from mesh.errors import BadRequest, NotFound
from mesh.types import LayerRange, NodeId

_STATES = (Phase.FAILED, Phase.PROVISIONING, Phase.DEPLOYING, Phase.QUEUED)
"""What a deployment is said to be in when its spans are in several, most telling first."""


@dataclass(frozen=True, slots=True)
class Order:
    """What somebody asks for; None leaves what is, or takes the default.

    `nodes` are names or ids; `layers` are pins, ``NODE=LO-HI``.
    """

    model: str
    replicas: int | None = None
    dedicated: bool | None = None
    quant: Quant | None = None
    context: int | None = None
    minimum_s: float | None = None
    nodes: Sequence[str] | None = None
    layers: Sequence[str] | None = None


class House(Protocol):
    """What the verbs need of the node."""

    @property
    def node(self) -> NodeId:
        """This node."""

    def deployments(self) -> dict[str, Deployment]:
        """What the log says."""

    def machines(self) -> Sequence[Machine]:
        """The trusted nodes that are up now."""

    def names(self) -> Mapping[NodeId, str]:
        """What people call the members."""

    def served(self) -> list[Served]:
        """What others serve."""

    def serves(self) -> Collection[Served]:
        """What this node serves."""

    def require_operator(self) -> None:
        """Raises UntrustedPeer and ExperimentalDisabled when this node may wish for nothing."""

    async def publish_wish(self, wish: Wish) -> Deployment:
        """Sign it; the deployment as the log has it now. Raises MeshError."""

    async def publish_plan(self, plan: Plan) -> None:
        """Sign it. Raises MeshError."""


class Deploying:
    """The verbs. `phases` are how far this node's own spans are."""

    def __init__(
        self,
        house: House,
        weights: WeightsSource,
        phases: Phases,
        call_for: Callable[[str], None],
    ) -> None:
        """`call_for` has this node ask a deployment, whatever is placed here."""
        self._house = house
        self._weights = weights
        self._phases = phases
        self._call_for = call_for

    def view(self) -> list[dict[str, Any]]:
        """A row for each deployment that was not evicted, by model."""
        rows = [self._row(each) for each in live(self._house.deployments())]
        return sorted(rows, key=lambda row: (row["model_id"], row["deployment"]))

    async def deploy(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Wish for a model, or change the wish for one that is deployed; `given` are the fields of
        an `Order`.

        Raises ModelNotFound, NoRoute, BadRequest naming the field, UntrustedPeer, and what signing
        raises.
        """
        order = Order(**given)
        self._house.require_operator()
        known = self._find(order.model)
        if known is None:
            found = await self._weights.find(order.model)
            known = self._of(found.model_id, found.weights_sha256)
            before = (
                Wish(
                    secrets.token_hex(8),
                    found.model_id,
                    found.weights_sha256,
                    found.total_layers,
                    found.layers_mb,
                )
                if known is None
                else known.wish
            )
        else:
            before = known.wish
        wish = self._ordered(before, order)
        row = await self._wish(wish, known)
        self._call_for(wish.deployment)
        return row

    async def scale(self, model: str, replicas: int) -> dict[str, Any]:
        """Have so many replicas of a deployment, more or fewer. Raises NotFound and as `deploy`."""
        self._house.require_operator()
        deployment = self._require(model)
        return await self._wish(replace(deployment.wish, replicas=replicas), deployment)

    async def evict(self, model: str) -> list[dict[str, Any]]:
        """End a deployment, or all of a model: ``{"deployment", "model_id", "evicted"}`` each.

        Raises NotFound and UntrustedPeer.
        """
        self._house.require_operator()
        found = [
            each
            for each in live(self._house.deployments())
            if model in (each.id, each.wish.model_id)
        ]
        if not found:
            raise self._not_found(model)
        for each in found:
            await self._house.publish_wish(replace(each.wish, evicted=True))
        return [
            {"deployment": each.id, "model_id": each.wish.model_id, "evicted": True}
            for each in found
        ]

    def require(self, model: str) -> dict[str, Any]:
        """The row of one deployment, by its id or model. Raises NotFound."""
        return self._row(self._require(model))

    # Private

    async def _wish(self, wish: Wish, before: Deployment | None) -> dict[str, Any]:
        """Plan first: a wish that cannot be met is not signed."""
        plan_before = None if before is None else before.plan
        plan = make_plan(wish, "0" * 64, self._house.machines(), plan_before, asked=True)
        if before is None or wish != before.wish:
            signed = await self._house.publish_wish(wish)
        else:
            signed = before
        if plan_before is None or plan_before.replicas != plan.replicas or not signed.is_planned:
            await self._house.publish_plan(replace(plan, wish=signed.event))
        return self.require(wish.deployment)

    def _ordered(self, wish: Wish, order: Order) -> Wish:
        """The wish with what is ordered in it."""
        nodes, pins = order.nodes, order.layers
        changed = replace(
            wish,
            replicas=wish.replicas if order.replicas is None else order.replicas,
            dedicated=wish.dedicated if order.dedicated is None else order.dedicated,
            quant=wish.quant if order.quant is None else order.quant,
            context=wish.context if order.context is None else order.context,
            minimum_s=wish.minimum_s if order.minimum_s is None else order.minimum_s,
            nodes=wish.nodes if nodes is None else tuple(self._node(each) for each in nodes),
            pins=wish.pins if pins is None else tuple(self._pin(wish, each) for each in pins),
        )
        taken: set[int] = set()
        for pin in changed.pins:
            layers = set(range(pin.layers.start, pin.layers.stop))
            if layers & taken:
                raise _bad_layers(f"{pin.layers} overlaps another pin")
            taken |= layers
        return changed

    def _pin(self, wish: Wish, text: str) -> Span:
        node, _, layers = text.rpartition("=")
        try:
            span = Span(self._node(node), LayerRange.parse(layers))
        except ValueError as error:
            raise _bad_layers(str(error)) from None
        if not wish.whole.covers(span.layers):
            raise _bad_layers(f"{wish.model_id} has layers {wish.whole}, not {span.layers}")
        return span

    def _node(self, who: str) -> NodeId:
        """A member by its name, its id or the beginning of that."""
        names = self._house.names()
        found = [node for node, name in names.items() if who in (node, name)]
        found = found or [node for node in names if len(who) >= 6 and node.startswith(who)]
        if len(found) != 1:
            known = ", ".join(sorted(names.values()))
            raise BadRequest(
                f"{'no' if not found else 'more than one'} member is called {who!r}.",
                fix=f"Name one of: {known}.",
                param="nodes",
            )
        return found[0]

    def _of(self, model_id: str, weights: str) -> Deployment | None:
        found = [
            each
            for each in live(self._house.deployments())
            if (each.wish.model_id, each.wish.weights_sha256) == (model_id, weights)
        ]
        return found[0] if found else None

    def _find(self, model: str) -> Deployment | None:
        found = [
            each
            for each in live(self._house.deployments())
            if model in (each.id, each.wish.model_id)
        ]
        if len(found) > 1:
            raise BadRequest(
                f"{model} is deployed {len(found)} times.",
                fix=f"Name one of: {', '.join(each.id for each in found)}.",
                param="model",
            )
        return found[0] if found else None

    def _require(self, model: str) -> Deployment:
        found = self._find(model)
        if found is None:
            raise self._not_found(model)
        return found

    def _not_found(self, model: str) -> NotFound:
        known = sorted({each.wish.model_id for each in live(self._house.deployments())})
        return NotFound(
            f"{model!r} is not deployed; {', '.join(known) or 'nothing'} is.",
            fix="See `hearthnet status`; `hearthnet deploy MODEL` brings one up.",
        )

    # Rows

    def _row(self, deployment: Deployment) -> dict[str, Any]:
        wish, plan, names = deployment.wish, deployment.plan, self._house.names()
        replicas = plan.replicas if plan is not None else ()
        spans = [
            self._span(deployment, replica, span, names)
            for replica in replicas
            for span in replica.spans
        ]
        missing = self._missing(deployment)
        return {
            "deployment": wish.deployment,
            "model_id": str(wish.model_id),
            "weights_sha256": wish.weights_sha256,
            "total_layers": wish.total_layers,
            "replicas": wish.replicas,
            "replicas_ready": _ready(replicas, spans),
            "dedicated": wish.dedicated,
            "quant": wish.quant or None,
            "context": wish.context or None,
            "minimum_s": wish.minimum_s,
            "state": _state(spans, missing, is_planned=deployment.is_planned),
            "missing": missing,
            "epoch": None if plan is None else plan.epoch,
            "why": None if plan is None else plan.why or None,
            "by": names.get(deployment.author, deployment.author),
            "wished_at": datetime.fromtimestamp(deployment.wall_ms / 1000, UTC).isoformat(),
            "spans": spans,
        }

    def _span(
        self, deployment: Deployment, replica: Replica, span: Span, names: Mapping[NodeId, str]
    ) -> dict[str, Any]:
        wish = deployment.wish
        now: Progress | None = None
        if span.node == self._house.node:
            now = self._phases.get(deployment.shard(span.layers))
        served = Served(span.node, wish.model_id, wish.weights_sha256, span.layers)
        if served in self._here():
            now = Progress(Phase.READY)
        return {
            "replica": replica.number,
            "node_id": span.node,
            "node": names.get(span.node, span.node),
            "layers": str(span.layers),
            **(now or Progress(Phase.QUEUED)).row(),
        }

    def _here(self) -> list[Served]:
        return [*self._house.served(), *self._house.serves()]

    def _missing(self, deployment: Deployment) -> list[str]:
        wish = deployment.wish
        covered = {
            layer
            for each in self._here()
            if (each.model_id, each.weights_sha256) == (wish.model_id, wish.weights_sha256)
            for layer in range(each.layers.start, each.layers.stop)
        }
        missing, start = [], None
        for layer in range(wish.total_layers + 1):
            lacks = layer < wish.total_layers and layer not in covered
            if lacks and start is None:
                start = layer
            if not lacks and start is not None:
                missing.append(str(LayerRange(start, layer)))
                start = None
        return missing


def _ready(replicas: Sequence[Replica], spans: Sequence[dict[str, Any]]) -> int:
    waiting = {row["replica"] for row in spans if row["phase"] != Phase.READY}
    return sum(replica.number not in waiting for replica in replicas)


def _state(spans: Sequence[dict[str, Any]], missing: Sequence[str], *, is_planned: bool) -> str:
    """READY when all is as wished, PARTLY when it answers without some of that."""
    phases = {row["phase"] for row in spans}
    if is_planned and phases <= {Phase.READY}:
        return "READY" if spans else "COLD"
    if not missing:
        return "PARTLY"
    return next((phase.value for phase in _STATES if phase in phases), Phase.QUEUED.value)


def _bad_layers(why: str) -> BadRequest:
    return BadRequest(f"layers: {why}.", fix="Give NODE=LO-HI within the model.", param="layers")
