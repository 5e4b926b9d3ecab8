"""What the HTTP API needs from the rest of the daemon, and the settings it runs with.

The composition root provides the implementations; the API knows nothing of how they work.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from mesh.types import GenerationRequest, StreamFrame


class Generations(Protocol):
    """Runs generations."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        """An async generator of frames, `Done` last.

        MeshError may be raised before or between frames. ``aclose()`` cancels the generation on
        every hop.
        """


class MeshView(Protocol):
    """Snapshots of the mesh as this node sees it, ready for JSON."""

    def status(self) -> dict[str, Any]:
        """The whole picture.

        ``{"node": {"id", "name", "software", "started_at", "api", "endpoint", "state_dir",
        "enabled"}, "peers": [...], "models": [...], "shards": [local shards], "generations":
        [{"id", "model", "route": [{"shard_id", "node", "layers", "p50_ms", "p95_ms"}],
        "failovers"}], "reasons": [why a value was detected], "warnings": [...]}``
        """

    def peers(self) -> list[dict[str, Any]]:
        """``{"id", "name", "address", "state", "rtt_ms", "software", "shards": [{"shard_id",
        "model_id", "layers", ...}]}`` for each peer."""

    def models(self) -> list[dict[str, Any]]:
        """``{"id", "total_layers", "runnable": bool, "missing": ["8-11"], "context": int | None,
        "nodes": [...], "local": bool}`` for each model that anybody holds."""

    def readiness(self) -> list[str]:
        """What is missing before a request can be answered, in words; empty when ready."""

    def events(self, after: int | None) -> AsyncIterator[dict[str, Any]]:
        """``{"id": int, "type": str, "at": ISO time, ...}`` as they happen, without end.

        A bounded history is replayed first: what came after event `after`, nothing for None.
        """

    def metrics(self) -> bytes:
        """Prometheus' text format."""


class HearthControl(Protocol):
    """Who is in the hearth, and changing that; every method may raise MeshError."""

    def view(self) -> dict[str, Any]:
        """``{"id", "name", "self", "is_member", "two_signatures", "members": [{"node_id",
        "short_id", "fingerprint", "name", "level", "added_by", "self"}], "pending": [{"node_id",
        "name", "action", "voters", "needed"}], "out": [{"node_id", "name", "why"}]}``"""

    async def invite(self, level: str | None, ttl_s: float | None) -> dict[str, Any]:
        """``{"code", "link", "qr", "level", "ttl_s", "host", "port"}`` of a new window."""

    async def join(self, code: str, peer: str | None) -> dict[str, Any]:
        """``{"id", "name"}`` of the hearth that this node is in now."""

    async def promote(self, who: str, level: str | None) -> dict[str, Any]:
        """``{"done", "action", "votes_missing", "member"}``; `who` is a name or an id."""

    async def demote(self, who: str, level: str | None) -> dict[str, Any]:
        """See `promote`."""

    async def revoke(self, who: str, reason: str) -> dict[str, Any]:
        """See `promote`."""


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """How the API protects itself and how long it stays silent.

    `host` is the address it is bound to; `api_key` the bearer key every request must carry, None
    for none. A stream that has nothing to say sends a comment every `ping_s` seconds.
    """

    host: str = "127.0.0.1"
    api_key: str | None = None
    ping_s: float = 10.0
    max_body_bytes: int = 4 << 20
    body_timeout_s: float = 30.0
