"""The shards the daemon last told of, as the router's store. Knows no sessions and no sockets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mesh.discovery.advertisement import Advertisement, decode
from mesh.health.detector import Verdict
from mesh.health.standing import Standings
from mesh.pipeline.claims import Claims
from mesh.routing.cover import LAN_HOP_WEIGHT, Candidate, ShardKey, key_of
from mesh.types import ModelId, NodeId


class PushedShards:
    """The shards the daemon last told of; the router's store."""

    def __init__(self, node_id: str, standings: Standings, claims: Claims) -> None:
        self._node_id = node_id
        self._standings = standings
        self._claims = claims
        self._shards: list[Advertisement] = []
        self._suspects: set[ShardKey] = set()
        self._weights: dict[ShardKey, float] = {}

    def replace(self, shards: Sequence[dict[str, Any]]) -> None:
        """Take the daemon's newest list; beside a shard stand the ``verdict`` on its node and the
        ``hop_weight`` of the way there."""
        self._shards = [decode(fields, host=NodeId(fields["host"])) for fields in shards]
        self._suspects = {
            (fields["host"], fields["shard_id"])
            for fields in shards
            if fields.get("verdict") == Verdict.SUSPECT
        }
        self._weights = {
            (fields["host"], fields["shard_id"]): float(fields.get("hop_weight", LAN_HOP_WEIGHT))
            for fields in shards
        }

    def candidates(self, model_id: ModelId) -> list[Candidate]:
        """See `mesh.routing.router.ShardStore`."""
        return [
            self._candidate(shard)
            for shard in self._shards
            if shard.descriptor.model_id == model_id
            and not self._standings.is_liar(key_of(shard.descriptor))
        ]

    def _candidate(self, shard: Advertisement) -> Candidate:
        # What a node says of its streams is seconds old, so a full one is only put last: whether
        # it has room is decided by its answer to `Open`.
        key = key_of(shard.descriptor)
        active = max(shard.health.active_streams, self._claims.sessions(key))
        full = active >= shard.descriptor.max_concurrent_streams
        suspect = key in self._suspects
        return Candidate(
            shard.descriptor,
            queue_depth=shard.health.queue_depth + self._claims.depth(key),
            streams_left=1,
            hop_weight=self._weights.get(key, LAN_HOP_WEIGHT),
            is_self=shard.descriptor.host == self._node_id,
            penalty=full + 2 * suspect + self._standings.penalty(key),
            lot=self._claims.lot(key),
        )
