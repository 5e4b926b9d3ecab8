"""Hops that stop making progress, each in its own way, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from mesh.health.latency import FLOOR_S
from mesh.types import ShardStatus, StreamFrame
from mesh.wire.messages import Step, WireTensor
from tests.health.watched import PROMPT, Watched, tokens_of, watched
from tests.pipeline.toy_mesh import ToyNetwork, ToyShard, expected_tokens
from tests.simulation.virtual_loop import run_virtually

CEILING_S = 30.0
STEP_S = 0.02
COUNT = 40


class Paced:
    """Makes a toy shard take `step_s` per step; `hold` keeps answers back altogether."""

    def __init__(self, shard: ToyShard) -> None:
        self.step_s = STEP_S
        self.hold = False
        self.seen = 0
        self.on_step: Callable[[int], None] = lambda number: None
        self._free_at = 0.0
        for_door = shard.network
        del for_door
        shard.before_step = self._before

    def _before(self, step: Step) -> bool:
        return True


class Stopped:
    """When the last good answer came and when the hop was given up."""

    def __init__(self) -> None:
        self.since = 0.0
        self.noticed = 0.0


def delay_answers(shard: ToyShard, pace: Callable[[Step], float | None]) -> None:
    """Send each answer `pace(step)` seconds after the step; None: never."""
    for_link = shard.links
    loop = asyncio.get_running_loop()
    for link in for_link:
        peer = link._other
        assert peer is not None
        send, free_at = peer.send, [0.0]

        def later(message: object, send: Callable[..., None] = send, free: list[float] = free_at) -> None:
            wait = pace(message)  # type: ignore[arg-type]
            if wait is None:
                return
            free[0] = max(free[0], loop.time()) + wait
            loop.call_at(free[0], send, message)

        peer.send = later  # type: ignore[method-assign]
