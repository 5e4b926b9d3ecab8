"""What a session on a hop finds out about the way there, in virtual time."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest

from mesh.pipeline.links import HopLink
from mesh.types import HopTiming
from mesh.wire.messages import Hello, Message, Open, Opened, Result, Step, WireTensor
from tests.pipeline.one_hop import HOST, session_over
from tests.simulation.virtual_loop import run_virtually

WIDTH = 2048
WAY_S, COMPUTE_S_PER_ROW = 0.004, 0.0005


class _Way:
    """A `Link` to a shard that computes for so long a row, behind a way of so many bytes a second,
    on which nothing overtakes."""

    peer = Hello(HOST, HOST, "tensors", "")
    rtt_ms = None
    silent_s = 0.0
    is_closed = False

    def __init__(self, hop: HopLink, bytes_per_s: float) -> None:
        self._hop = hop
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def send(self, message: Message) -> None:
        """See `Link`."""
        loop = asyncio.get_running_loop()
        if isinstance(message, Open):
            loop.call_soon(self._hop.message, Opened(message.session, message.max_tokens))
        elif isinstance(message, Step):
            compute_s = message.tensor.shape[1] * COMPUTE_S_PER_ROW
            takes_s = 2 * len(message.tensor.data) / self._bytes_per_s + compute_s
            self._free_at = max(self._free_at, loop.time()) + takes_s
            result = Result(
                message.session, message.step, message.tensor, round(compute_s * 1e6), 0
            )
            loop.call_at(self._free_at + WAY_S, self._hop.message, result)

    async def drain(self, timeout_s: float) -> None:
        """See `Link`."""

    def close(self, reason: str = "") -> None:
        """See `Link`."""


async def timed(bytes_per_s: float, *prompt: int) -> HopTiming:
    """A prompt in pieces of so many rows, sent at once, and a few tokens behind it."""
    hop, _ = session_over(partial(_Way, bytes_per_s=bytes_per_s))
    await hop.open()
    place = 0
    answers = []
    for rows in prompt:
        answers.append(asyncio.ensure_future(hop.exchange(place, _rows(rows))))
        place += rows
    await asyncio.gather(*answers)
    for _ in range(12):
        await hop.exchange(place, _rows(1))
        place += 1
    found = hop.times.of(hop.hop)
    hop.close()
    return found


def _rows(count: int) -> WireTensor:
    shape = (1, count, WIDTH)
    return WireTensor("fp16", shape, np.zeros(shape, np.float16).tobytes())


@pytest.mark.parametrize("mb_s", [4.0, 100.0])
def test_the_rate_of_the_way_is_what_long_steps_take_longer(mb_s: float) -> None:
    async def main() -> None:
        # Only the first piece waits for nothing but the way.
        found = await timed(mb_s * 1e6, 128, 128, 128)
        assert found.mb_s == pytest.approx(mb_s, rel=0.05)
        assert found.p50_ms - found.compute_p50_ms == pytest.approx(
            WAY_S * 1e3 + 2 * WIDTH * 2 / mb_s / 1e3, rel=0.05
        )

    run_virtually(main)


def test_short_steps_do_not_tell() -> None:
    async def main() -> None:
        assert (await timed(4e6, 8, 8)).mb_s == 0.0

    run_virtually(main)


def test_steps_that_wait_for_others_tell_nothing_of_the_way() -> None:
    async def main() -> None:
        hop, _ = session_over(partial(_Way, bytes_per_s=1e9))
        await hop.open()
        for place in range(0, 3 * 12, 3):
            await asyncio.gather(*(hop.exchange(place + n, _rows(1)) for n in range(3)))
        found = hop.times.of(hop.hop)
        hop.close()
        assert found.steps == 36
        assert found.p50_ms - found.compute_p50_ms == pytest.approx(WAY_S * 1e3, rel=0.02)

    run_virtually(main)
