"""A shard process under a client that wants its memory: what it takes beyond its base is bounded by
``tap_memory_mb``, whatever it says on the tap protocol."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from mesh.errors import LimitReached, MeshError
from mesh.shard.taps.parts import MAX_MESSAGE_BYTES
from mesh.types import LayerRange
from tests.interventions.jobworld import shards
from tests.interventions.memory_attacks import ATTACKS, Greedy
from tests.interventions.tap_client import RawClient, RawTaps, in_thread

LIMIT_MB = 16
SPAN = LayerRange(0, 6)
SLACK_MB = 48
"""What a link may hold of frames on their way, and what an allocator keeps of what was freed."""

SAMPLE = ("names", "empty_tensors", "graphs", "caches", "broadcast")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="reads peaks from /proc"),
]


class Watched:
    """A shard process and the memory it takes."""

    def __init__(self, pid: int, client: RawClient) -> None:
        self.client = client
        self.pid = pid
        self._base = 0

    def settle(self) -> None:
        """What it has now is its base; the peak is counted from here."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        self._base = psutil.Process(self.pid).memory_info().rss

    def peak_mb(self) -> float:
        """The most it had since then, beyond its base."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return (int(line.split()[1]) * 1024 - self._base) / 2**20
        raise AssertionError("no peak is told")


@asynccontextmanager
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    more = {"tap_memory_mb": LIMIT_MB, "max_tap_sessions": 4}
    async with shards(["llama"], tmp_path, [SPAN], **more) as host:
        assert host.pid is not None
        (hosted,) = host.shards.values()
        client = RawClient(hosted.descriptor)
        here = Watched(host.pid, client)
        session = await client.open(SPAN)  # imports and modules count as the base
        await in_thread(session, lambda exchange: honest(Greedy(exchange, 1, 64)))
        await asyncio.to_thread(here.settle)
        yield here
        await client.close()


def honest(a: Greedy) -> None:
    some = a.rows(3)
    for grad in (False, True):
        answer = a.call(a.new(some), tensors=(some,), grad=grad, release=True)
        assert answer["op"] == "done", answer


async def peaks(here: Watched, names: Iterable[str]) -> dict[str, float]:
    """What each attack made the process take, in MB, beyond what it had before."""
    found = {}
    for name in names:
        session = await here.client.open(SPAN)
        await asyncio.to_thread(here.settle)
        await in_thread(session, lambda exchange, name=name: ATTACKS[name](Greedy(exchange, 1, 64)))
        found[name] = await asyncio.to_thread(here.peak_mb)
        session.close()
        again = await here.client.open(SPAN)
        await in_thread(again, lambda exchange: honest(Greedy(exchange, 2, 64)))
        again.close()
    return found


async def test_memory_is_bounded(tmp_path: Path) -> None:
    async with watched(tmp_path) as here:
        found = await peaks(here, SAMPLE)
    assert max(found.values()) < LIMIT_MB + SLACK_MB, found


@pytest.mark.chaos
async def test_memory_is_bounded_whatever_is_said(tmp_path: Path) -> None:
    async with watched(tmp_path) as here:
        found = await peaks(here, ATTACKS)
    assert max(found.values()) < LIMIT_MB + SLACK_MB, found


async def test_a_message_that_does_not_end_is_refused_as_it_arrives(tmp_path: Path) -> None:
    async with watched(tmp_path) as here:
        sessions = [await here.client.open(SPAN) for _ in range(3)]
        part = bytes(4 << 20)

        async def refusal(session: RawTaps) -> MeshError:
            for offset in range(0, MAX_MESSAGE_BYTES, len(part)):
                try:
                    await session.part(MAX_MESSAGE_BYTES, offset, part)
                except MeshError as error:
                    return error
            raise AssertionError("it was never refused")

        for _ in range(5):
            for session in sessions:
                assert isinstance(await refusal(session), LimitReached)
        peak_mb = await asyncio.to_thread(here.peak_mb)
    assert peak_mb < len(sessions) * LIMIT_MB + SLACK_MB
