"""The shards the daemon last told of, as the router's store. Knows no sessions and no sockets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mesh.pipeline.claims import Claims
from mesh.pipeline.commands import Offer
from mesh.pipeline.watch.reputation import Reputations
from mesh.routing.cover import Candidate, key_of
from mesh.types import ModelId, NodeId


class KnownShards:
    """The shards the daemon last told of; the router's store."""

    def __init__(self, node_id: NodeId, reputations: Reputations, claims: Claims) -> None:
        self._node_id = node_id
        self._reputations = reputations
        self._claims = claims
        self._shards: tuple[Offer, ...] = ()

    def replace(self, shards: Sequence[Offer]) -> None:
        """Take the daemon's newest list."""
        self._shards = tuple(shards)
        words = (offer.shard for offer in shards)
        self._claims.heard({key_of(word.descriptor): word.health.last_seen for word in words})

    def candidates(self, model_id: ModelId) -> list[Candidate]:
        """Every shard of the model that the daemon named, but for known liars."""
        return [
            self._candidate(offer)
            for offer in self._shards
            if offer.shard.descriptor.model_id == model_id
            and not self._reputations.is_liar(key_of(offer.shard.descriptor))
        ]

    def _candidate(self, offer: Offer) -> Candidate:
        # What a node says of its streams is seconds old, so a full one is only put last: whether
        # it has room is decided by its answer to `Open`.
        shard, health = offer.shard.descriptor, offer.shard.health
        key = key_of(shard)
        active = max(health.active_streams, self._claims.sessions(key))
        full = active >= shard.max_concurrent_streams
        said = offer.candidate(self._node_id)
        others = said.queue_depth - self._claims.within(key, said.queue_depth)
        return replace(
            said,
            queue_depth=others + self._claims.depth(key),
            penalty=said.penalty + full + self._reputations.penalty(key),
            lot=self._claims.lot(key),
        )
