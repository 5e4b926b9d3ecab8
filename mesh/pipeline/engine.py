"""One model's asker: its ends, its links to the hops, its generations and who watches them.

Knows nothing of the process it runs in or of who reads the frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mesh import allowances
from mesh.clock import LoopClock
from mesh.errors import MeshError
from mesh.health.sanity import Envelope, corrupt
from mesh.ledger import ResourceLedger
from mesh.pipeline import wire_dtype
from mesh.pipeline.audit import Auditor, AuditSettings, Judge
from mesh.pipeline.harvest import harvest
from mesh.pipeline.lines import Dial, Lines
from mesh.pipeline.model import AskerModel
from mesh.pipeline.opening import Patience
from mesh.pipeline.orchestrator import PipelineOrchestrator
from mesh.pipeline.order import HarvestOrder
from mesh.pipeline.oversight import Oversight
from mesh.pipeline.prompts import Prompts
from mesh.pipeline.pushed import PushedShards
from mesh.pipeline.recovery import LocalModel, RecoverySettings
from mesh.pipeline.sessions import Sessions
from mesh.pipeline.stalls import StallWatch
from mesh.routing.cover import CoverRules, home_layers, key_of
from mesh.routing.router import UNSERVED, ShardRouter
from mesh.types import (
    GenerationRequest,
    NodeId,
    ShardDescriptor,
    StreamFrame,
    WireDtype,
    shown_id,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the daemon's configuration says about asking.

    With an empty `cache_dir` nothing is learnt about the model beforehand, nor kept.
    """

    max_shards: int
    allow_self_as_first: bool
    stall_limit_s: float
    activation_dtype: str
    cache_dir: str
    fallback_to_local: bool
    fallback_after: int
    spot_check_probability: float = 0.0
    keep_first: int = 0
    keep_last: int = 0
    activation_noise: float = 0.0
    load_limit_s: float = 300.0

    def cover_rules(self, total_layers: int) -> CoverRules:
        """The limits of a route through a model of so many layers."""
        home = home_layers(total_layers, self.keep_first, self.keep_last)
        return CoverRules(self.max_shards, self.allow_self_as_first, home)


class Engine:
    """Everything one model's asker owns."""

    def __init__(
        self,
        model: AskerModel,
        own: NodeId,
        settings: EngineSettings,
        local_model: LocalModel,
        judge: Judge,
        dial: Dial,
        accounts: ResourceLedger | None = None,
    ) -> None:
        self._clock = LoopClock()
        ceiling_s = settings.stall_limit_s
        self.oversight = Oversight(self._clock, ceiling_s=ceiling_s, asker=own)
        self.shards = PushedShards(own, self.oversight.standings, self.oversight.claims)
        self.accounts = accounts or ResourceLedger(self._clock, allowances.ASKER)
        self._prompts = Prompts(model.text, self.accounts)
        self._model = model
        self._settings = settings
        self._local_model = local_model if settings.fallback_to_local else None
        self._router = ShardRouter(self.shards, settings.cover_rules(model.total_layers))
        lines = self._lines = Lines(dial)
        patience = Patience(load_s=settings.load_limit_s)
        self.sessions = Sessions(lines, self._router, self._clock, patience, self.oversight)
        self.oversight.expel = self._expel
        self.auditor = self.oversight.auditor = Auditor(
            lines,
            self.shards,
            self.oversight.standings,
            self.oversight.found,
            judge,
            AuditSettings(settings.spot_check_probability, own_host=own, routed=model.routed),
            random.Random(),  # noqa: S311 - a host that could predict it would need our memory
        )
        self._orchestrator: PipelineOrchestrator | None = None
        self._probing = asyncio.Lock()

    async def chat(self, request: GenerationRequest) -> AsyncGenerator[StreamFrame, None]:
        """See `PipelineOrchestrator.chat`; the first request finds out the wire dtype and what
        activations of this model look like."""
        started = time.monotonic()
        ids = await self._prompts.ids(request, self._model.max_positions)
        request = replace(request, prompt=None, messages=None, prompt_ids=tuple(ids))
        orchestrator = await self._ready_orchestrator()
        async with contextlib.aclosing(orchestrator.chat(request, started)) as frames:
            async for frame in frames:
                yield frame
        await self._keep_envelope()

    async def harvest(self, order: HarvestOrder) -> dict[str, Any]:
        """See `mesh.pipeline.harvest.harvest`."""
        return await harvest(self._model, self.sessions, self._prompts, order)

    async def watch_stalls(self) -> None:
        """Fail every hop that makes no progress; runs for ever."""
        ceiling_s = self._settings.stall_limit_s
        await StallWatch(self.sessions, self._router, self.oversight, ceiling_s=ceiling_s).run()

    def trust_only(self, hosts: frozenset[NodeId]) -> None:
        """Cut the links to all other nodes; what ran on them moves elsewhere."""
        self._lines.keep_only(hosts)

    async def close(self) -> None:
        """Free every session, those of spot checks too."""
        self._prompts.close()
        await self.auditor.close()
        await self.sessions.close()

    def generations(self) -> list[dict[str, Any]]:
        """Live generations with their current routes, as `/mesh/v1/status` shows them."""
        return [
            {
                # Everybody may see it; by the request's own id a caller resumes the stream.
                "id": shown_id(session.request_id),
                "model": self._model.model_id,
                "route": [
                    {
                        "shard_id": timing.shard_id,
                        "node": timing.node,
                        "host": station.hop.shard.host,
                        "layers": timing.layers,
                        "p50_ms": round(timing.p50_ms, 3),
                        "p95_ms": round(timing.p95_ms, 3),
                    }
                    for station in session.chain.stations
                    for timing in (station.timing(),)
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

    # Private

    @property
    def _cached(self) -> tuple[Path, str]:
        return Path(self._settings.cache_dir), self._model.weights_sha256

    def _expel(self, liar: ShardDescriptor) -> None:
        """Have every generation leave a shard that was caught in a wrong answer."""
        self.oversight.envelope.forget()
        error = corrupt(liar.node_name, "values that other hosts contradict")
        for session in self.sessions.live.values():
            session.chain.distrust(key_of(liar), error)

    async def _ready_orchestrator(self) -> PipelineOrchestrator:
        async with self._probing:
            if self._orchestrator is None:
                if self._settings.cache_dir:
                    self.oversight.envelope = await asyncio.to_thread(Envelope.read, *self._cached)
                try:
                    verdict = await self._wire_verdict()
                except UNSERVED:
                    if self._local_model is None:
                        raise
                    # What may travel is found out once somebody serves the model; home takes all.
                    return self._orchestrate(WireDtype.FP32)
                logger.info("model=%s wire=%s %s", self._model.model_id, *_words(verdict))
                self._orchestrator = self._orchestrate(verdict.dtype)
            if self._settings.cache_dir and not self.oversight.envelope.is_known:
                await self._record_envelope(self._orchestrator.wire_dtype)
            await self._keep_envelope()
            return self._orchestrator

    def _orchestrate(self, dtype: WireDtype) -> PipelineOrchestrator:
        return PipelineOrchestrator(
            self._model,
            self.sessions,
            self._router,
            wire_dtype=dtype,
            recovery=RecoverySettings(fallback_after=self._settings.fallback_after),
            local_model=self._local_model,
            noise=self._settings.activation_noise,
        )

    async def _keep_envelope(self) -> None:
        if self._settings.cache_dir and self.oversight.envelope.is_dirty:
            await asyncio.to_thread(self.oversight.envelope.write, *self._cached)

    async def _record_envelope(self, dtype: WireDtype) -> None:
        """Only NaN and Inf are noticed until this has succeeded; tried again at each request."""
        try:
            with self.oversight.envelope.recording():
                await wire_dtype.exercise(self._model, self.sessions, self._router, dtype)
        except MeshError as error:
            logger.warning("no bounds recorded for model=%s: %s", self._model.model_id, error)

    async def _wire_verdict(self) -> wire_dtype.WireVerdict:
        wanted = WireDtype(self._settings.activation_dtype)
        if wanted is not WireDtype.FP16:
            return wire_dtype.WireVerdict(wanted, "configured")
        known = await asyncio.to_thread(wire_dtype.read_verdict, *self._cached)
        if known is not None:
            return known
        with self.oversight.envelope.recording():
            verdict = await wire_dtype.probe(self._model, self.sessions, self._router)
        await asyncio.to_thread(wire_dtype.write_verdict, *self._cached, verdict)
        return verdict


def _words(verdict: wire_dtype.WireVerdict) -> tuple[str, str]:
    return verdict.dtype.value, verdict.reason
