"""One model's asker: its ends, its links to the hops, its generations and who watches them.

Knows nothing of the process it runs in or of who reads the frames.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mesh.accounts import allowances
from mesh.accounts.ledger import ResourceLedger
from mesh.clock import LoopClock
from mesh.errors import ContextTooLong, MeshError
from mesh.health.series import HopSteps
from mesh.pipeline import wire_dtype
from mesh.pipeline.commands import EngineSettings, HarvestOrder, LiveGeneration, LiveHop, Offer
from mesh.pipeline.failover import FailoverSettings, LocalModel
from mesh.pipeline.generation import Asked, LoopSettings, PipelineOrchestrator
from mesh.pipeline.harvest import harvest
from mesh.pipeline.hop import Patience
from mesh.pipeline.known_shards import KnownShards
from mesh.pipeline.lens import LensSettings, LogitLens
from mesh.pipeline.links import Dial, HopLinks
from mesh.pipeline.model import AskerModel
from mesh.pipeline.prompts import Prompts
from mesh.pipeline.refusal import RouteRefused
from mesh.pipeline.room_line import RoomLine
from mesh.pipeline.sessions import Sessions
from mesh.pipeline.text_embedding import require_embeds, shortened
from mesh.pipeline.truncation import Prompt
from mesh.pipeline.watch.oversight import Oversight
from mesh.pipeline.watch.sanity import Envelope, corrupt
from mesh.pipeline.watch.spot_checks import Judge, SpotChecks, SpotCheckSettings
from mesh.pipeline.watch.stalls import StallWatch
from mesh.routing.cover import key_of, positions_held
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
        self._clock, ceiling_s = LoopClock(), settings.stall_limit_s
        self.oversight = Oversight(self._clock, ceiling_s=ceiling_s, asker=own)
        self.shards = KnownShards(own, self.oversight.reputations, self.oversight.claims)
        self.accounts = accounts or ResourceLedger(self._clock, allowances.ASKER)
        self._prompts = Prompts(model.text, self.accounts)
        self.model = model
        self._settings = settings
        self._local_model = local_model if settings.fallback_to_local else None
        rules = settings.routes.cover_rules(model, remote_ends=model.ends is None)
        self._router = ShardRouter(self.shards, rules)
        links = self._links = HopLinks(dial)
        patience = Patience(load_s=settings.load_limit_s)
        self.sessions = Sessions(
            links, self._router, self._clock, patience, self.oversight,
            line=RoomLine(settings.queue_limit_s, settings.queue_places),
            keeps_states=model.keeps_states,
        )  # fmt: skip
        self.oversight.expel = self._expel
        self.spot_checks = self.oversight.spot_checks = SpotChecks(
            links,
            self.shards,
            self.oversight.reputations,
            self.oversight.found,
            judge,
            SpotCheckSettings(settings.spot_check_probability, own_host=own, routed=model.routed),
            random.Random(),  # noqa: S311 - a host that could predict it would need our memory
        )
        self._orchestrator = PipelineOrchestrator(
            model,
            self.sessions,
            self._router,
            self._prepared,
            failover=FailoverSettings(fallback_after=settings.fallback_after),
            local_model=self._local_model,
            settings=LoopSettings(settings.activation_noise, settings.draft_tokens),
        )
        lens = LensSettings(ceiling_s, settings.activation_noise)
        self._lens = LogitLens(model, links, self._router, self.oversight, patience, lens)
        self._wire_dtype: WireDtype | None = None  # until it is found out
        self._probing = asyncio.Lock()

    def chat(self, request: GenerationRequest) -> AsyncGenerator[StreamFrame, None]:
        """See `PipelineOrchestrator.chat`; the first request finds out the wire dtype and what
        activations of this model look like."""
        return self._orchestrator.chat(request)

    async def harvest(self, order: HarvestOrder) -> dict[str, Any]:
        """One batch's token ids and files. Raises as `mesh.pipeline.harvest.harvest`."""
        return await harvest(self.model, self.sessions, self._prompts, order)

    async def count(self, request: GenerationRequest) -> int:
        """How many tokens the request's prompt has. Raises as `Prompts.ids`."""
        return len(await self._prompts.ids(request, None))

    async def lens(self, request: GenerationRequest, top: int) -> dict[str, Any]:
        """The `top` next tokens after each layer. Raises as `mesh.pipeline.lens.LogitLens.read`."""
        ids = await self._prompts.ids(request, self.model.max_positions)
        return await self._lens.read(request, ids, top)

    async def watch_stalls(self) -> None:
        """Fail every hop that makes no progress; runs for ever."""
        ceiling_s = self._settings.stall_limit_s
        await StallWatch(self.sessions, self._router, self.oversight, ceiling_s=ceiling_s).run()

    def serve_from(self, shards: Sequence[Offer]) -> None:
        """Use these shards from now on, where they are."""
        self.shards.replace(shards)
        told = [offer.shard.descriptor for offer in shards]
        self._links.are_at({(each.host, each.endpoint) for each in told})

    def trust_only(self, hosts: frozenset[NodeId]) -> None:
        """Cut the links to all other nodes; what ran on them moves elsewhere."""
        self._links.keep_only(hosts)

    async def close(self) -> None:
        """Free every session, those of spot checks too."""
        self._prompts.close()
        if self.model.draft is not None:
            self.model.draft.close()
        await self.spot_checks.close()
        await self.sessions.close()

    def generations(self) -> tuple[LiveGeneration, ...]:
        """Live generations with their current routes, and those that wait for room."""
        waiting = tuple(
            LiveGeneration(shown_id(request_id), self.model.model_id, (), 0, queued=position)
            for request_id, position in self.sessions.line.positions().items()
        )
        return waiting + tuple(
            LiveGeneration(
                # Everybody may see it; by the request's own id a caller resumes the stream.
                shown_id(session.request_id),
                self.model.model_id,
                tuple(
                    LiveHop(
                        timing.shard_id,
                        timing.node,
                        hop.hop.shard.host,
                        hop.hop.layers,
                        round(timing.p50_ms, 3),
                        round(timing.p95_ms, 3),
                        round(timing.compute_p50_ms, 3),
                    )
                    for hop in session.route.hops
                    for timing in (hop.times.of(hop.hop),)
                ),
                session.failovers,
            )
            for session in self.sessions.live.values()
            if session.request_id
        )

    def take_steps(self) -> list[HopSteps]:
        """The times of all hops' steps since the last call."""
        taken = []
        for session in self.sessions.known():
            for hop in session.route.hops:
                if steps := hop.times.take():
                    shard = hop.hop.shard
                    taken.append(HopSteps(shard.shard_id, shard.node_name, steps))
        return taken

    # Private

    @property
    def _cached(self) -> tuple[Path, str]:
        return Path(self._settings.cache_dir), self.model.weights_sha256

    def _expel(self, liar: ShardDescriptor) -> None:
        """Have every generation leave a shard that was caught in a wrong answer."""
        self.oversight.envelope.forget()
        error = corrupt(liar.node_name, "values that other hosts contradict")
        for session in self.sessions.live.values():
            session.route.distrust(key_of(liar), error)

    @asynccontextmanager
    async def _prepared(self, request: GenerationRequest) -> AsyncIterator[Asked]:
        """The request in token ids; what activations look like is known before, and kept behind."""
        ids, left_out = await self._read(request)
        constraint = await self._prompts.constraint(request)
        async with self._probing:
            wire_dtype = await self._probed()
        yield Asked(ids, constraint, wire_dtype, left_out)
        await self._keep_envelope()

    async def _read(self, request: GenerationRequest) -> Prompt:
        model = self.model
        if request.embeds:
            require_embeds(model)
        if not request.truncates:
            return Prompt(await self._prompts.ids(request, model.max_positions))
        shards = [each.descriptor for each in self.shards.candidates(model.model_id)]
        held = positions_held(shards, model.total_layers)
        most = model.max_positions if held is None else min(held, model.max_positions)
        if request.messages is None:
            return Prompt(shortened(await self._prompts.ids(request, None), most, model.text))
        return await self._prompts.truncated(request, most)

    async def _probed(self) -> WireDtype:
        oversight, wire = self.oversight, self._wire_dtype
        if wire is None:
            if self._settings.cache_dir:
                oversight.envelope = await asyncio.to_thread(Envelope.read, *self._cached)
            try:
                verdict = await self._wire_verdict()
            except ContextTooLong:  # for these prompts, by those who are there now
                return WireDtype.FP32
            except UNSERVED as nobody:
                is_full = isinstance(nobody, RouteRefused) and nobody.all_full
                if self._local_model is None and not is_full:
                    raise
                # What may travel is found out once somebody serves the model, with room; home
                # takes all.
                return WireDtype.FP32
            logger.info("model=%s wire=%s %s", self.model.model_id, *_words(verdict))
            self._wire_dtype = wire = verdict.dtype
        if self._settings.cache_dir and not oversight.envelope.is_known:
            await self._record_envelope(wire)
        await self._keep_envelope()
        return wire

    async def _keep_envelope(self) -> None:
        if self._settings.cache_dir and self.oversight.envelope.is_dirty:
            await asyncio.to_thread(self.oversight.envelope.write, *self._cached)

    async def _record_envelope(self, dtype: WireDtype) -> None:
        """Only NaN and Inf are noticed until this has succeeded; tried again at each request."""
        try:
            with self.oversight.envelope.recording():
                await wire_dtype.exercise(self.model, self.sessions, self._router, dtype)
        except MeshError as error:
            logger.warning("no bounds recorded for model=%s: %s", self.model.model_id, error)

    async def _wire_verdict(self) -> wire_dtype.WireVerdict:
        wanted = WireDtype(self._settings.activation_dtype)
        if wanted is not WireDtype.FP16:
            return wire_dtype.WireVerdict(wanted, "configured")
        known = await asyncio.to_thread(wire_dtype.read_verdict, *self._cached)
        if known is not None:
            return known
        with self.oversight.envelope.recording():
            verdict = await wire_dtype.probe(self.model, self.sessions, self._router)
        await asyncio.to_thread(wire_dtype.write_verdict, *self._cached, verdict)
        return verdict


def _words(verdict: wire_dtype.WireVerdict) -> tuple[str, str]:
    return verdict.dtype.value, verdict.reason
