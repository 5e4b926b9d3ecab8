"""One generation from prompt to last token: the loop.

The asker drives: it embeds, sends the hidden states through the hops, samples from what comes back
and embeds again. Read on in `decode_steps` (one after the other), `prefill` (tokens in, logits
out), `drafting` (tokens guessed, and fed with the last one), `hop` (a session on one hop), `route`
(pick, open, pass on) and `failover` (what is done when a hop is lost).

The way of a token from here to the socket, `*` for each asynchronous generator that it passes:

    asker's process   PipelineOrchestrator.chat*  ->  the process' channel
    daemon            AskerSupervisor.generate*  ->  Askers.generate*
                      ->  mesh.api.openai.streaming*  ->  mesh.api.sse.EventStream  ->  socket

This module knows nothing of sockets, HTTP or processes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from mesh.errors import BadRequest, CacheFull, ContextTooLong, MeshError
from mesh.models.candidates import CANDIDATES
from mesh.models.constraint import Constraint
from mesh.pipeline.completion import Completion
from mesh.pipeline.decode_steps import DecodeSteps
from mesh.pipeline.drafting import MAX_DRAFT, WORTH, Drafter
from mesh.pipeline.failover import Failover, FailoverSettings, LocalModel
from mesh.pipeline.head import OutputHead
from mesh.pipeline.history import chunk_rows
from mesh.pipeline.model import AskerModel, TextReader
from mesh.pipeline.prefill import TokenFeed
from mesh.pipeline.route import HopLost
from mesh.pipeline.sampler import Sampler
from mesh.pipeline.scoring import given_back
from mesh.pipeline.sessions import GenerationSession, Sessions
from mesh.pipeline.terms import FIRST_ANSWER, SessionTerms
from mesh.pipeline.text_embedding import embed_text
from mesh.routing.router import UNSERVED, ShardRouter
from mesh.types import (
    Done,
    GenerationRequest,
    PipelineAborted,
    Queued,
    SamplingParams,
    StreamFrame,
    WireDtype,
)

logger = logging.getLogger(__name__)


class Asked(NamedTuple):
    """What a request comes to here: its token ids, what its answer is bound to, if to anything, and
    how activations travel where it does not say; see `Done` for what was `left_out`."""

    ids: list[int]
    constraint: Constraint | None
    wire_dtype: WireDtype
    left_out: int = 0


Prepared = Callable[[GenerationRequest], AbstractAsyncContextManager[Asked]]
"""What is done around one generation. Raises BadRequest, and ContextTooLong where the model does
not hold the prompt."""


Started = tuple[GenerationSession, list[StreamFrame]]
"""A session to generate in, and what to say about it."""


@dataclass(slots=True)
class _Seat:
    """Where a request is answered: its `session`, once it has one, and what is to be said of it.
    `stop` is the position that its answer may reach."""

    request: GenerationRequest
    wire_dtype: WireDtype
    home: LocalModel | None
    stop: int
    session: GenerationSession = field(init=False)
    notices: list[StreamFrame] = field(init=False, default_factory=list)


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What of the configuration the loop itself heeds: `noise` as in `mesh.pipeline.prefill`, and
    how many tokens it drafts at a time, and how many times as fast that must promise to be."""

    noise: float = 0.0
    draft_tokens: int = MAX_DRAFT
    draft_worth: float = WORTH


class PipelineOrchestrator:
    """Runs requests for one model over the shards a router finds."""

    def __init__(
        self,
        model: AskerModel,
        sessions: Sessions,
        router: ShardRouter,
        prepared: Prepared,
        *,
        failover: FailoverSettings = FailoverSettings(),  # noqa: B008 - frozen
        local_model: LocalModel | None = None,
        settings: LoopSettings = LoopSettings(),
    ) -> None:
        self._model = model
        self._head = OutputHead(model)
        self._sessions = sessions
        self._router = router
        self._prepared = prepared
        self._failover = failover
        self._local_model = local_model
        self._settings = settings

    async def chat(self, request: GenerationRequest) -> AsyncGenerator[StreamFrame, None]:
        """Token by token to the end; `Done` is last. Closing the iterator frees every hop.

        Raises:
            BadRequest, ContextTooLong: the request cannot be served by this model.
            BadSteering: an edit cannot be applied, or makes activations infinite.
            NoRoute, WeightsMismatch: no set of shards serves it, nor does the local model.
            CacheFull: nobody has room for the prompt. An answer that nobody has room for any more
                ends there, with a `note` that says so.
        """
        started = time.monotonic()
        async with self._prepared(request) as (prompt, constraint, wire_dtype, left_out):
            home = self._local_model if request.fallback_to_local is not False else None
            limit = self._token_limit(prompt, request.sampling)
            seat = _Seat(request, wire_dtype, home, len(prompt) + limit)
            async with aclosing(self._seated(seat, prompt)) as places:
                async for place in places:
                    yield place
            session = seat.session
            opened = _Opened(time.monotonic(), len(session.token_ids), session.route.widened)
            answer = Completion(self._model.text, request, prompt, limit, started, constraint)
            finished, reader = False, self._reader(request, prompt)
            try:
                steps = self._steps(seat, answer, reader)
                async for said in self._said_before(seat.notices, steps, request):
                    yield said
                ids: Sequence[int] = prompt[len(session.token_ids) :]
                while not answer.finish_reason:
                    try:
                        if answer.end > seat.session.route.terms.limit:
                            async with aclosing(self._outgrown(seat, steps)) as places:
                                async for notice in places:
                                    yield notice
                            ids = [*prompt, *answer.token_ids][steps.feed.length :]
                        async for notice in steps.advance(ids):
                            yield notice
                    except CacheFull as full:
                        yield answer.end_early(full)
                        break
                    for frame in await steps.take():
                        yield frame
                    ids = answer.token_ids[-1:]
                finished = not (answer.note or request.reads_prompt)  # another text follows that
            finally:
                self._release(seat, reader, keep=finished)
            done = _done(seat.session, opened, steps)
            yield replace(done, construct_ms=(opened.at_s - started) * 1e3, left_out=left_out)

    async def _said_before(
        self, notices: Sequence[StreamFrame], steps: DecodeSteps, request: GenerationRequest
    ) -> AsyncGenerator[StreamFrame, None]:
        """Before the first token: the notices, and the prompt where that is given back. Where no
        token is wanted, nor the prompt, it is computed for its embedding, or for those that begin
        as it does."""
        for notice in notices:
            yield notice
        prompt, feed = steps.answer.prompt, steps.feed
        async for piece in given_back(self._model, feed, request, prompt):
            yield piece
        if request.embeds:
            async for notice in embed_text(self._model, feed, steps.answer):
                yield notice
        if steps.answer.finish_reason and not request.echo:
            async for notice in feed.advance(prompt[feed.length :]):
                yield notice
            yield steps.answer.say_nothing()

    @property
    def _most_drafted(self) -> int:
        return min(self._settings.draft_tokens, chunk_rows(self._model.row_size) - 1)

    def _steps(self, seat: _Seat, answer: Completion, reader: TextReader | None) -> DecodeSteps:
        request = seat.request
        most = self._most_drafted if _may_draft(request) else 0
        drafter = Drafter(answer.prompt, most, self._settings.draft_worth)
        sampler = Sampler(request.sampling, answer.prompt)
        return DecodeSteps(self._feed(seat), self._head, drafter, reader, sampler, answer)

    def _feed(self, seat: _Seat) -> TokenFeed:
        row_size, home = self._model.row_size, seat.home
        failover = Failover(seat.session, self._router, row_size, self._failover, home)
        return TokenFeed(self._model, seat.session, failover, noise=self._settings.noise)

    async def _seated(self, seat: _Seat, text: Sequence[int]) -> AsyncGenerator[Queued, None]:
        """Until `seat` has a session for the text; see `_in_turn`."""
        terms = self._terms(seat, text)
        async with aclosing(self._in_turn(seat.request, text, terms, seat.home)) as places:
            async for place in places:
                if isinstance(place, Queued):
                    yield place
                else:
                    seat.session, seat.notices = place

    async def _outgrown(self, seat: _Seat, steps: DecodeSteps) -> AsyncGenerator[StreamFrame, None]:
        """The text becomes a long one, all of which is turned otherwise: it is fed again, to a
        session of its own. Raises as `chat`, CacheFull where nobody holds so much."""
        answer, before = steps.answer, seat.session
        self._sessions.release(before, keep=False)
        known = [*answer.prompt, *answer.token_ids]
        try:
            async with aclosing(self._seated(seat, known)) as places:
                async for place in places:
                    yield place
        except ContextTooLong as error:
            raise CacheFull(error.message, fix=error.fix) from error
        seat.session.failovers += before.failovers
        for notice in seat.notices:
            yield notice
        steps.feed = self._feed(seat)

    def _reader(self, request: GenerationRequest, prompt: Sequence[int]) -> TextReader | None:
        """The draft model, already reading the prompt; None where it is not to guess."""
        draft = self._model.draft
        if draft is None or not self._settings.draft_tokens or not _may_draft(request):
            return None
        reader = draft.read_along()
        if reader is not None:
            reader.prepare(prompt)
        return reader

    def _release(self, seat: _Seat, reader: TextReader | None, *, keep: bool) -> None:
        if reader is not None:
            reader.close()
        self._sessions.release(seat.session, keep=keep)

    async def _in_turn(
        self,
        request: GenerationRequest,
        prompt: Sequence[int],
        terms: SessionTerms,
        home: LocalModel | None,
    ) -> AsyncGenerator[Queued | Started, None]:
        """A session for the request, behind those who wait for one; at home where the mesh does not
        serve the model, or has no room for it as long as one waits."""
        # What a cache holds has no rows any more.
        known = () if request.reads_prompt else prompt
        total_layers = self._model.total_layers
        acquire = partial(
            self._sessions.acquire, known, terms, total_layers, at_home=home is not None
        )
        line = self._sessions.line.in_turn(request.request_id, request.principal, acquire)
        notices: list[StreamFrame] = []
        try:
            async with aclosing(line) as places:
                async for place in places:
                    if isinstance(place, Queued):
                        yield place
                    else:
                        session = place
        except (*UNSERVED, ContextTooLong) as nobody:  # others' caches may be too small for it
            if home is None:
                raise
            try:
                session = await self._sessions.open_at_home(await home(), terms, total_layers)
            except (MeshError, HopLost) as unable:
                logger.info("model=%s not run at home: %s", terms.model_id, unable)
                raise nobody from None
            notices.append(
                PipelineAborted(f"{nobody.message} The answer comes from the local model.")
            )
        session.request_id = request.request_id
        session.may_go_home = home is not None and not session.fallback
        yield session, notices

    def _terms(self, seat: _Seat, text: Sequence[int]) -> SessionTerms:
        """What hops are asked for the text and as many new tokens as may follow it there."""
        request, fed, short = seat.request, len(text), self._model.short_positions
        is_long = fed > short
        limit = seat.stop if is_long else min(seat.stop, short)
        rows, since = self._most_drafted + 1, fed - 1
        if request.scores_prompt:
            rows, since = chunk_rows(self._model.row_size), 0
        candidates = 0 if request.embeds else CANDIDATES
        return SessionTerms(
            self._model.model_id,
            self._model.weights_sha256,
            min(limit, fed + FIRST_ANSWER),
            request.wire_dtype or (WireDtype.FP32 if request.scores_prompt else seat.wire_dtype),
            request.edits,
            limit=limit,
            principal=request.principal,
            remote_ends=self._model.remote_ends(
                candidates, normed=request.embeds, rows=rows, since=since
            ),
            is_long=is_long,
        )

    def _token_limit(self, prompt: Sequence[int], sampling: SamplingParams) -> int:
        """How many new tokens this request may get, as many as the model can hold when it does not
        say; refuses rather than cuts, unless that is asked for."""
        wanted = sampling.max_tokens
        room = self._model.max_positions - len(prompt)
        if not prompt:
            raise BadRequest("the prompt is empty.", fix="Send at least one token.", param="prompt")
        least = 1 if wanted is None or sampling.fits_context else wanted
        if least > room:
            raise ContextTooLong(
                f"the prompt has {len(prompt)} tokens and {least} more are wanted; this"
                f" model's maximum context length is {self._model.max_positions} tokens.",
                fix="Shorten the prompt or lower max_tokens.",
                param="max_tokens" if room >= 1 else "prompt",
            )
        return room if wanted is None else min(wanted, room)


def _may_draft(request: GenerationRequest) -> bool:
    """Nothing is guessed under steering: a guess could drive values out of a number format's range
    where the answer itself never does."""
    return request.draft and not request.edits


class _Opened(NamedTuple):
    """A session as it was when its answer began: when, with how many tokens in its caches."""

    at_s: float
    cached: int
    widened: int


def _done(session: GenerationSession, opened: _Opened, steps: DecodeSteps) -> Done:
    answer = steps.answer
    return Done(
        finish_reason=answer.finish_reason,
        prompt_tokens=len(answer.prompt),
        cached_tokens=opened.cached,
        completion_tokens=len(answer.token_ids),
        token_ids=tuple(answer.token_ids),
        route=session.route.pipeline.hops,
        failovers=session.failovers,
        fallback=session.fallback,
        first_token_ms=answer.first_token_ms,
        tokens_per_second=answer.tokens_per_second,
        hops=tuple(hop.times.of(hop.hop) for hop in session.route.hops),
        widened=max(0, session.route.widened - opened.widened),  # it may be a later session
        note=answer.note,
        embedding=answer.embedding,
        drafted_tokens=steps.drafter.drafted,
        accepted_tokens=steps.drafter.accepted,
        stopped_by=answer.stopped_by,
    )
