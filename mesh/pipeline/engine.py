"""One model's asker: its ends, its links to the hops, its generations and who watches them.

Knows nothing of the process it runs in or of who reads the frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.clock import SystemClock
from mesh.discovery.advertisement import Advertisement, decode
from mesh.errors import PipelineStalled
from mesh.pipeline import wire_dtype
from mesh.pipeline.lines import Lines
from mesh.pipeline.model import AskerModel
from mesh.pipeline.orchestrator import PipelineOrchestrator
from mesh.pipeline.sessions import Sessions, SessionSettings
from mesh.routing.cover import Candidate, CoverRules
from mesh.routing.router import ShardRouter
from mesh.types import GenerationRequest, ModelId, NodeId, StreamFrame, WireDtype
from mesh.wire.link import Link, LinkHandler
from mesh.wire.messages import Hello
from mesh.wire.websocket import connect

logger = logging.getLogger(__name__)

STALL_TICK_S = 0.25
CONNECT_TIMEOUT_S = 5.0


class PushedShards:
    """The shards the daemon last told of; the router's store."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._shards: list[Advertisement] = []

    def replace(self, shards: Sequence[dict[str, Any]]) -> None:
        """Take the daemon's newest list."""
        self._shards = [decode(fields, host=NodeId(fields["host"])) for fields in shards]

    def candidates(self, model_id: ModelId) -> list[Candidate]:
        """See `mesh.routing.router.ShardStore`."""
        return [
            self._candidate(shard)
            for shard in self._shards
            if shard.descriptor.model_id == model_id
        ]

    def _candidate(self, shard: Advertisement) -> Candidate:
        # What a node says of its streams is seconds old, so a full one is only put last: whether
        # it has room is decided by its answer to `Open`.
        full = shard.health.active_streams >= shard.descriptor.max_concurrent_streams
        return Candidate(
            shard.descriptor,
            queue_depth=shard.health.queue_depth,
            streams_left=1,
            is_self=shard.descriptor.host == self._node_id,
            penalty=1 if full else 0,
        )


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the daemon's configuration says about asking."""

    max_shards: int
    allow_self_as_first: bool
    stall_limit_s: float
    activation_dtype: str
    cache_dir: str


class Engine:
    """Everything one model's asker owns."""

    def __init__(self, model: AskerModel, hello: Hello, settings: EngineSettings) -> None:
        self.shards = PushedShards(hello.node_id)
        self._model = model
        self._settings = settings
        self._router = ShardRouter(
            self.shards, CoverRules(settings.max_shards, settings.allow_self_as_first)
        )

        async def dial(host: str, port: int, handler: LinkHandler) -> Link:
            return await connect(
                host, port, hello=hello, handler=handler, timeout_s=CONNECT_TIMEOUT_S
            )

        self.sessions = Sessions(Lines(dial), self._router, SystemClock(), SessionSettings())
        self._orchestrator: PipelineOrchestrator | None = None
        self._probing = asyncio.Lock()

    async def chat(self, request: GenerationRequest) -> AsyncGenerator[StreamFrame, None]:
        """See `PipelineOrchestrator.chat`; the first request finds out the wire dtype."""
        orchestrator = await self._ready_orchestrator()
        async with contextlib.aclosing(orchestrator.chat(request)) as frames:
            async for frame in frames:
                yield frame

    async def watch_stalls(self) -> None:
        """Fail every hop that owes an answer for longer than the limit; runs for ever."""
        while True:
            await asyncio.sleep(STALL_TICK_S)
            limit, now = self._settings.stall_limit_s, asyncio.get_running_loop().time()
            for session in list(self.sessions.live.values()):
                for station in list(session.chain.stalled(limit, now)):
                    shard = station.hop.shard
                    station.fail(
                        PipelineStalled(
                            f"{shard.node_name} gave no answer for {limit:g} s.",
                            fix="Another shard is tried; see `hearthnet status`.",
                        )
                    )

    def generations(self) -> list[dict[str, Any]]:
        """Live generations with their current routes, as `/mesh/v1/status` shows them."""
        return [
            {
                "id": session.request_id,
                "model": self._model.model_id,
                "route": [
                    {
                        "shard_id": timing.shard_id,
                        "node": timing.node,
                        "layers": timing.layers,
                        "p50_ms": round(timing.p50_ms, 3),
                        "p95_ms": round(timing.p95_ms, 3),
                    }
                    for timing in (station.timing() for station in session.chain.stations)
                ],
                "failovers": session.failovers,
            }
            for session in self.sessions.live.values()
            if session.request_id
        ]

    def take_latencies(self) -> dict[str, list[float]]:
        """Milliseconds of each shard's steps since the last call."""
        taken: dict[str, list[float]] = {}
        for session in self.sessions.known():
            for station in session.chain.stations:
                latencies = station.take_latencies()
                if latencies:
                    taken.setdefault(station.hop.shard.shard_id, []).extend(latencies)
        return taken

    async def _ready_orchestrator(self) -> PipelineOrchestrator:
        async with self._probing:
            if self._orchestrator is None:
                verdict = await self._wire_verdict()
                logger.info("model=%s wire=%s %s", self._model.model_id, *_words(verdict))
                self._orchestrator = PipelineOrchestrator(
                    self._model, self.sessions, self._router, wire_dtype=verdict.dtype
                )
            return self._orchestrator

    async def _wire_verdict(self) -> wire_dtype.WireVerdict:
        if self._settings.activation_dtype == WireDtype.FP32:
            return wire_dtype.WireVerdict(WireDtype.FP32, "configured")
        cache, sha = Path(self._settings.cache_dir), self._model.weights_sha256
        known = await asyncio.to_thread(wire_dtype.read_verdict, cache, sha)
        if known is not None:
            return known
        verdict = await wire_dtype.probe(self._model, self.sessions, self._router)
        await asyncio.to_thread(wire_dtype.write_verdict, cache, sha, verdict)
        return verdict


def _words(verdict: wire_dtype.WireVerdict) -> tuple[str, str]:
    return verdict.dtype.value, verdict.reason
