"""A shard of this node, as its daemon knows it. Imports no torch."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from mesh import codec
from mesh.errors import MeshError
from mesh.shard.commands import Loaded, ShardReport, ShardRequest
from mesh.types import ShardDescriptor, ShardHealth


@dataclass(slots=True)
class LocalShard:
    """A shard of this node: what is advertised of it and what loading it took."""

    loaded: Loaded
    report: ShardReport | None = None
    rss_mb: float = 0.0

    @property
    def descriptor(self) -> ShardDescriptor:
        """What is advertised of it."""
        return self.loaded.descriptor

    @property
    def health(self) -> ShardHealth:
        """As it was said last."""
        if self.report is not None:
            return self.report.health
        return ShardHealth(True, self.descriptor.advertised_at, 0.0, 0.0, 0, 0)

    @property
    def facts(self) -> dict[str, Any]:
        """What loading it took and how it does, as the status shows it."""
        facts = {
            "bytes_read": self.loaded.bytes_read,
            "load_ms": self.loaded.load_ms,
            "reasons": list(self.loaded.reasons),
        }
        if self.report is not None:
            health, load = codec.plain(self.report.health), codec.plain(self.report.load)
            del health["last_seen"]
            facts |= {"shard_id": self.report.shard_id, **health, "rss_mb": self.rss_mb, **load}
        return facts


@dataclass(slots=True)
class KnownShard:
    """One shard: how it was asked for last, what came of that, and how it was last to be served,
    also where it is no more."""

    asked: ShardRequest | None = None
    ordered: ShardRequest | None = None
    here: LocalShard | None = None
    error: MeshError | None = None
    loading: asyncio.Future[LocalShard] | None = None
    leaving: asyncio.Future[int] | None = None
