"""Pauses of the asking side that are longer than a host keeps silent sessions: nothing is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mesh.types import Done, ShardFailover, StreamFrame, TokenDelta
from tests.interventions.worlds import LAYERS, checkpoint
from tests.mesh_e2e.spread import Spread, greedy, hugging_face, split, spread

pytestmark = pytest.mark.slow
LEASE_S = 0.6
PROMPT = list(range(5, 45))


def streams(mesh: Spread) -> int:
    return sum(hosted.health.active_streams for hosted in mesh.host.shards.values())


async def test_an_answer_that_is_read_slowly_keeps_its_caches_and_gives_back_its_streams(
    tmp_path: Path,
) -> None:
    manifest = await asyncio.to_thread(checkpoint, "llama")
    directory = Path(manifest.directory)
    expected, _ = await asyncio.to_thread(hugging_face, directory, PROMPT, 12)
    layers = split(LAYERS, 2)
    frames: list[StreamFrame] = []
    async with spread(directory, layers, tmp_path, session_lease_s=LEASE_S) as mesh:
        await mesh.use(layers)
        async for frame in mesh.chat(greedy(PROMPT, 12)):
            frames.append(frame)
            if isinstance(frame, TokenDelta) and len(frames) in (1, 5):
                async with asyncio.timeout(20):
                    while streams(mesh):  # noqa: ASYNC110 - hosts report every second
                        await asyncio.sleep(0.05)
                await asyncio.sleep(2 * LEASE_S)
    assert not [frame for frame in frames if isinstance(frame, ShardFailover)]
    done = frames[-1]
    assert isinstance(done, Done)
    assert list(done.token_ids) == expected
