"""What a token costs where it is asked for, besides hops: timed on a generation of the built-in
model, whose head costs nearly nothing, over a hop that computes nothing.

The loop is the very one that answers people. The hop is no process and no socket: what happens
between a step and its result is subtracted, and is the hop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from statistics import median

from mesh.discovery.advertisement import Advertisement
from mesh.errors import InternalError
from mesh.pipeline.commands import EngineSettings, GenerationFrame, Offer, RouteLimits
from mesh.pipeline.engine import Engine
from mesh.pipeline.links import HopLink
from mesh.pipeline.model import AskerModel
from mesh.processes.messages import encode
from mesh.types import (
    Done,
    Endpoint,
    GenerationRequest,
    LayerRange,
    NodeId,
    RouteHop,
    SamplingParams,
    ShardDescriptor,
    ShardHealth,
    StreamFrame,
    WireDtype,
    shard_id,
)
from mesh.wire.link import Link
from mesh.wire.messages import Hello, Message, Open, Opened, Result, Step

HOP_S = 0.006
"""What a result keeps the asker waiting: it is as cold then as behind real hops."""

_TOKENS = 24
_ANSWERS = 3
_PROMPT = tuple(range(4, 12))
_HOST = NodeId("echo")
_LIMIT_S = 20.0


async def asker_ms(model: AskerModel) -> float:
    """Milliseconds of a token at the asker of this model, its head included, its hops not: the
    median over a few answers. Raises MeshError, TimeoutError."""
    settings = EngineSettings(
        RouteLimits(1, allow_self_as_first=True), 10.0, WireDtype.FP32.value, "",
        fallback_to_local=False, fallback_after=1, draft_tokens=0,
    )  # fmt: skip
    engine = Engine(model, NodeId("here"), settings, _nobody, _no_judge, _dial)
    engine.shards.replace([Offer(_advertised(model))])
    try:
        async with asyncio.timeout(_LIMIT_S):
            # The first answer finds out what later ones know.
            answers = [await _answer(engine, number) for number in range(1 + _ANSWERS)]
    finally:
        await engine.close()
    return median(done.asker_ms for done in answers[1:])


async def _answer(engine: Engine, number: int) -> Done:
    sampling = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    request = GenerationRequest(
        f"speed-{number}", engine.model.model_id, prompt_ids=_PROMPT, sampling=sampling, draft=False
    )
    async with aclosing(engine.chat(request)) as frames:
        return await _last(request.request_id, frames)


async def _last(name: str, frames: AsyncGenerator[StreamFrame, None]) -> Done:
    """The end of the answer; each frame is packed for the daemon, as one that is sent."""
    async for frame in frames:
        encode(GenerationFrame.of(name, frame))
        if isinstance(frame, Done):
            return frame
    raise InternalError("an answer had no end.", fix="Report this as a bug.")


def _advertised(model: AskerModel) -> Advertisement:
    layers, now = LayerRange(0, model.total_layers), datetime.now(UTC)
    name = shard_id(model.model_id, layers)
    descriptor = ShardDescriptor(
        name, model.model_id, model.weights_sha256, layers, model.total_layers, 0, 1, _HOST,
        _HOST, Endpoint("wss://127.0.0.1:1"), "fp32", "", now,
    )  # fmt: skip
    return Advertisement(descriptor, ShardHealth(True, now, 0.0, 0.0, 0, 0))


async def _nobody() -> Sequence[RouteHop]:
    raise InternalError("nothing is loaded here.", fix="Report this as a bug.")


async def _no_judge(_: LayerRange) -> RouteHop:
    raise InternalError("nothing is checked here.", fix="Report this as a bug.")


async def _dial(_host: str, _port: int, hop: HopLink) -> Link:
    return _Echo(hop)


class _Echo:
    """A `Link` to a shard that answers each step with its inputs, after `HOP_S`."""

    peer = Hello(_HOST, _HOST, "tensors", "")
    rtt_ms = None
    silent_s = 0.0

    def __init__(self, hop: HopLink) -> None:
        self.is_closed = False
        self._hop = hop
        self._loop = asyncio.get_running_loop()

    def send(self, message: Message) -> None:
        if isinstance(message, Open):
            self._loop.call_soon(self._hop.message, Opened(message.session, message.max_tokens))
        elif isinstance(message, Step):
            result = Result(message.session, message.step, message.tensor, 0, 0)
            self._loop.call_later(HOP_S, self._hop.message, result)

    async def drain(self, timeout_s: float) -> None:
        """See `Link`."""

    def close(self, reason: str = "") -> None:
        self.is_closed = True
