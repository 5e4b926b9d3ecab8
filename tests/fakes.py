"""The one fake of the suite: generations and a mesh that follow a script.

Everything around it is real: the application, uvicorn's socket, the clients, the processes.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from mesh.api.services import Lack, LackKind
from mesh.errors import (
    Busy,
    ContextTooLong,
    ModelNotFound,
    NoRoute,
    NotEnoughMemory,
    PipelineStalled,
    ProcessLost,
)
from mesh.pipeline.entrance import Entrance
from mesh.types import (
    BringingUp,
    Done,
    Endpoint,
    GenerationRequest,
    HopTiming,
    LayerRange,
    ModelId,
    NodeId,
    PipelineAborted,
    PromptPiece,
    RouteHop,
    ShardDescriptor,
    ShardFailover,
    ShardId,
    ShardStatus,
    StreamFrame,
    TokenDelta,
    TokenLogprob,
    ToolCallDelta,
    shard_id,
)

MOMENT = datetime(2030, 1, 1, tzinfo=UTC)
_AT = (datetime.now(UTC) - timedelta(hours=3)).isoformat()
PROMPT_TOKENS = 5
FILLER = "x" * 2000
"""The text of each token of the model ``endless``."""


def descriptor(node: str, layers: str, model: str = "echo") -> ShardDescriptor:
    """A shard of a 12-layer model."""
    span = LayerRange.parse(layers)
    return ShardDescriptor(
        shard_id=shard_id(ModelId(model), span),
        model_id=ModelId(model),
        weights_sha256="0" * 64,
        layers=span,
        total_layers=12,
        vram_required_mb=1,
        max_concurrent_streams=4,
        host=NodeId(f"id-of-{node}"),
        node_name=node,
        endpoint=Endpoint("wss://127.0.0.1:1"),
        dtype="fp32",
        determinism_class="test",
        advertised_at=MOMENT,
    )


def done(
    token_ids: tuple[int, ...], *, prompt_tokens: int = PROMPT_TOKENS, failovers: int = 0
) -> Done:
    """The end of a generation over two hops."""
    shards = [descriptor("attic", "0-5"), descriptor("kitchen", "6-11")]
    return Done(
        finish_reason="stop",
        prompt_tokens=prompt_tokens,
        cached_tokens=2,
        completion_tokens=len(token_ids),
        token_ids=token_ids,
        route=tuple(RouteHop(shard, shard.layers) for shard in shards),
        failovers=failovers,
        fallback=False,
        first_token_ms=12.5,
        tokens_per_second=float("inf"),
        hops=tuple(
            HopTiming(s.shard_id, s.node_name, str(s.layers), 3, 1.0, 2.0, 0.5) for s in shards
        ),
        drafted_tokens=8,
        accepted_tokens=6,
    )


class ScriptedGenerations:
    """Answers by the model's name; see the methods below.

    Remembers every request, how many frames each model gave, and sets `ended` of
    a model whose generation is over, in whatever way.
    """

    def __init__(self) -> None:
        self.scripts: dict[str, str] = {}
        """Models that for now answer as another does."""
        self.requests: list[GenerationRequest] = []
        self._streams: list[AsyncGenerator[StreamFrame, None]] = []
        self.pulled: Counter[str] = Counter()
        self.started = asyncio.Event()
        self.ended: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.proceed = asyncio.Event()
        self.entrance: Entrance | None = None
        self.coming: tuple[BringingUp, ...] = ()
        """What each hears before the entrance, of a model that is not up yet."""
        self.under_way = self.most_under_way = 0
        self.idle = asyncio.Event()
        """Set when the last that was under way has ended."""
        self.repeated = 1
        """How often `echo` takes the words."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[StreamFrame, None]:
        self.requests.append(request)
        stream = self._run(request)
        # Kept, so that no garbage collection closes what the API forgot to close.
        self._streams.append(stream)
        return stream

    async def lens(self, request: GenerationRequest, top: int) -> dict[str, Any]:
        """Two layers that say what the text ends with, `top` times."""
        self.requests.append(request)
        if request.model == "missing":
            raise ModelNotFound("there is no such model.", fix="Ask for another.")
        said = [{"token": request.begun[-3:] or "first", "logprob": -1.0}] * top
        layers = [{"layer": n, "node": f"node {n}", "top": said} for n in range(2)]
        return {"prompt_tokens": PROMPT_TOKENS, "layers": layers}

    async def count(self, request: GenerationRequest) -> int:
        """As many as `generate` says."""
        await self.load(request)
        return PROMPT_TOKENS

    async def load(self, request: GenerationRequest) -> None:
        """At once; `silent` waits for `proceed`."""
        self.requests.append(request)
        if request.model == "missing":
            raise ModelNotFound("there is no such model.", fix="Ask for another.")
        if request.model == "silent":
            await self.proceed.wait()

    async def _run(self, request: GenerationRequest) -> AsyncGenerator[StreamFrame, None]:
        for step in self.coming:
            yield step
        if self.entrance is not None:
            async for queued in self.entrance.enter(request.request_id, request.principal):
                yield queued
        self.under_way += 1
        self.idle.clear()
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            prompt_tokens = PROMPT_TOKENS
            async for frame in self._script(request):
                self.pulled[request.model] += 1
                if isinstance(frame, TokenDelta):
                    yield replace(frame, prompt_tokens=prompt_tokens)
                    prompt_tokens = 0
                else:
                    yield frame
        finally:
            self.under_way -= 1
            if not self.under_way:
                self.idle.set()
            if self.entrance is not None:
                self.entrance.leave(request.request_id)
            self.ended[request.model].set()

    def _script(self, request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        name = self.scripts.get(request.model, request.model)
        script = getattr(self, f"_{name}".replace("-", "_"), None)
        if script is None:
            return self._unknown(request)
        frames: AsyncIterator[StreamFrame] = script(request)
        return frames

    async def _unknown(self, request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        raise ModelNotFound(
            f"No node has a model {request.model!r}.",
            fix="See `hearthnet models`.",
            param="model",
        )
        yield

    async def _echo(self, request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        """The words of the last message or prompt, one token each."""
        text = request.prompt or " ".join(map(str, request.prompt_ids or ()))
        if request.messages:
            text = request.messages[-1]["content"]
        words = text.split(" ") * self.repeated
        if request.echo:
            yield self._given_back(text, words, scored=request.scores_prompt)
        if request.sampling.max_tokens == 0:
            vector = np.array([len(words), len(text), 0, 0], "<f4") if request.embeds else None
            made = b"" if vector is None else (vector / np.linalg.norm(vector)).tobytes()
            yield replace(done((), prompt_tokens=len(words)), embedding=made)
            return
        for number, word in enumerate(words):
            token = word if number == 0 else f" {word}"
            logprobs: tuple[TokenLogprob, ...] = ()
            if request.sampling.logprobs is not None:
                own = token.encode()
                top = ((number, own, -0.5), (99, "ö".encode(), float("-inf")))
                logprobs = (TokenLogprob(number, own, -0.5, top[: request.sampling.logprobs]),)
            yield TokenDelta(token, (number,), logprobs)
        yield done(tuple(range(len(words))))

    def _given_back(self, text: str, words: list[str], *, scored: bool) -> PromptPiece:
        """The words of a prompt, the space between them in front of each."""
        logprobs, offsets = [], [0]
        for number, word in enumerate(words):
            own = f" {word}".encode() if number else word.encode()
            top = ((number, own, -0.25),) if number else ()
            logprobs.append(TokenLogprob(number, own, -0.25 if number else None, top))
            offsets.append(offsets[-1] + len(own))
        ids = tuple(range(len(words)))
        if not scored:
            return PromptPiece(text, ids)
        return PromptPiece(text, ids, tuple(logprobs), tuple(offsets[:-1]))

    async def _halves(self, _request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        first, second = "🐈".encode()[:2], "🐈".encode()[2:]
        yield TokenDelta("", (1,), (TokenLogprob(1, first, -0.5),))
        yield TokenDelta("🐈", (2,), (TokenLogprob(2, second, -0.5),))
        yield TokenDelta(" sings", (3,), (TokenLogprob(3, b" sings", -0.5),))
        yield done((1, 2, 3))

    async def _thinks(self, _request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        yield TokenDelta("", (1,), reasoning="first this,\n")
        yield TokenDelta("", (2,), reasoning="then that")
        yield TokenDelta("so", (3,), reasoning=".")
        yield TokenDelta(" it is", (4,))
        yield done((1, 2, 3, 4))

    async def _calls(self, _request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        """Ends a call and goes on in one step, as where guesses were right."""
        yield TokenDelta("I look.", (1,), tool_calls=(ToolCallDelta(0, id="c1", name="look"),))
        yield TokenDelta("", (2,), tool_calls=(ToolCallDelta(0, '{"a"'),))
        more = (ToolCallDelta(0, ": 1}"), ToolCallDelta(1, "{}", id="c2", name="look"))
        yield TokenDelta("Again.", (3, 4, 5), tool_calls=more)
        yield done((1, 2, 3, 4, 5))

    async def _failover(self, _request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        lost, new = ShardId("failover:6-11"), ShardId("failover:4-11")
        yield TokenDelta("one", (1,))
        yield ShardStatus(lost, "kitchen", "lost", "the connection ended")
        yield ShardFailover(lost, (new,), position=6)
        yield TokenDelta("", (2,))
        yield TokenDelta(" two", (3,))
        yield done((1, 2, 3), failovers=1)

    async def _narrow(self, _request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        yield TokenDelta("one", (1,))
        full = "attic has no room for more of this text in its caches, nor has anybody else."
        yield PipelineAborted(full)
        yield replace(done((1,)), finish_reason="length", note=full)

    async def _breaks(self, _request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        yield TokenDelta("one", (1,))
        yield PipelineAborted("no replacement")
        raise PipelineStalled("No progress for 30 s.", fix="Try again.")

    async def _bug(self, _request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        raise ZeroDivisionError("secret detail")
        yield

    async def _late_bug(self, _request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        yield TokenDelta("one", (1,))
        raise ZeroDivisionError("secret detail")

    async def _unfinished(self, _request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        yield TokenDelta("one", (1,))

    async def _killed(self, _request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        raise ProcessLost("the asker of killed: killed by SIGKILL.", fix="It is started anew.")
        yield

    async def _busy(self, _request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        raise Busy("4 generations run already.", fix="Try again in a moment.")
        yield

    async def _no_route(self, _request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        raise NoRoute("Layers 8-11 are missing.", fix="Start a node that holds them.")
        yield

    async def _too_long(self, _request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        raise ContextTooLong("9000 tokens, the limit is 8192.", fix="Shorten the prompt.")
        yield

    async def _poem(self, _request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        """Two lines, HTML and a link."""
        yield TokenDelta("Roses are <b>red</b>,\nviolets", (1,))
        yield TokenDelta(" are [blue](https://example.org/sky).", (2,))
        yield done((1, 2))

    async def _steps(self, _request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        """Sixty of them, in one list."""
        for number in range(1, 61):
            yield TokenDelta(f"{number}. step **{number}**\n", (number,))
        yield done(tuple(range(1, 61)))

    async def _stuck(self, _request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        """Says one word, then nothing until `proceed`."""
        self.started.set()
        yield TokenDelta("one", (1,))
        await self.proceed.wait()
        yield TokenDelta(" two", (2,))
        yield done((1, 2))

    async def _silent(self, _request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        """Says nothing until `proceed`."""
        self.started.set()
        await self.proceed.wait()
        yield TokenDelta("late", (1,))
        yield done((1,))

    async def _endless(self, _request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        while True:
            yield TokenDelta(FILLER, (1,))
            await asyncio.sleep(0)

    async def _ugly(self, _request: GenerationRequest) -> AsyncIterator[StreamFrame]:
        """What a terminal or a line splitter could trip over."""
        yield TokenDelta("\x1b[31mred\x1b[0m\u2028next\x85\tß\n", (1,))
        yield done((1,))


class ScriptedView:
    """A mesh of this node and one peer."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.is_loading = False
        self.happened: list[dict[str, Any]] = []
        self.news = asyncio.Event()
        self.unwatched = asyncio.Event()

    def status(self) -> dict[str, Any]:
        return {
            "node": {
                "id": "n" * 52,
                "name": "here",
                "software": "hearthnet/0",
                "started_at": MOMENT.isoformat(),
                "api": "http://127.0.0.1:8420",
                "api_tls": None,
                "endpoint": "wss://127.0.0.1:8421",
                "state_dir": "/state",
                "hearth": {"id": "hh2", "name": "the house"},
                "away": [
                    {"id": "l" * 52, "name": "laptop", "last_seen": MOMENT.isoformat()},
                    {"id": "p" * 52, "name": "phone", "last_seen": None},
                ],
                "enabled": True,
                "paused": False,
                "interfaces": [
                    {
                        "name": "eth0",
                        "address": "192.0.2.5",
                        "network": "192.0.2.0/24",
                        "used": True,
                        "why": "local network",
                    },
                    {
                        "name": "wg0",
                        "address": None,
                        "network": None,
                        "used": False,
                        "why": "it is down",
                    },
                ],
            },
            "peers": self.peers(),
            "models": self.models(),
            "shards": [{"shard_id": "echo:0-5", "model_id": "echo", "layers": "0-5"}],
            "processes": [],
            "loads": [
                {
                    "name": "slow:0-3",
                    "process": "the shards' process",
                    "need_mb": 812,
                    "age_s": 2.0,
                    "phase": "packing",
                    "done_bytes": 310 << 20,
                    "total_bytes": 640 << 20,
                }
            ],
            "generations": [
                {
                    "id": "chatcmpl-1",
                    "model": "echo",
                    "route": [
                        {
                            "shard_id": "echo:0-5",
                            "node": "attic",
                            "layers": "0-5",
                            "p50_ms": 1.0,
                            "p95_ms": 2.0,
                        }
                    ],
                    "failovers": 0,
                }
            ],
            "accounts": [
                {
                    "where": "echo:0-5",
                    "principals": [
                        {
                            "kind": "peer",
                            "name": "p" * 52,
                            "node": "attic\x1b[2J",
                            "refused": 2,
                            "resources": {
                                "streams": {"held": 3, "limit": None, "together": 5, "total": 8},
                                "bytes_buffered": {
                                    "held": 3 << 19,
                                    "limit": 16 << 20,
                                    "together": 0,
                                    "total": None,
                                },
                                "events_per_minute": {"used": 7, "limit": None, "window_s": 60.0},
                            },
                        }
                    ],
                    "more": 0,
                }
            ],
            "reasons": ["device=cpu: no accelerator found"],
            "warnings": [{"at": _AT, "message": "The disk is nearly full.", "fix": "Free some."}],
        }

    def peers(self) -> list[dict[str, Any]]:
        return [
            {
                "id": "p" * 52,
                "name": "attic\x1b[2J",
                "address": "192.0.2.7:8421",
                "state": "up",
                "rtt_ms": 0.7,
                "software": "hearthnet/0.0.9",
                "skew": "newer",
                "shards": [{"shard_id": "echo:6-11", "model_id": "echo", "layers": "6-11"}],
            }
        ]

    def models(self) -> list[dict[str, Any]]:
        whole = {
            "total_layers": 12, "context": 2048, "nodes": ["attic", "here"], "local": False,
            "level": "HOT",
        }  # fmt: skip
        half = "missing layers 8-11"
        known = {
            "weights_sha256": "ab" * 32, "abilities": ["tools"], "rests_at": MOMENT.isoformat(),
            "checkpoint": {
                "format": "gguf", "family": "llama", "dtype": "q4_k", "parameters": 1_234_000_000,
                "bytes": 700_000_000, "modified_at": MOMENT.isoformat(),
            },
        }  # fmt: skip
        coming = "loading" if self.is_loading else None
        return [
            {
                "id": "echo",
                "runnable": not coming,
                "missing": [],
                "reason": coming,
                **whole,
                **known,
            },
            {"id": "org/half", "runnable": False, "missing": ["8-11"], "reason": half, **whole},
        ]

    def privacy(self) -> dict[str, Any]:
        return {"routes": [], "precautions": {}, "words": ["Nobody sees anything."]}

    def readiness(self) -> list[Lack]:
        return [Lack(LackKind.LAYERS, said) for said in self.missing]

    async def batches(
        self, after: int | None, *, pace_s: float, idle_s: float
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        position = len(self.happened) if after is None else after
        try:
            while True:
                self.news.clear()  # what comes from here on is for the next one
                found = self.happened[position:]
                position += len(found)
                yield found
                await asyncio.sleep(pace_s)
                if position == len(self.happened):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(idle_s):
                            await self.news.wait()
        finally:
            self.unwatched.set()

    def metrics(self) -> bytes:
        return b"# HELP hearthnet_test A test.\nhearthnet_test 1\n"

    def happen(self, type_: str, **said: str) -> None:
        """Add an event."""
        number = len(self.happened) + 1
        self.happened.append({"id": number, "type": type_, "at": MOMENT.isoformat(), **said})
        self.news.set()


async def no_judge(layers: LayerRange) -> RouteHop:
    """A machine that loads nothing to check others by."""
    raise NotEnoughMemory(f"layers {layers} are not loaded here.", fix="None.")
