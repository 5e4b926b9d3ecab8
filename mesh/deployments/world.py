"""What `mesh.deployments` asks of the node that it acts for."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mesh.deployments.laid import AvailableNode, Laid
from mesh.deployments.phases import PhaseProgress
from mesh.deployments.reconcile import LoadAction, OwnShard, ServedShard
from mesh.deployments.weights import OnProgress
from mesh.deployments.wishes import Deployment, Plan, Span, Wish
from mesh.discovery.weights import HeldWeights
from mesh.errors import MeshError
from mesh.models.local import LocalModel
from mesh.types import LayerRange, ModelId, NodeId, ShardId


@dataclass(frozen=True, slots=True)
class Use:
    """What is seen of a deployment's use: whether it is used now, and what changes when it is."""

    is_busy: bool
    signs: Hashable


class World(Protocol):
    """What a node is, and what it sees of the others."""

    node: NodeId
    """This node."""

    # What the log says

    def deployments(self) -> dict[str, Deployment]:
        """What is wished for, and planned."""

    async def publish_wish(self, wish: Wish) -> Deployment:
        """Sign it; the deployment as the log has it now. Raises MeshError."""

    async def publish_plan(self, plan: Plan) -> None:
        """Sign it. Raises MeshError."""

    def require_operator(self) -> None:
        """Raises UntrustedPeer and ExperimentalDisabled when this node may wish for nothing."""

    # Who is there

    def machines(self) -> Sequence[AvailableNode]:
        """The trusted nodes that are up now, this one among them if it is trusted."""

    def alive(self) -> set[NodeId]:
        """Their ids."""

    def trusted(self) -> Collection[NodeId]:
        """The nodes that may hold layers, up or not."""

    def names(self) -> Mapping[NodeId, str]:
        """What people call the members, up or not, and who was one."""

    def served(self) -> list[ServedShard]:
        """What others serve."""

    def told(self, node: NodeId, shard: ShardId) -> PhaseProgress | None:
        """What another node says of a shard that it works at."""

    def refused(self, deployment: Deployment) -> Collection[Span]:
        """The spans of its plan for which their machines say that they have no room."""

    def on_disk(self, node: NodeId, weights_sha256: str) -> HeldWeights | None:
        """What another node says that it has of a checkpoint; None where it says nothing."""

    def is_resident(self, model_id: ModelId, weights_sha256: str) -> bool:
        """Whether any of its layers is loaded on a device now."""

    def use(self, deployment: Deployment) -> Use:
        """What is seen of its use."""

    # Where layers could lie

    async def laid_out(
        self, wish: Wish, before: Plan | None, freed_mb: Mapping[NodeId, int]
    ) -> Laid:
        """Where the planner lays what `before` lacks of a wish, were `freed_mb` more free. Raises
        MeshError where the wish cannot be planned at all."""

    def need_mb(self, deployment: Deployment, layers: LayerRange, device: str) -> int | None:
        """What these layers would take on a device of this node, in MiB; None where it does not
        compute them as they are wished, which the only device is not asked."""

    async def get_to_know(self, wishes: Iterable[Wish]) -> None:
        """Look what their layers take, where nobody has, and it does not take long."""

    def asking_mb(self, wish: Wish) -> int:
        """What asking this takes beside that, of the first device, in MiB; 0 where it is asked."""

    def need_of(self, wish: Wish, layers: LayerRange) -> int:
        """What they would take wherever they lie, in MiB."""

    def refusal(self, deployment: Deployment, layers: LayerRange) -> MeshError | None:
        """Why this node's settings do not let it hold these layers at all."""

    # What this node holds

    def serves(self) -> Collection[ServedShard]:
        """What this node serves."""

    def held(self) -> list[OwnShard]:
        """The shards that this node serves or is loading to serve."""

    def failed(self) -> Mapping[ShardId, MeshError]:
        """Those of them that its process has given up."""

    def free_mb(self) -> Mapping[str, int | None]:
        """What is free on each device now, by its name, '' of the only one, in the order in which
        they are filled; None while nobody knows."""

    def asked(self) -> Collection[ModelId]:
        """The models that this node asks, held by hand or because they are deployed."""

    def asks(self, wish: Wish) -> bool:
        """Whether this node asks what is wished; in its format, unless it is held by hand."""

    def known(self) -> Mapping[ModelId, str]:
        """The models whose files this node knows because they are deployed, asked or not, with the
        hashes of their weights."""

    # What it does

    async def ask(self, model: LocalModel) -> None:
        """Ask this model from now on."""

    async def ask_no_more(self, model_id: ModelId, *, forget: bool) -> None:
        """Ask this model no longer, and perhaps know nothing of it any more."""

    async def serve(
        self, deployment: Deployment, load: LoadAction, device: str, on_progress: OnProgress
    ) -> None:
        """Load layers on a device and serve them; returns once they are served."""

    async def unserve(self, shard: ShardId) -> int:
        """Serve it no longer; how many sessions were ended."""

    def dedicate(self, shards: Collection[ShardId]) -> None:
        """Have the weights of exactly these stay on the device, used or not."""
