"""Offers: the shards that this node's askers and jobs may be routed to, with their distance.

Part of the composition root, like `mesh.node.node`, which owns the parts that are asked here.
"""

from __future__ import annotations

from mesh.discovery.directory import ShardStore
from mesh.discovery.distance import Distances
from mesh.health.detector import Verdict
from mesh.health.peerwatch import PeerWatch
from mesh.hearth.network import Network
from mesh.pipeline.commands import Offer
from mesh.types import ModelId, NodeId


class Offers:
    """The shards that others offer, and this node beside them."""

    def __init__(
        self, network: Network, store: ShardStore, watch: PeerWatch, distances: Distances
    ) -> None:
        self._network = network
        self._store = store
        self._watch = watch
        self._distances = distances

    def of(self, model_id: ModelId) -> list[Offer]:
        """The shards of this model, of nodes that may serve and are not lost."""
        self._listen()
        return [
            Offer(
                shard,
                verdict,
                self._distances.weight(here.host, here.endpoint),
                self._distances.rtt_ms(here.host),
            )
            for shard in self._store.shards(model_id)
            for here in (shard.descriptor,)
            if self._network.may_serve(here.host)
            and (verdict := self._watch.verdict(here.host)) is not Verdict.LOST
        ]

    def rtt_ms(self, node: NodeId) -> float | None:
        """The way to a node and back, as last measured at its best; None where it was not."""
        self._listen()
        return self._distances.rtt_ms(node)

    def _listen(self) -> None:
        for peer in self._network.peers():
            if peer.node_id is not None:
                self._distances.measured(peer.node_id, peer.rtt_ms)
