"""A household in memory: nodes with bounded memory that follow one log, step by step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from mesh.capacity import Device, Speed
from mesh.deployments.formats import LoadedFormat, is_as_wished
from mesh.deployments.laid import AvailableNode, Laid
from mesh.deployments.placement import gaps, make_plan, planner, stale, without
from mesh.deployments.reconcile import (
    MAX_PROVISIONED,
    Decision,
    DropAction,
    LoadAction,
    OwnShard,
    ServedShard,
    ShardStage,
    View,
    reconcile,
)
from mesh.deployments.room import Change, absences
from mesh.deployments.spreading import crowded, spread
from mesh.deployments.wishes import Deployment, Plan, Quant, Span, Wish, live
from mesh.errors import MeshError
from mesh.routing.gaps import beside, fill
from mesh.routing.machines import Demand, Machine, ModelShape
from mesh.routing.placement import lay_out
from mesh.types import LayerRange, ModelId, NodeId, ShardId
from tests.routing.shapes import model_of

LAYER_MB = 10
OWN_QUANT = "none"
DTYPES = {"none": "bf16", "int8": "int8", "int4": "int4", "auto": "int8"}
WEIGHTS = "ab" * 32


@dataclass
class SimulatedNode:
    """One machine: what it holds, by shard.

    It has no room after all for what it `will_refuse`, as its process says once it loads that; what
    it `refused` it does not try again by itself. Of models in `awaited` nobody gives it the
    weights for now.
    """

    node: NodeId
    total_mb: int
    is_up: bool = True
    gone_s: float = 0.0
    held: dict[ShardId, OwnShard] = field(default_factory=dict)
    will_refuse: set[ShardId] = field(default_factory=set)
    refused: set[ShardId] = field(default_factory=set)
    awaited: set[ModelId] = field(default_factory=set)

    @property
    def free_mb(self) -> int:
        return self.total_mb - sum(h.mb for h in self.held.values() if not h.is_to_come)

    @property
    def fetching(self) -> list[OwnShard]:
        return [h for h in self.held.values() if h.state is ShardStage.PROVISIONING]

    @property
    def ready(self) -> list[OwnShard]:
        return [held for held in self.held.values() if held.state is ShardStage.READY]


class SimulatedHouse:
    """The nodes and the log that they all see. Checks with every action that it was allowed.

    Where it `is_measured`, later nodes are slower, and gaps go where the planner lays them:
    `filled` of them so far.
    """

    def __init__(self, memories_mb: Iterable[int], *, is_measured: bool = False) -> None:
        self.is_measured = is_measured
        self.filled = 0
        self.nodes = [
            SimulatedNode(NodeId(f"n{number}"), total) for number, total in enumerate(memories_mb)
        ]
        self.deployments: dict[str, Deployment] = {}
        self.gaps: list[tuple[NodeId, DropAction]] = []
        self.replaced: list[tuple[NodeId, DropAction]] = []
        """Gaps for the sake of the same layers in another format."""
        self.foretold: set[tuple[str, str]] = set()
        """Machines, and layers that the last wish would have them drop before others are there."""
        self._events = 0

    @property
    def up(self) -> list[SimulatedNode]:
        return [node for node in self.nodes if node.is_up]

    def machines(self) -> list[AvailableNode]:
        return [AvailableNode(node.node, node.node, node.free_mb) for node in self.up]

    # Operators

    def deploy(self, model: str, layers: int, replicas: int = 1) -> bool:
        """A model that is deployed already is scaled, as by the verb: there is one deployment of
        a checkpoint."""
        for known in live(self.deployments):
            if known.wish.model_id == model:
                return self.scale(known, replicas)
        name = hashlib.sha256(f"{model}{self._events}".encode()).hexdigest()[:16]
        mb = layers * LAYER_MB
        return self.wish(Wish(name, ModelId(model), WEIGHTS, layers, mb, replicas), None)

    def scale(self, deployment: Deployment, replicas: int) -> bool:
        wish = replace(deployment.wish, replicas=replicas, resting=False)
        return self.wish(wish, deployment.plan)

    def pin(self, deployment: Deployment, span: Span) -> bool:
        return self.wish(replace(deployment.wish, pins=(span,), resting=False), deployment.plan)

    def rest(self, deployment: Deployment) -> None:
        """What the one node does that has it rest; its plan says where it comes up again."""
        wish = replace(deployment.wish, resting=True)
        self.deployments[deployment.id] = replace(deployment, wish=wish, event=self._event())

    def change(self, deployment: Deployment, quant: Quant, context: int) -> bool:
        wish = replace(deployment.wish, quant=quant, context=context, resting=False)
        return self.wish(wish, deployment.plan)

    def evict(self, deployment: Deployment) -> bool:
        wish = replace(deployment.wish, evicted=True)
        self.deployments[deployment.id] = replace(deployment, wish=wish, event=self._event())
        return True

    def wish(self, wish: Wish, before: Plan | None) -> bool:
        event = self._event()
        try:
            plan = make_plan(wish, event, self.machines(), before, asked=True)
        except MeshError:
            return False  # as the verb, which signs nothing then
        known = self.deployments.get(wish.deployment)
        self.foretold = self._absences(wish, plan, known if known and known.is_wanted else None)
        self.deployments[wish.deployment] = Deployment(wish, plan, event, NodeId("op"), 0)
        return True

    def replan(self, limit_s: float) -> None:
        """What the one node does that plans anew."""
        alive = {node.node for node in self.up}
        gone = {node.node: node.gone_s for node in self.nodes if not node.is_up}
        everybody = {node.node for node in self.nodes}
        for deployment in live(self.deployments):
            refused = self._refused(deployment)
            why = stale(deployment, gone, everybody, limit_s, {})
            why = why or ("no room" if refused else None)
            if why is None:
                self._spread(deployment)
            if why is None or planner(deployment, alive) is None:
                continue
            plan, before = deployment.plan, without(deployment.plan, refused)
            asked = not deployment.is_planned or (bool(refused) and plan is not None and plan.asked)
            try:
                new = make_plan(
                    deployment.wish, deployment.event, self.machines(), before, asked=asked,
                    why=why, laid=self.laid(deployment, before, {span.node for span in refused}),
                )  # fmt: skip
            except MeshError:
                continue
            self.deployments[deployment.id] = replace(deployment, plan=new)

    def _refused(self, deployment: Deployment) -> set[Span]:
        """The spans of its plan for which their machines say that they have no room."""
        if deployment.plan is None or not (deployment.is_wanted and deployment.is_planned):
            return set()
        told = {(node.node, shard) for node in self.up for shard in node.refused}
        return {
            span
            for span in deployment.plan.spans
            if (span.node, deployment.shard(span.layers)) in told
            and span not in deployment.wish.pins
        }

    def laid(self, deployment: Deployment, before: Plan | None, full: set[NodeId]) -> Laid:
        """Where the planner puts what the plan lacks, on machines that are not `full`."""
        if not self.is_measured:
            return Laid(rooms=dict.fromkeys(full, 0))
        shape, machines = shape_of(deployment.wish), self._measured(full)
        filled = {}
        for gap in gaps(deployment.wish, before, {node.node for node in self.up}):
            shards = fill(shape, machines, gap.layers, Demand(quant="none", context=1))
            if shards is not None:
                machines = beside(machines, shards)
                filled[gap] = tuple(Span(shard.node_id, shard.layers) for shard in shards)
                self.filled += 1
        return Laid((), filled, rooms=dict.fromkeys(full, 0))

    def _spread(self, deployment: Deployment) -> None:
        """Move a copy off a machine that has two, where the planner has a place for it."""
        found = crowded(deployment, self.machines()) if self.is_measured else None
        if found is None or deployment.plan is None:
            return
        others = {node.node for node in self.nodes} - {*found.unused}
        demand = Demand(quant="none", context=1)
        laid = lay_out(shape_of(deployment.wish), self._measured(others), demand)
        if laid.refusal is None:
            (replica,) = laid.replicas
            spans = [Span(shard.node_id, shard.layers) for shard in replica.shards]
            plan = spread(deployment.plan, found, spans, "two copies")
            self.deployments[deployment.id] = replace(deployment, plan=plan)

    def _measured(self, without: set[NodeId]) -> list[Machine]:
        return [
            Machine(
                node.node, node.node,
                (Device("cpu", node.free_mb << 30, node.total_mb << 30, (
                    Speed("fp32", 10.0 / (1 + number), 1.0),
                )),),
            )
            for number, node in enumerate(self.nodes) if node.is_up and node.node not in without
        ]  # fmt: skip

    # Machines

    def join(self, total_mb: int) -> None:
        """A machine comes that nobody knew; its id is among the others' by chance."""
        number = hashlib.sha256(str(len(self.nodes)).encode()).hexdigest()[:4]
        self.nodes.append(SimulatedNode(NodeId(f"j{number}{len(self.nodes)}"), total_mb))

    def kill(self, node: SimulatedNode) -> None:
        node.is_up, node.held, node.refused, node.awaited = False, {}, set(), set()

    def runs_short(self, node: SimulatedNode) -> None:
        """It has no room after all for what it is given and does not have."""
        wanted = {s for d in live(self.deployments) for s in d.shards_of(node.node)}
        node.will_refuse = wanted - set(node.held)

    def recovers(self, node: SimulatedNode) -> None:
        """It has room again, and tries what it refused."""
        node.will_refuse, node.refused = set(), set()

    def bring_back(self, node: SimulatedNode) -> None:
        node.is_up, node.gone_s = True, 0.0

    # Steps

    def served(self, model_id: ModelId) -> set[int]:
        return {
            layer
            for node in self.up
            for held in node.ready
            if held.model_id == model_id
            for layer in range(held.layers.start, held.layers.stop)
        }

    def decide(self, node: SimulatedNode) -> Decision:
        served = [
            ServedShard(
                other.node,
                held.model_id,
                held.weights_sha256,
                held.layers,
                held.loaded,
            )
            for other in self.up
            if other is not node
            for held in other.ready
        ]
        return reconcile(
            View(
                node.node, self.deployments, self._held(node), served, node.free_mb,
                need_mb, not_yet=dict.fromkeys(node.refused, "no room after all"),
            )
        )  # fmt: skip

    def step(self, node: SimulatedNode) -> bool:
        """One turn of a node: what was loading is ready and what was fetched is here, then one
        decision; whether it did anything."""
        moved = self._mature(node)
        decision = self.decide(node)
        self._obey(node, decision)
        return moved or not decision.is_idle

    def settle(self, rounds: int = 200) -> bool:
        """Whether nobody has anything left to do after so many turns of everybody."""
        return any(not self.together() for _ in range(rounds))

    def together(self) -> bool:
        """One turn of everybody at the same moment, none knowing what the others do."""
        moved = [self._mature(node) for node in self.up]
        decided = [(node, self.decide(node)) for node in self.up]
        for node, decision in decided:
            self._obey(node, decision)
        return any(moved) or not all(decision.is_idle for _, decision in decided)

    # Private

    def _absences(self, wish: Wish, plan: Plan, before: Deployment | None) -> set[tuple[str, str]]:
        there = set() if before is None or before.plan is None else plan.spans & before.plan.spans
        anew = {
            span
            for span in there
            for node in self.up
            for held in node.ready
            if (node.node, held.layers) == (span.node, span.layers)
            and held.model_id == wish.model_id
            and not is_as_wished(held.loaded, wish)
        }
        change = Change(wish, plan, before, frozenset(anew))
        found = absences(change, (), (), self.machines(), mb_of)
        return {(each.machine, str(each.drops)) for each in found}

    def _held(self, node: SimulatedNode) -> list[OwnShard]:
        """With what is to come as large as it is wished now."""
        found = []
        for held in node.held.values():
            mb = [
                need_mb(each, held.layers)
                for each in live(self.deployments)
                if held.is_to_come and held.shard in each.shards_of(node.node)
            ]
            found.append(replace(held, mb=mb[0]) if mb else held)
        return found

    def _mature(self, node: SimulatedNode) -> bool:
        """What was loading is ready, what was fetched is here; whether anything was."""
        moved = False
        for each in list(node.held.values()):
            if each.state is ShardStage.LOADING:
                loaded = replace(each.loaded, dtype=DTYPES[each.loaded.quant])
                node.held[each.shard] = replace(each, state=ShardStage.READY, loaded=loaded)
            elif each.state is ShardStage.PROVISIONING and each.model_id not in node.awaited:
                node.held[each.shard] = replace(each, state=ShardStage.PROVISIONED)
            else:
                continue
            moved = True
        return moved

    def _obey(self, node: SimulatedNode, decision: Decision) -> None:
        for drop in decision.drops:
            self._drop(node, drop)
        for fetch in decision.fetches:
            self._fetch(node, fetch)
        if decision.load is not None:
            self._load(node, decision.load)

    def _fetch(self, node: SimulatedNode, fetch: LoadAction) -> None:
        wish = self.deployments[fetch.deployment].wish
        assert fetch.shard not in node.held
        assert fetch.shard not in node.refused
        node.held[fetch.shard] = OwnShard(
            fetch.shard, wish.model_id, WEIGHTS, fetch.layers, fetch.mb, ShardStage.PROVISIONING
        )
        assert len(node.fetching) <= MAX_PROVISIONED

    def _load(self, node: SimulatedNode, load: LoadAction) -> None:
        wish = self.deployments[load.deployment].wish
        assert node.held[load.shard].state is ShardStage.PROVISIONED
        assert all(each.state is not ShardStage.LOADING for each in node.held.values())
        if load.shard in node.will_refuse:
            node.refused.add(load.shard)
            del node.held[load.shard]
            return
        tokens = max(wish.context, 16)
        loaded = LoadedFormat(quant=wish.quant or OWN_QUANT, kv_tokens=tokens, own=OWN_QUANT)
        node.held[load.shard] = OwnShard(
            load.shard, wish.model_id, WEIGHTS, load.layers, load.mb, ShardStage.LOADING,
            loaded=loaded,
        )  # fmt: skip
        assert node.free_mb >= 0, "never over memory"

    def _drop(self, node: SimulatedNode, drop: DropAction) -> None:
        held = node.held[drop.shard]
        wishing = [
            each
            for each in live(self.deployments)
            if each.wish.model_id == held.model_id and each.is_wanted
        ]
        before = self.served(held.model_id)
        del node.held[drop.shard]
        if not wishing or held.is_to_come:
            return
        is_replaced = any(
            drop.shard in each.shards_of(node.node) and not is_as_wished(held.loaded, each.wish)
            for each in wishing
        )
        if is_replaced:
            assert drop.gap == (held.state is ShardStage.READY), "a gap is told"
            self.replaced.append((node.node, drop))
        elif drop.gap:
            assert all(each.plan is not None and each.plan.asked for each in wishing)
            self.gaps.append((node.node, drop))
        else:
            assert self.served(held.model_id) == before, "never a gap by its own move"

    def _event(self) -> str:
        self._events += 1
        return hashlib.sha256(str(self._events).encode()).hexdigest()


def need_mb(deployment: Deployment, layers: LayerRange) -> int:
    return mb_of(deployment.wish, layers)


def shape_of(wish: Wish) -> ModelShape:
    """A megabyte here is a gigabyte there, so that what is kept free beside everything is small."""
    layers = (LAYER_MB << 30,) * wish.total_layers
    return model_of(
        wish.model_id, layers, "fp32", weights_sha256=WEIGHTS, hidden_size=1, kv_numbers=0
    )


def mb_of(wish: Wish, layers: LayerRange) -> int:
    mb = wish.layers_mb * len(layers) // wish.total_layers
    return mb if DTYPES[wish.quant or OWN_QUANT] == "bf16" else mb // 2
