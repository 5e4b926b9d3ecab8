"""One generation from prompt to last token.

The asker drives: it embeds, sends the hidden states through the hops, samples from what comes back
and embeds again. This module knows nothing of sockets, HTTP or processes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from mesh.errors import BadRequest, CacheFull, ContextTooLong, MeshError
from mesh.pipeline.answer import Answer
from mesh.pipeline.chain import HopLost
from mesh.pipeline.model import AskerModel
from mesh.pipeline.passage import Passage
from mesh.pipeline.recovery import LocalModel, Recovery, RecoverySettings
from mesh.pipeline.sampler import Sampler
from mesh.pipeline.sessions import GenerationSession, Sessions
from mesh.pipeline.terms import FIRST_ANSWER, SessionTerms
from mesh.routing.router import UNSERVED, ShardRouter
from mesh.types import Done, GenerationRequest, PipelineAborted, StreamFrame, WireDtype

logger = logging.getLogger(__name__)


class PipelineOrchestrator:
    """Runs requests for one model over the shards a router finds."""

    def __init__(
        self,
        model: AskerModel,
        sessions: Sessions,
        router: ShardRouter,
        *,
        wire_dtype: WireDtype,
        recovery: RecoverySettings = RecoverySettings(),  # noqa: B008 - frozen
        local_model: LocalModel | None = None,
        noise: float = 0.0,
    ) -> None:
        self._model = model
        self._sessions = sessions
        self._router = router
        self._recovery = recovery
        self._local_model = local_model
        self._noise = noise
        self.wire_dtype = wire_dtype

    async def chat(
        self, request: GenerationRequest, started: float | None = None
    ) -> AsyncGenerator[StreamFrame, None]:
        """Token by token to the end; `Done` is last. Closing the iterator frees every hop.

        `started` is the monotonic second at which the request came; None for now. A text is
        tokenised on the event loop: whoever has others to serve does that before.

        Raises:
            BadRequest, ContextTooLong: the request cannot be served by this model.
            BadSteering: an edit cannot be applied, or makes activations infinite.
            NoRoute, WeightsMismatch: no set of shards serves it, nor does the local model.
            CacheFull: nobody has room for the prompt. An answer that nobody has room for any more
                ends there, with a `note` that says so.
        """
        started = time.monotonic() if started is None else started
        prompt = self._model.text.prompt_ids(request, self._model.max_positions)
        limit = self._token_limit(prompt, request.sampling.max_tokens)
        terms = self._terms(request, len(prompt), limit)
        home = self._local_model if request.fallback_to_local is not False else None
        session, notices = await self._begin(prompt, terms, home)
        constructed = time.monotonic()
        session.request_id = request.request_id
        cached = len(session.token_ids)
        finished = False
        try:
            for notice in notices:
                yield notice
            recovery = Recovery(
                session, self._router, self._model.hidden_size, self._recovery, home
            )
            passage = Passage(self._model, session, recovery, noise=self._noise)
            answer = Answer(self._model.text, request.sampling, limit, started, len(prompt))
            sampler = Sampler(request.sampling, prompt)
            ids: Sequence[int] = prompt[cached:]
            while not answer.finish_reason:
                try:
                    async for notice in passage.advance(ids):
                        yield notice
                except CacheFull as full:
                    yield answer.end_early(full)
                    break
                token = sampler.choose(passage.logits)
                yield answer.take(token, passage.logits)
                ids = (token,)
            finished = not answer.note
        finally:
            self._sessions.release(session, keep=finished)
        done = self._done(prompt, cached, passage, answer)
        yield replace(done, construct_ms=(constructed - started) * 1e3)

    async def _begin(
        self, prompt: Sequence[int], terms: SessionTerms, home: LocalModel | None
    ) -> tuple[GenerationSession, list[StreamFrame]]:
        """A session to generate in, at home where the mesh cannot; what to say about that."""
        total_layers = self._model.total_layers
        at_home = home is not None
        try:
            return await self._sessions.acquire(prompt, terms, total_layers, at_home=at_home), []
        except UNSERVED as nobody:
            if home is None:
                raise
            try:
                session = await self._sessions.open_at_home(await home(), terms, total_layers)
            except (MeshError, HopLost) as unable:
                logger.info("model=%s not run at home: %s", terms.model_id, unable)
                raise nobody from None
            reason = f"{nobody.message} The answer comes from the local model."
            return session, [PipelineAborted(reason)]

    def _terms(self, request: GenerationRequest, fed: int, limit: int) -> SessionTerms:
        """What hops are asked for a prompt of `fed` tokens and at most `limit` new ones."""
        return SessionTerms(
            self._model.model_id,
            self._model.weights_sha256,
            fed + min(limit, FIRST_ANSWER),
            request.wire_dtype or self.wire_dtype,
            request.edits,
            limit=fed + limit,
            principal=request.principal,
        )

    def _token_limit(self, prompt: Sequence[int], wanted: int | None) -> int:
        """How many new tokens this request may get, as many as the model can hold when it does not
        say; refuses rather than cuts."""
        room = self._model.max_positions - len(prompt)
        if not prompt:
            raise BadRequest("the prompt is empty.", fix="Send at least one token.", param="prompt")
        if room < 1 or (wanted is not None and wanted > room):
            raise ContextTooLong(
                f"the prompt has {len(prompt)} tokens and {wanted or 1} more are wanted; "
                f"{self._model.model_id} can hold {self._model.max_positions}.",
                fix="Shorten the prompt or lower max_tokens.",
                param="max_tokens" if room >= 1 else "prompt",
            )
        return room if wanted is None else wanted

    @staticmethod
    def _done(prompt: Sequence[int], cached: int, passage: Passage, answer: Answer) -> Done:
        return Done(
            finish_reason=answer.finish_reason,
            prompt_tokens=len(prompt),
            cached_tokens=cached,
            completion_tokens=len(answer.token_ids),
            token_ids=tuple(answer.token_ids),
            route=passage.route,
            failovers=passage.failovers,
            fallback=passage.fallback,
            first_token_ms=answer.first_token_ms,
            tokens_per_second=answer.tokens_per_second,
            hops=passage.timings(),
            widened=passage.widened,
            note=answer.note,
        )
