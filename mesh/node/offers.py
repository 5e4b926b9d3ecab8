"""Offers: the shards that this node's askers and jobs may be routed to, with their distance.

Part of the composition root, like `mesh.node.node`, which owns the parts that are asked here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from mesh.discovery.advertisement import Advertisement
from mesh.discovery.directory import ShardStore
from mesh.discovery.distance import Distances
from mesh.health.detector import Verdict
from mesh.health.peerwatch import PeerWatch
from mesh.hearth.network import Network
from mesh.identity.naming import called
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
        """The shards of this model, of nodes that may serve and are not lost. Nodes of one name are
        told apart in what is said of routes."""
        self._listen()
        infos = (view.info for view in self._store.nodes())
        shards = named_apart(self._store.shards(model_id), {i.node_id: i.name for i in infos})
        return [
            Offer(
                shard,
                verdict,
                self._distances.weight(here.host, here.endpoint),
                self._distances.rtt_ms(here.host),
            )
            for shard in shards
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


def named_apart(
    shards: Iterable[Advertisement], names: Mapping[NodeId, str]
) -> Iterator[Advertisement]:
    """The same shards, with what to call their nodes where several nodes share one of `names`."""
    known = called(names.items())
    for shard in shards:
        here = shard.descriptor
        name = known.get(here.host, here.node_name)
        same = name == here.node_name
        yield shard if same else replace(shard, descriptor=replace(here, node_name=name))
