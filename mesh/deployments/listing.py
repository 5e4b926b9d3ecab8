"""What has become of each deployment, each span's phase first; and as rows for people.

Reads what others own and decides nothing. Of this node's own spans all is known; of others' what
they advertise: what they serve, how far they say that they are, and what of the weights is on their
disks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mesh.clock import claimed
from mesh.deployments.formats import LoadedFormat, is_as_wished
from mesh.deployments.levels import Level
from mesh.deployments.phases import Phase, PhaseProgress, Phases
from mesh.deployments.reconcile import ServedShard
from mesh.deployments.wishes import Deployment, Span, Wish, merged
from mesh.deployments.world import World
from mesh.discovery.weights import HeldWeights
from mesh.identity.naming import called
from mesh.types import LayerRange, NodeId

_STATES = (Phase.FAILED, Phase.AWAY, Phase.PROVISIONING, Phase.DEPLOYING, Phase.QUEUED)
"""What a deployment is said to be in when its spans are in several, most telling first."""
_SHARED = "one copy with a replica above, as no machine or device is left for another"
ON_ITS_WAY = (Phase.QUEUED, Phase.PROVISIONING, Phase.DEPLOYING)


@dataclass(frozen=True, slots=True)
class SeenSpan:
    """How far a span of a replica is on its machine, which people call `node`."""

    replica: int
    span: Span
    node: str
    now: PhaseProgress

    def row(self) -> dict[str, Any]:
        """As the API shows it."""
        return {
            "replica": self.replica,
            "node_id": self.span.node,
            "node": self.node,
            "layers": str(self.span.layers),
            **self.now.row(),
        }


@dataclass(frozen=True, slots=True)
class SeenDeployment:
    """What this node sees of a deployment: the layers that nobody offers, which are none where it
    is not wanted, and its spans. `ends`: how far this node itself is with those that it asks it
    with; None where it is not at them."""

    deployment: Deployment
    missing: tuple[LayerRange, ...]
    spans: tuple[SeenSpan, ...]
    ends: PhaseProgress | None = None


@dataclass(frozen=True, slots=True)
class _Moment:
    """What is looked up for each span of a deployment: what to call the nodes, which may hold
    layers, which are there, and in which formats what is served is loaded."""

    names: Mapping[NodeId, str]
    trusted: Collection[NodeId]
    alive: Collection[NodeId]
    loaded: Mapping[ServedShard, Sequence[LoadedFormat]]

    def copies(self, span: Span, wish: Wish) -> int:
        """How often its machine serves a span as it is wished."""
        wanted = ServedShard(span.node, wish.model_id, wish.weights_sha256, span.layers)
        return sum(is_as_wished(loaded, wish) for loaded in self.loaded.get(wanted, ()))


class DeploymentRows:
    """Sees, and makes the rows; `phases` are how far this node's own spans are."""

    def __init__(self, seen: World, phases: Phases) -> None:
        self._seen = seen
        self._phases = phases

    def seen(self, deployment: Deployment) -> SeenDeployment:
        """One that was wished for."""
        replicas = deployment.plan.replicas if deployment.plan is not None else ()
        now, copies = self._moment(), Counter[Span]()
        spans = []
        for replica in replicas:
            for span in replica.spans:
                far = self._far(deployment, span, now, copies[span])
                name = now.names.get(span.node, span.node)
                spans.append(SeenSpan(replica.number, span, name, far))
            copies.update(replica.spans)
        ends = self._phases.get(deployment.ends)
        return SeenDeployment(deployment, self._missing(deployment), tuple(spans), ends)

    def read_here(self, deployment: Deployment, far: PhaseProgress) -> SeenDeployment:
        """One that is still to be wished for: this node reads the model first."""
        span = Span(self._seen.node, deployment.wish.whole)
        names = self._names()
        reading = SeenSpan(0, span, names.get(span.node, span.node), far)
        return SeenDeployment(deployment, self._missing(deployment), (reading,))

    def row(self, seen: SeenDeployment) -> dict[str, Any]:
        """As the API shows it; see `mesh.api.services.DeploymentControl`."""
        deployment, names = seen.deployment, self._names()
        wish, plan = deployment.wish, deployment.plan
        return {
            "deployment": wish.deployment,
            "merged": [each.id for each in merged(self._seen.deployments(), deployment.id)],
            "model_id": str(wish.model_id),
            "weights_sha256": wish.weights_sha256,
            "total_layers": wish.total_layers,
            "replicas": wish.replicas,
            "replicas_ready": _ready(seen),
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
            "state": _state(seen),
            "missing": [str(layers) for layers in seen.missing],
            "epoch": None if plan is None else plan.epoch,
            "why": None if plan is None else plan.why or None,
            "error": None,
            "by": names.get(deployment.author, deployment.author),
            "wished_at": claimed(deployment.wall_ms).isoformat(),
            "spans": [span.row() for span in seen.spans],
        }

    def is_on_its_way(self, deployment: Deployment) -> bool:
        """Whether a machine that is there is still to bring up a part of it."""
        return any(each.now.phase in ON_ITS_WAY for each in self.seen(deployment).spans)

    def _moment(self) -> _Moment:
        loaded: dict[ServedShard, list[LoadedFormat]] = {}
        for each in self._here():
            loaded.setdefault(each, []).append(each.loaded)
        return _Moment(self._names(), self._seen.trusted(), self._seen.alive(), loaded)

    def _far(self, deployment: Deployment, span: Span, moment: _Moment, copy: int) -> PhaseProgress:
        wish = deployment.wish
        shard, is_own = deployment.shard(span.layers, copy), span.node == self._seen.node
        now = self._phases.get(shard) if is_own else self._seen.told(span.node, shard)
        copies = moment.copies(span, wish)
        if copies and (now is None or now.phase is Phase.READY):
            now = PhaseProgress(Phase.READY, reason=_SHARED if copy >= copies else None)
        elif span.node not in moment.alive:
            now = PhaseProgress(Phase.AWAY, reason=_why_for_good(span, wish, moment.trusted))
        elif is_own and now is not None and now.phase is Phase.READY:
            now = None  # as it was wished before
        elif not is_own:
            now = now or _fetched(wish, span, self._seen.on_disk(span.node, wish.weights_sha256))
        if not deployment.is_wanted:
            now = PhaseProgress(Phase.RESTING)
        return now or PhaseProgress(Phase.QUEUED)

    def _names(self) -> dict[NodeId, str]:
        """What to call the nodes."""
        return called(self._seen.names().items())

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

    def _missing(self, deployment: Deployment) -> tuple[LayerRange, ...]:
        wish = deployment.wish
        if not deployment.is_wanted:
            return ()
        served = [
            each.layers
            for each in self._here()
            if (each.model_id, each.weights_sha256) == (wish.model_id, wish.weights_sha256)
        ]
        return tuple(wish.whole.lacking(served))


def _why_for_good(span: Span, wish: Wish, trusted: Collection[NodeId]) -> str | None:
    """Why nobody need wait for a machine that is away; None where it may come back."""
    if span.node in trusted:
        return None
    todo = "; deploy with its layers pinned elsewhere" if span in wish.pins else ""
    return f"it may hold no layers any more{todo}"


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


def _ready(seen: SeenDeployment) -> int:
    plan = seen.deployment.plan
    waiting = {span.replica for span in seen.spans if span.now.phase is not Phase.READY}
    replicas = plan.replicas if plan is not None else ()
    return sum(replica.number not in waiting for replica in replicas)


def _state(seen: SeenDeployment) -> str:
    """READY when all is as wished, PARTLY when it answers without some of that."""
    phases = {span.now.phase for span in seen.spans}
    if not seen.deployment.is_wanted:
        return "RESTING"
    if seen.deployment.is_planned and phases == {Phase.READY}:
        return "READY"
    if not seen.missing:
        return "PARTLY"
    return next((phase.value for phase in _STATES if phase in phases), Phase.QUEUED.value)
