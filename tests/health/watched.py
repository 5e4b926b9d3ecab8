"""The product's asker over the toy mesh: everything real but sockets and arithmetic."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from mesh.discovery.advertisement import Advertisement
from mesh.errors import NotEnoughMemory
from mesh.health.detector import Verdict
from mesh.pipeline.commands import EngineSettings, Offer, RouteLimits
from mesh.pipeline.engine import Engine
from mesh.pipeline.model import AskerModel
from mesh.pipeline.watch.spot_checks import Judge
from mesh.types import (
    THIS_NODE,
    LayerRange,
    NodeId,
    Principal,
    RouteHop,
    ShardFailover,
    ShardHealth,
    StreamFrame,
    TokenDelta,
)
from mesh.wire.messages import Step, WireTensor
from tests.pipeline.toy_mesh import (
    HIDDEN,
    MODEL,
    PRIME,
    TOTAL_LAYERS,
    WEIGHTS,
    ToyEnds,
    ToyNetwork,
    ToyShard,
    ToyText,
    toy_request,
)

PROMPT = [5, 11, 23, 42, 8, 61]
ASKER = "asker"


class Watched:
    """An engine, the toy network it asks, and what it reported."""

    def __init__(self, network: ToyNetwork, settings: EngineSettings) -> None:
        model = AskerModel(MODEL, WEIGHTS, TOTAL_LAYERS, HIDDEN, PRIME, 4096, ToyEnds(), ToyText())
        self.network = network
        self.home: ToyShard | None = None
        """Loaded to check others by, and to go home to; not advertised."""
        self.judge: Judge = self._at_home
        self.engine = Engine(
            model, NodeId(ASKER), settings, self._local_model, self._judge_now, network.dial
        )
        self.engine.spot_checks.rng = random.Random(7)
        self.publish()

    async def _local_model(self) -> Sequence[RouteHop]:
        return [await self.judge(LayerRange(0, TOTAL_LAYERS))]

    async def _judge_now(self, layers: LayerRange) -> RouteHop:
        return await self.judge(layers)

    async def _at_home(self, layers: LayerRange) -> RouteHop:
        if self.home is None or not self.home.descriptor.layers.covers(layers):
            raise NotEnoughMemory("nothing is loaded here.", fix="None.")
        return RouteHop(self.home.descriptor, layers)

    def publish(self, verdicts: dict[str, str] | None = None) -> None:
        """Tell the engine of every shard of the network, with verdicts by node.

        The way to a node is the longer the later its name comes: a test's names say who is asked
        first, and who only when nobody before it can.
        """
        now = datetime.now(UTC)
        listed = [shard for shard in self.network.shards.values() if shard.is_advertised]
        names = sorted({shard.descriptor.host for shard in listed})
        self.engine.shards.replace(
            [
                Offer(
                    Advertisement(
                        shard.descriptor,
                        ShardHealth(True, now, 1.0, 1.0, 0, 0),
                    ),
                    Verdict((verdicts or {}).get(shard.descriptor.host, "healthy")),
                    1.0 + names.index(shard.descriptor.host),
                )
                for shard in listed
            ]
        )

    async def ask(
        self,
        count: int,
        *,
        prompt: Sequence[int] = PROMPT,
        name: str = "r",
        principal: Principal = THIS_NODE,
    ) -> list[StreamFrame]:
        """All frames of one request."""
        request = toy_request(prompt, count, name, principal)
        return [frame async for frame in self.engine.chat(request)]

    @asynccontextmanager
    async def watching_stalls(self) -> AsyncIterator[None]:
        """The stall watch runs in the block; the engine is closed behind it."""
        watch = asyncio.create_task(self.engine.watch_stalls(), name="watch stalls")
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await self.engine.close()

    async def idle(self) -> None:
        """Until no check is under way."""
        await self.engine.spot_checks.settled()

    def standing(self, shard: ToyShard) -> int:
        descriptor = shard.descriptor
        return self.engine.oversight.reputations.penalty((descriptor.host, descriptor.shard_id))

    def checks(self, shard: ToyShard) -> dict[str, int]:
        """How the spot checks of a shard ended."""
        rows = self.engine.oversight.reputations.rows()
        found = [row["checks"] for row in rows if row["host"] == shard.descriptor.host]
        return dict(found[0]) if found else {}


@contextmanager
def watched(
    network: ToyNetwork,
    *,
    ceiling_s: float = 30.0,
    probability: float = 0.0,
    allow_self_as_first: bool = False,
    **changes: Any,
) -> Iterator[Watched]:
    """The engine with the toy network where its sockets would be; `changes` are of its settings."""
    settings = EngineSettings(
        RouteLimits(16, allow_self_as_first=allow_self_as_first),
        ceiling_s,
        "fp32",
        "",
        False,
        99,
        spot_check_probability=probability,
    )
    yield Watched(network, replace(settings, **changes))


def halves(*copies: str) -> tuple[ToyNetwork, list[ToyShard]]:
    """The first half on one node, the second half on these."""
    network = ToyNetwork()
    network.add("0-3", name="front")
    return network, [network.add("4-7", name=name) for name in copies]


async def answers(mesh: Watched, count: int, name: str = "r") -> list[StreamFrame]:
    """Ask, giving checks a turn after each token as a network's waits would."""
    frames: list[StreamFrame] = []
    async for frame in mesh.engine.chat(toy_request(PROMPT, count, name)):
        frames.append(frame)
        for _ in range(8):
            await asyncio.sleep(0)
    return frames


def told(mesh: Watched) -> list[dict[str, object]]:
    return mesh.engine.oversight.take_events()


def tokens_of(frames: Sequence[StreamFrame]) -> list[int]:
    return [token for frame in frames if isinstance(frame, TokenDelta) for token in frame.token_ids]


def tokens_before_failover(frames: Sequence[StreamFrame]) -> int:
    """How many tokens had come when the first hop was replaced."""
    index = next(i for i, frame in enumerate(frames) if isinstance(frame, ShardFailover))
    return len(tokens_of(frames[:index]))


def values_of(tensor: WireTensor) -> list[float]:
    return list(struct.unpack(f"<{len(tensor.data) // 4}f", bytes(tensor.data)))


def with_values(tensor: WireTensor, values: Sequence[float]) -> WireTensor:
    return WireTensor("fp32", tensor.shape, struct.pack(f"<{len(values)}f", *values))


def scaled(tensor: WireTensor, factor: float = 1.02) -> WireTensor:
    """One channel of the last row, a little larger: finite, of usual size, and wrong."""
    values = values_of(tensor)
    values[-2] = factor * max(values[-2], 20.0)
    return with_values(tensor, values)


def lie(step: Step, computed: WireTensor) -> WireTensor:
    return scaled(computed)
