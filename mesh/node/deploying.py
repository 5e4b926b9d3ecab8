"""A node's part in deployments: the log, the peers and the processes, as `mesh.deployments` asks
for them.

Part of the composition root, like `mesh.node.node`, which starts and stops it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from mesh.config import Config
from mesh.deployments.laid import AvailableNode, Laid
from mesh.deployments.levels import Level, level_of
from mesh.deployments.phases import Phase, PhaseProgress
from mesh.deployments.reconcile import LoadAction, OwnShard, ServedShard
from mesh.deployments.weights import OnProgress
from mesh.deployments.wishes import Deployment, Known, Plan, Span, Wish, live, read
from mesh.deployments.world import Use, World
from mesh.discovery.advertisement import Advertisement
from mesh.discovery.directory import ShardStore
from mesh.discovery.sightings import PeerState
from mesh.discovery.weights import HeldWeights
from mesh.errors import Forbidden, InternalError, MeshError, UntrustedPeer
from mesh.events.types import PLACEMENT_PLANNED, PLACEMENT_WISHED
from mesh.hearth.hearth import Hearth
from mesh.hearth.network import Network
from mesh.identity.roster import TrustLevel
from mesh.models.local import LocalModel, require_within
from mesh.node import wiring
from mesh.node.holdings import Holdings
from mesh.node.layouts import Layouts
from mesh.node.shards_as_seen import own_shards, served_shard
from mesh.types import BringingUp, LayerRange, ModelId, NodeId, ShardId, copy_of


class House(World):
    """This node."""

    def __init__(
        self,
        config: Config,
        node: NodeId,
        held: Holdings,
        network: Network,
        store: ShardStore,
        awaits: Callable[[ModelId], bool],
    ) -> None:
        """`awaits`: whether a request for a model waits here to be let in."""
        self.node = node
        self._awaits = awaits
        self._config = config
        self._held = held
        self._network = network
        self._store = store
        self.free_on_devices: Callable[[], Mapping[str, int]] = dict
        """MiB, of those of which that is known; where there are several."""
        self._read: tuple[object, dict[str, Deployment]] | None = None
        self._known = Known()
        self.layouts = Layouts(config, node, store, self.deployments)

    async def laid_out(
        self, wish: Wish, before: Plan | None, freed_mb: Mapping[NodeId, int]
    ) -> Laid:
        there = {*self.served(), *self.serves()}
        return await self.layouts.laid_out(wish, before, freed_mb, there, self.alive())

    def spoken_for(self, model_id: ModelId, weights_sha256: str) -> Mapping[NodeId, int]:
        """MiB of each machine that are for what is planned there of other models, and not yet
        loaded."""
        own = (
            each.id
            for each in live(self.deployments())
            if (each.wish.model_id, each.wish.weights_sha256) == (model_id, weights_sha256)
        )
        return self.layouts.spoken_for(next(own, ""), {*self.served(), *self.serves()})

    def refused(self, deployment: Deployment) -> Collection[Span]:
        return self.layouts.refused(deployment)

    def told(self, node: NodeId, shard: ShardId) -> PhaseProgress | None:
        return self.layouts.told(node, shard)

    # What the log says

    def deployments(self) -> dict[str, Deployment]:
        hearth = self._network.hearth
        if hearth is None:
            return {}
        state = hearth.log.state
        if self._read is None or self._read[0] is not state:
            self._read = state, read(state.wishes(), state.plans(), self._known)
        return self._read[1]

    async def publish_wish(self, wish: Wish) -> Deployment:
        await self._hearth().publish(PLACEMENT_WISHED, wish.payload())
        signed = self.deployments().get(wish.deployment)
        if signed is None:
            self._hearth()  # raises why there is none any more
            raise InternalError("the wish is not in the log.", fix="Report this as a bug.")
        return signed

    async def publish_plan(self, plan: Plan) -> None:
        await self._hearth().publish(PLACEMENT_PLANNED, plan.payload())

    def alive(self) -> set[NodeId]:
        return {machine.node for machine in self.machines()}

    def _free_mb(self, node: NodeId) -> int | None:
        """What is free on the devices of a node; None where it has not said."""
        if node == self.node:
            free = self.free_mb().values()
            known = [mb for mb in free if mb is not None]
            return sum(known) if len(known) == len(free) else None
        view = self._store.node(node)
        said = None if view is None else view.offers.capacity
        devices = said.devices if said is not None else ()
        return sum(each.free_bytes for each in devices) >> 20 if devices else None

    def on_disk(self, node: NodeId, weights_sha256: str) -> HeldWeights | None:
        view = self._store.node(node)
        said = () if view is None else view.offers.weights
        return next((held for held in said if held.weights_sha256 == weights_sha256), None)

    def is_resident(self, model_id: ModelId, weights_sha256: str) -> bool:
        offered = self._shards(model_id, weights_sha256)
        return level_of(each.health for each in offered) is Level.HOT

    def use(self, deployment: Deployment) -> Use:
        wish, asker = deployment.wish, self._held.askers.get(deployment.wish.model_id)
        healths = [each.health for each in self._shards(wish.model_id, wish.weights_sha256)]
        is_busy = any(each.active_streams or each.queue_depth or each.jobs for each in healths)
        signs = tuple(
            (each.p50_latency_ms, each.p95_latency_ms, each.jobs_so_far) for each in healths
        )
        is_asked = self._awaits(wish.model_id) or (asker is not None and asker.is_busy)
        return Use(is_busy or is_asked, signs)

    def is_askable(self, model_id: ModelId) -> bool:
        """Whether this node can ask a model now: its asker is ready, and all layers are offered,
        its own as well, which it serves a moment before. One whose asker failed is asked as well:
        that says why."""
        model, asker = self._held.models.get(model_id), self._held.askers.get(model_id)
        if asker is not None and asker.error is not None:
            return True
        if model is None or asker is None or not asker.is_ready:
            return False
        offered = [
            each.descriptor.layers
            for each in self._store.shards(model_id, model.weights_sha256)
            if self._network.may_serve(each.descriptor.host)
        ]
        return not LayerRange(0, model.total_layers).lacking(offered)

    def loading(self, model_id: ModelId) -> BringingUp | None:
        """How far the layers are that this node was told to hold of a model; None where all have
        loaded, or did not load."""
        host = self._held.host
        names = [name for name, each in host.wanted.items() if each.model_id == model_id]
        processes = [p for p in host.processes.values() if not p.wanted.keys().isdisjoint(names)]
        is_stuck = any(each.standing.trouble is not None for each in processes)
        if is_stuck or all(map(host.knows, names)):
            return None
        loads = (load for each in processes if (load := each.load()) is not None)
        load = next((load for load in loads if load["name"] in names), {})
        total = load.get("total_bytes")
        percent = load["done_bytes"] * 100 // total if total else None
        return BringingUp(model_id, Phase.DEPLOYING.value, percent)

    def _shards(self, model_id: ModelId, weights_sha256: str) -> list[Advertisement]:
        """Those that are offered now, here and elsewhere, in one order."""
        own = [Advertisement(shard.descriptor, shard.health) for shard in self._held.host.serving]
        return [
            each
            for each in own
            if (each.descriptor.model_id, each.descriptor.weights_sha256)
            == (model_id, weights_sha256)
        ] + [
            each
            for each in self._store.shards(model_id, weights_sha256)
            if each.descriptor.host != self.node and self._network.may_serve(each.descriptor.host)
        ]

    def require_operator(self) -> None:
        if not self._network.may_serve(self.node) or not self._hearth().may_serve(self.node):
            raise UntrustedPeer(
                "This node is not trusted to say what others hold.",
                fix="Ask an anchor: `hearthnet members promote`.",
            )

    # Who is there

    def machines(self) -> Sequence[AvailableNode]:
        hearth = self._network.hearth
        if hearth is None:
            return ()
        up = {p.node_id for p in self._network.peers() if p.state is PeerState.UP and p.node_id}
        names = self.names()
        said = {view.info.node_id: view.offers.progress for view in self._store.nodes()}
        paused = {node for node, progress in said.items() if progress and progress.paused}
        return [
            AvailableNode(node, names.get(node, node), self._free_mb(node), node in paused)
            for node in sorted({self.node, *up})
            if hearth.may_serve(node)
        ]

    def trusted(self) -> Collection[NodeId]:
        hearth = self._network.hearth
        if hearth is None:
            return ()
        members = hearth.roster.members.values()
        return {member.node_id for member in members if member.level >= TrustLevel.TRUSTED}

    def names(self) -> Mapping[NodeId, str]:
        hearth = self._network.hearth
        if hearth is None:
            return {self.node: self._config.name}
        former = {each.node_id: f"{each.name} (out)" for each in hearth.roster.former.values()}
        members = {each.node_id: each.name for each in hearth.roster.members.values()}
        return {self.node: self._config.name} | former | members

    def served(self) -> list[ServedShard]:
        return [
            served_shard(d)
            for view in self._store.nodes()
            if view.online and view.info.node_id != self.node
            for shard in view.offers.shards
            if shard.health.online and self._network.may_serve(view.info.node_id)
            for d in (shard.descriptor,)
        ]

    def serves(self) -> Collection[ServedShard]:
        return [served_shard(shard.descriptor) for shard in self._held.host.serving]

    # What this node holds

    def held(self) -> list[OwnShard]:
        return own_shards(self._held)

    def failed(self) -> Mapping[ShardId, MeshError]:
        host = self._held.host
        return {name: why for name, why in host.failed.items() if name not in self._held.by_hand}

    def free_mb(self) -> dict[str, int | None]:
        processes = self._held.host.processes
        if len(processes) > 1:
            known = self.free_on_devices()
            return {name: known.get(name) for name in processes}
        memory = self._held.host.health.memory
        free_mb = wiring.free_mb(self._config) if memory is None else memory.free_mb
        return dict.fromkeys(processes, free_mb)

    def need_mb(self, deployment: Deployment, layers: LayerRange, device: str) -> int | None:
        if not self.layouts.computes(deployment.wish, device):
            return None
        return self.layouts.need_mb(deployment.wish, layers, device)

    async def get_to_know(self, wishes: Iterable[Wish]) -> None:
        for wish in wishes:
            await self.layouts.get_to_know(wish)

    def asking_mb(self, wish: Wish) -> int:
        return 0 if self.asks(wish) else self.layouts.asking_mb(wish)

    def need_of(self, wish: Wish, layers: LayerRange) -> int:
        return self.layouts.taken_mb(wish, layers)

    def refusal(self, deployment: Deployment, layers: LayerRange) -> MeshError | None:
        host, wish = self._config.distributed.host, deployment.wish
        if host.serve_shards is False or not self._config.is_distributed:
            return Forbidden(
                "The settings of this machine let it serve no layers.",
                fix="Set research.distributed_inference.host.serve_shards.",
            )
        try:
            require_within(_sized(wish), host.shard_max_vram_mb, layers)
        except MeshError as error:
            return error
        return None

    # What it does

    def asked(self) -> Collection[ModelId]:
        return self._held.askers.keys()

    def asks(self, wish: Wish) -> bool:
        return self._held.asks(wish.model_id, wish.weights_sha256, wish.quant)

    def known(self) -> dict[ModelId, str]:
        models = self._held.models
        return {name: models[name].weights_sha256 for name in models if name not in models.by_hand}

    async def ask(self, model: LocalModel) -> None:
        await self._held.ask(model)

    async def ask_no_more(self, model_id: ModelId, *, forget: bool) -> None:
        await self._held.ask_no_more(model_id, forget=forget)

    async def serve(
        self, deployment: Deployment, load: LoadAction, device: str, on_progress: OnProgress
    ) -> None:
        wish = deployment.wish
        await self._held.serve(
            wish.model_id, load.layers, quant=wish.quant, context=wish.context, device=device,
            copy=copy_of(load.shard), on_progress=on_progress,
        )  # fmt: skip

    async def unserve(self, shard: ShardId) -> int:
        return await self._held.unserve(shard)

    def dedicate(self, shards: Collection[ShardId]) -> None:
        self._held.keep_resident(shards)

    def _hearth(self) -> Hearth:
        return self._network.require_hearth()


def _sized(wish: Wish) -> LocalModel:
    return LocalModel(
        wish.model_id, "", wish.weights_sha256, wish.total_layers, None, None, wish.layers_mb
    )
