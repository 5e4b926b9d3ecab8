"""What `mesh.deployments.actor` asks of the node that it acts for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from mesh.deployments.reconcile import OwnShard, ServedShard
from mesh.deployments.weights import OnProgress
from mesh.deployments.wishes import Deployment, Wish
from mesh.errors import MeshError
from mesh.models.local import LocalModel
from mesh.types import LayerRange, ModelId, NodeId, ShardId


class World(Protocol):
    """What a node is, for the loop."""

    @property
    def node(self) -> NodeId:
        """This node."""

    def deployments(self) -> dict[str, Deployment]:
        """What the log says."""

    def held(self) -> list[OwnShard]:
        """The shards that this node serves or is loading to serve."""

    def failed(self) -> Mapping[ShardId, MeshError]:
        """Those of them that its process has given up."""

    def served(self) -> list[ServedShard]:
        """What others serve."""

    def free_mb(self) -> int | None:
        """What is free on the device now; None while nobody knows."""

    @property
    def own_quant(self) -> str:
        """The number format of this node's own settings."""

    def need_mb(self, deployment: Deployment, layers: LayerRange) -> int:
        """What these layers would take."""

    def refusal(self, deployment: Deployment, layers: LayerRange) -> MeshError | None:
        """Why this node's settings do not let it hold these layers at all."""

    def asked(self) -> Collection[ModelId]:
        """The models that this node asks, held by hand or because they are deployed."""

    def asks(self, wish: Wish) -> bool:
        """Whether this node asks what is wished; in its format, unless it is held by hand."""

    async def ask(self, model: LocalModel) -> None:
        """Ask this model from now on."""

    def known(self) -> Mapping[ModelId, str]:
        """The models whose files this node knows because they are deployed, asked or not, with the
        hashes of their weights."""

    async def ask_no_more(self, model_id: ModelId, *, forget: bool) -> None:
        """Ask this model no longer, and perhaps know nothing of it any more."""

    async def serve(
        self, deployment: Deployment, layers: LayerRange, on_progress: OnProgress
    ) -> None:
        """Load these layers and serve them; returns once they are served."""

    async def unserve(self, shard: ShardId) -> int:
        """Serve it no longer; how many sessions were ended."""

    def dedicate(self, shards: Collection[ShardId]) -> None:
        """Have the weights of exactly these stay on the device, used or not."""
