"""A fetcher that nobody needs is not there, and one is as soon as somebody asks."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from mesh.models.manifest import read_manifest
from mesh.processes.lifecycle import ProcessState
from mesh.transfers.commands import LocalCheckpoint
from tests.checkpoints import make_checkpoint
from tests.transfers.house import MODEL, Fetcher, house, up


async def test_whoever_knocks_and_whoever_fetches_wakes_one(tmp_path: Path) -> None:
    directory = await asyncio.to_thread(
        make_checkpoint, tmp_path / "whole", "llama", layers=2, hidden=256, vocab=9000
    )
    whole = await asyncio.to_thread(read_manifest, directory, model_id=MODEL)
    size = sum(entry.nbytes for entry in whole.tensors.values())
    async with house(tmp_path, "giver", "taker") as made:
        giver = made.start("giver", directory, idle_s=0.4, bytes_per_s=size / 2)
        taker = made.start("taker", idle_s=0.4)
        await up(giver, taker)
        port, held = giver.supervisor.port, giver.supervisor.holdings
        await resting(giver, taker)
        assert giver.supervisor.is_answering
        assert (giver.supervisor.port, giver.supervisor.holdings) == (port, held)
        assert giver.supervisor.standing.trouble is None
        made.introduce()
        await taker.supervisor.ensure(MODEL, whole.weights_sha256)  # takes longer than 0.4 s
        assert [f.supervisor.starts for f in (giver, taker)] == [2, 2]
        await resting(giver, taker)
        assert giver.supervisor.sent_bytes == size


async def test_one_that_nobody_has_asked_waits_less_than_one_that_was(tmp_path: Path) -> None:
    directory = await asyncio.to_thread(make_checkpoint, tmp_path / "whole", "llama", layers=2)
    whole = await asyncio.to_thread(read_manifest, directory, model_id=MODEL)
    async with house(tmp_path, "giver", "taker", "other") as made:
        giver = made.start("giver", directory)
        taker = made.start("taker")
        await up(giver, taker)
        made.introduce()
        await taker.supervisor.ensure(MODEL, whole.weights_sha256)
        other = made.start("other", unasked_s=0.4)
        await up(other)
        assert other.supervisor.holdings == ()
        await resting(other)
        assert [f.supervisor.starts for f in (giver, taker)] == [1, 1]


async def test_what_is_deleted_by_hand_is_not_advertised_any_more(tmp_path: Path) -> None:
    directory = await asyncio.to_thread(make_checkpoint, tmp_path / "whole", "llama", layers=2)
    async with house(tmp_path, "giver") as made:
        giver = made.start("giver", directory)
        await up(giver)
        assert [held.directory for held in giver.supervisor.holdings] == [directory]
        await asyncio.to_thread(shutil.rmtree, directory)
        async with asyncio.timeout(20):
            while giver.supervisor.holdings:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_what_is_offered_while_one_starts_is_offered(tmp_path: Path) -> None:
    directory = await asyncio.to_thread(make_checkpoint, tmp_path / "whole", "llama", layers=2)
    async with house(tmp_path, "giver") as made, asyncio.timeout(20):
        giver = made.start("giver").supervisor
        while giver.pid is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        giver.offer(LocalCheckpoint(MODEL, directory))
        while not giver.holdings:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert [held.directory for held in giver.holdings] == [directory]


async def resting(*fetchers: Fetcher) -> None:
    """Until none of them has a process."""
    async with asyncio.timeout(60):
        for fetcher in fetchers:
            while fetcher.supervisor.state is not ProcessState.RESTING:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert fetcher.supervisor.pid is None
