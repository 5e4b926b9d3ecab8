"""What has become of each deployment, as rows for people: its state, level, and each span's phase.

Reads what others own and decides nothing. Of this node's own spans all is known; of others' what
they advertise: what they serve, how far they say that they are, and what of the weights is on their
disks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from mesh.deployments.formats import is_as_wished
from mesh.deployments.levels import Level
from mesh.deployments.phases import Phase, PhaseProgress, Phases
from mesh.deployments.reconcile import ServedShard
from mesh.deployments.wishes import Deployment, Replica, Span, Wish, merged
from mesh.deployments.world import World
from mesh.discovery.weights import HeldWeights
from mesh.errors import MeshError
from mesh.types import NodeId

_STATES = (Phase.FAILED, Phase.AWAY, Phase.PROVISIONING, Phase.DEPLOYING, Phase.QUEUED)
"""What a deployment is said to be in when its spans are in several, most telling first."""
ON_ITS_WAY = (Phase.QUEUED, Phase.PROVISIONING, Phase.DEPLOYING)


class DeploymentRows:
    """Makes the rows; `phases` are how far this node's own spans are."""

    def __init__(self, seen: World, phases: Phases) -> None:
        self._seen = seen
        self._phases = phases

    def row(self, deployment: Deployment) -> dict[str, Any]:
        """As the API shows it; see `mesh.api.services.DeploymentControl`."""
        wish, plan, names = deployment.wish, deployment.plan, self._seen.names()
        replicas = plan.replicas if plan is not None else ()
        spans = self._spans(deployment, names)
        missing = self._missing(deployment) if deployment.is_wanted else []
        return {
            "deployment": wish.deployment,
            "merged": [each.id for each in merged(self._seen.deployments(), deployment.id)],
            "model_id": str(wish.model_id),
            "weights_sha256": wish.weights_sha256,
            "total_layers": wish.total_layers,
            "replicas": wish.replicas,
            "replicas_ready": _ready(replicas, spans),
            "dedicated": wish.dedicated,
            "quant": wish.quant or None,
            "context": wish.context or None,
            "minimum_s": wish.minimum_s,
            "keep_alive_s": wish.keep_alive_s or None,
            "in_use": False,
            "rests_at": None,
            # As an order may name them: by ids, which two machines never share.
            "nodes": [str(node) for node in wish.nodes],
            "layers": [f"{pin.node}={pin.layers}" for pin in wish.pins],
            "level": self._level(deployment).value,
            "resting": not deployment.is_wanted,
            "state": _state(spans, missing, deployment),
            "missing": missing,
            "epoch": None if plan is None else plan.epoch,
            "why": None if plan is None else plan.why or None,
            "error": None,
            "by": names.get(deployment.author, deployment.author),
            "wished_at": datetime.fromtimestamp(deployment.wall_ms / 1000, UTC).isoformat(),
            "spans": spans,
        }

    def reading(
        self, deployment: Deployment, far: PhaseProgress, error: MeshError | None
    ) -> dict[str, Any]:
        """The row of one that is still to be wished for: this node reads the model first."""
        span = Span(self._seen.node, deployment.wish.whole)
        name = self._seen.names().get(span.node, span.node)
        return self.row(deployment) | {
            "state": far.phase.value,
            "error": None if error is None else error.to_dict(),
            "spans": [_span_row(0, span, name, far)],
        }

    def is_on_its_way(self, deployment: Deployment) -> bool:
        """Whether a machine that is there is still to bring up a part of it."""
        return any(span["phase"] in ON_ITS_WAY for span in self._spans(deployment, {}))

    def _spans(self, deployment: Deployment, names: Mapping[NodeId, str]) -> list[dict[str, Any]]:
        replicas = deployment.plan.replicas if deployment.plan is not None else ()
        return [
            self._span(deployment, replica, span, names)
            for replica in replicas
            for span in replica.spans
        ]

    def _span(
        self, deployment: Deployment, replica: Replica, span: Span, names: Mapping[NodeId, str]
    ) -> dict[str, Any]:
        wish = deployment.wish
        shard, is_own = deployment.shard(span.layers), span.node == self._seen.node
        now = self._phases.get(shard) if is_own else self._seen.told(span.node, shard)
        if self._serves(span, wish) and (now is None or now.phase is Phase.READY):
            now = PhaseProgress(Phase.READY)
        elif span.node not in self._seen.alive():
            now = PhaseProgress(Phase.AWAY)
        elif is_own and now is not None and now.phase is Phase.READY:
            now = None  # as it was wished before
        elif not is_own:
            now = now or _fetched(wish, span, self._seen.on_disk(span.node, wish.weights_sha256))
        if not deployment.is_wanted:
            now = PhaseProgress(Phase.RESTING)
        now = now or PhaseProgress(Phase.QUEUED)
        return _span_row(replica.number, span, names.get(span.node, span.node), now)

    def _level(self, deployment: Deployment) -> Level:
        """HOT while any of its layers is on a device, WARM while they are offered, else COLD."""
        wish = deployment.wish
        offered = any(
            (each.model_id, each.weights_sha256) == (wish.model_id, wish.weights_sha256)
            for each in self._here()
        )
        if not deployment.is_wanted or not offered:
            return Level.COLD
        is_hot = self._seen.is_resident(wish.model_id, wish.weights_sha256)
        return Level.HOT if is_hot else Level.WARM

    def _here(self) -> list[ServedShard]:
        return [*self._seen.served(), *self._seen.serves()]

    def _serves(self, span: Span, wish: Wish) -> bool:
        """Whether its machine serves a span as it is wished."""
        wanted = ServedShard(span.node, wish.model_id, wish.weights_sha256, span.layers)
        return any(each == wanted and is_as_wished(each.loaded, wish) for each in self._here())

    def _missing(self, deployment: Deployment) -> list[str]:
        wish = deployment.wish
        served = [
            each.layers
            for each in self._here()
            if (each.model_id, each.weights_sha256) == (wish.model_id, wish.weights_sha256)
        ]
        return [str(layers) for layers in wish.whole.lacking(served)]


def _span_row(replica: int, span: Span, name: str, now: PhaseProgress) -> dict[str, Any]:
    return {
        "replica": replica,
        "node_id": span.node,
        "node": name,
        "layers": str(span.layers),
        **now.row(),
    }


def _fetched(wish: Wish, span: Span, there: HeldWeights | None) -> PhaseProgress:
    """How far another node is with a span, as far as it says: bytes, else whole layers."""
    if there is None:
        return PhaseProgress(Phase.QUEUED)
    layers = range(span.layers.start, span.layers.stop)
    done = sum(any(layer in held for held in there.layers) for layer in layers)
    if done == len(layers):
        return PhaseProgress(Phase.DEPLOYING)
    if (now := there.arriving) is not None:
        come = min(now.done_bytes, now.total_bytes)
        return PhaseProgress(Phase.PROVISIONING, come, now.total_bytes, bytes_per_s=now.bytes_per_s)
    one = (wish.layers_mb << 20) // wish.total_layers
    return PhaseProgress(Phase.PROVISIONING, done * one, len(layers) * one)


def _ready(replicas: Sequence[Replica], spans: Sequence[dict[str, Any]]) -> int:
    waiting = {row["replica"] for row in spans if row["phase"] != Phase.READY}
    return sum(replica.number not in waiting for replica in replicas)


def _state(spans: Sequence[dict[str, Any]], missing: Sequence[str], deployment: Deployment) -> str:
    """READY when all is as wished, PARTLY when it answers without some of that."""
    phases = {row["phase"] for row in spans}
    if not deployment.is_wanted:
        return "RESTING"
    if deployment.is_planned and phases <= {Phase.READY} and spans:
        return "READY"
    if not missing:
        return "PARTLY"
    return next((phase.value for phase in _STATES if phase in phases), Phase.QUEUED.value)
