"""The product's asker in this process, before a real shard process reached over breakable wires.

One shard process holds many spans of the built-in model. Each "node" of the lab is one span of it
behind a proxy or a liar of its own, advertised as a host of its own: nodes cost nothing, so every
test has a fresh set. Sockets, frames, layers and numbers are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mesh.discovery.advertisement import Advertisement
from mesh.errors import MeshError, NoRoute
from mesh.models.builtin import checkpoint_dir
from mesh.pipeline.checkpoint import load_asker
from mesh.pipeline.commands import AskerOptions, EngineSettings, Offer, RouteLimits
from mesh.pipeline.engine import Engine
from mesh.pipeline.model import AskerModel
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import (
    Done,
    Endpoint,
    GenerationRequest,
    HopTiming,
    LayerRange,
    ModelId,
    NodeId,
    RouteHop,
    SamplingParams,
    ShardHealth,
    StreamFrame,
    TokenDelta,
    shard_id,
)
from tests import secure
from tests.chaos.proxy import Proxy
from tests.fakes import no_judge

MODEL = ModelId("builtin")
SPANS = ("0-2", "3-5", "6-7", "0-3", "4-7", "2-4", "1-5", "5-7", "0-7")
STREAMS = 64


@dataclass(slots=True)
class Told:
    """What one request gave."""

    tokens: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    done: Done | None = None
    error: MeshError | None = None

    @property
    def failovers(self) -> int:
        return self.done.failovers if self.done is not None else -1

    def route(self) -> list[str]:
        """The nodes of the final route, in the order of their layers."""
        assert self.done is not None, self.error
        return [hop.shard.node_name for hop in self.done.route]

    def hops(self) -> dict[str, HopTiming]:
        """The final route's timings by node."""
        assert self.done is not None
        return {hop.node: hop for hop in self.done.hops}


class Lab:
    """Makes wires to the shard process, and askers that know only these."""

    def __init__(self, model: AskerModel, host: ShardSupervisor, cache_dir: Path) -> None:
        self.model = model
        self.host = host
        self._cache_dir = cache_dir

    @property
    def port(self) -> int:
        """Where the honest shard process listens."""
        return port_of(self.host)

    def advertise(self, name: str, layers: str, port: int, **changes: Any) -> Offer:
        """What the asker is told of a node that reaches `layers` at `port`."""
        honest = self.host.shards[shard_id(MODEL, LayerRange.parse(layers))].descriptor
        told = {
            "host": NodeId(name),
            "node_name": name,
            "endpoint": Endpoint(f"wss://127.0.0.1:{port}"),
            **changes,
        }
        descriptor = replace(honest, **told)
        now = datetime.now(UTC)
        health = ShardHealth(True, now, 0.0, 0.0, 0, 0)
        return Offer(Advertisement(descriptor, health))

    @asynccontextmanager
    async def nodes(self, **layers: str) -> AsyncIterator[dict[str, Proxy]]:
        """A proxy per node, healed and closed in the end."""
        async with AsyncExitStack() as stack:
            yield {name: await stack.enter_async_context(Proxy(self.port)) for name in layers}

    @asynccontextmanager
    async def asker(
        self,
        shards: list[Offer],
        *,
        stall_limit_s: float = 1.0,
        spot_checks: float = 0.0,
    ) -> AsyncIterator[Engine]:
        """A fresh asker that has had no dealings with anybody."""
        settings = EngineSettings(
            RouteLimits(16, allow_self_as_first=False),
            stall_limit_s=stall_limit_s,
            activation_dtype="fp32",
            cache_dir=str(self._cache_dir),
            fallback_to_local=False,
            fallback_after=2,
            spot_check_probability=spot_checks,
        )
        engine = Engine(self.model, NodeId("asker"), settings, _nobody, no_judge, secure.dial)
        # Of equals the one whose name comes first: the tests say who is struck.
        engine.shards._claims.lot = lambda _key: 0.0  # type: ignore[method-assign]
        engine.shards.replace(shards)
        watch = asyncio.create_task(engine.watch_stalls(), name="watch stalls")
        try:
            yield engine
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
            await engine.close()

    async def streams_in_use(self) -> int:
        """Sessions open on the shard process; it reports them on every change."""
        await asyncio.sleep(0.15)
        return sum(shard.health.active_streams for shard in self.host.shards.values())


def port_of(host: ShardSupervisor) -> int:
    """Where a shard process listens."""
    endpoint = next(iter(host.shards.values())).descriptor.endpoint
    port = urlsplit(endpoint).port
    assert port is not None
    return port


async def ask(
    engine: Engine,
    prompt: list[int],
    count: int,
    *,
    at: int = -1,
    act: Callable[[], None] = lambda: None,
    after_s: float = 0.0,
) -> Told:
    """One request to its end; `act` at token `at`, or `after_s` after it began when `at` is 0."""
    told = Told()
    request = GenerationRequest(
        f"r{random.getrandbits(40):x}",
        MODEL,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=count, ignore_eos=True),
        draft=False,  # so that each token is a step, and moments are known
    )
    timer = asyncio.get_running_loop().call_later(after_s, act) if at == 0 else None
    try:
        async for frame in engine.chat(request):
            _take(told, frame)
            if isinstance(frame, TokenDelta) and len(told.tokens) == at:
                act()
    except MeshError as error:
        told.error = error
    finally:
        if timer is not None:
            timer.cancel()
    return told


@asynccontextmanager
async def open_lab(directory: Path, dtype: str = "fp32", quant: str = "none") -> AsyncIterator[Lab]:
    """Start the shard process and load the asker's ends, both in these numbers."""
    loads = (
        {"directory": str(checkpoint_dir()), "model_id": MODEL, "layers": span, "dtype": dtype,
         "quant": quant, "max_concurrent_streams": STREAMS, "kv_tokens": 65536}
        for span in SPANS
    )  # fmt: skip
    async with secure.hosting(directory, *loads) as host:
        options = AskerOptions(dtype, "cpu", 1, directory, quant=quant)
        model, _ = await asyncio.to_thread(load_asker, checkpoint_dir(), MODEL, options)
        yield Lab(model, host, directory)


def _take(told: Told, frame: StreamFrame) -> None:
    if isinstance(frame, TokenDelta):
        told.tokens += frame.token_ids
        return
    told.kinds.append(frame.type)
    if isinstance(frame, Done):
        assert list(frame.token_ids) == told.tokens, "what was streamed is what is summed up"
        told.done = frame


async def _nobody() -> list[RouteHop]:
    raise NoRoute("this asker holds no layers.", fix="Ask the others.")
