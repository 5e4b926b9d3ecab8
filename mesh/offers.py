"""What of the mesh this node's own askers and jobs may be routed to, and how far away that is.

Part of the composition root, like `mesh.node`, which owns the parts that are asked here.
"""

from __future__ import annotations

from typing import Any

from mesh.discovery.advertisement import Advertisement, encode
from mesh.discovery.directory import ShardStore
from mesh.discovery.distance import Distances
from mesh.health.detector import Verdict
from mesh.health.peerwatch import PeerWatch
from mesh.hearth.network import Network
from mesh.types import ModelId


class Offers:
    """The shards that others offer, and this node beside them."""

    def __init__(
        self, network: Network, store: ShardStore, watch: PeerWatch, distances: Distances
    ) -> None:
        self._network = network
        self._store = store
        self._watch = watch
        self._distances = distances

    def of(self, model_id: ModelId) -> list[dict[str, Any]]:
        """Encoded by `mesh.discovery.advertisement`, of nodes that may serve and are not lost.

        Beside a shard stand the ``verdict`` on its node and the ``hop_weight`` of the way there.
        """
        for peer in self._network.peers():
            if peer.node_id is not None:
                self._distances.measured(peer.node_id, peer.rtt_ms)
        return [
            self._offer(shard, verdict)
            for shard in self._store.shards(model_id)
            if self._network.may_serve(shard.descriptor.host)
            and (verdict := self._watch.verdict(shard.descriptor.host)) is not Verdict.LOST
        ]

    def _offer(self, shard: Advertisement, verdict: Verdict) -> dict[str, Any]:
        here = shard.descriptor
        weight = self._distances.weight(here.host, here.endpoint)
        return {**encode(shard), "verdict": verdict.value, "hop_weight": weight}
