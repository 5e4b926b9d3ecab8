"""What is here is told, whoever gives up meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mesh.errors import Busy
from mesh.models.manifest import read_manifest
from mesh.models.partial_writer import PartialWriter
from tests.checkpoints import make_checkpoint
from tests.models.test_partial import empty_copy
from tests.transfers.absent_minded import HOLD_UP, LOOKING, OFF
from tests.transfers.house import MODEL, house, up
from tests.waiting import until


def begun(root: Path) -> Path:
    """What was begun of a checkpoint."""
    whole = make_checkpoint(root / "whole", "llama", layers=2)
    return empty_copy(read_manifest(whole, model_id=MODEL), root / "keeper/models")


async def test_who_gives_up_while_it_is_looked_what_is_here_keeps_nobody_from_hearing_it(
    tmp_path: Path,
) -> None:
    partial = await asyncio.to_thread(begun, tmp_path)
    hold_up, looking = partial.with_name(HOLD_UP), partial.with_name(LOOKING)
    async with house(tmp_path, "keeper") as made:
        fetcher = made.start("keeper", module="tests.transfers.absent_minded")
        keeper = fetcher.supervisor
        await up(fetcher)
        assert [held.model_id for held in keeper.holdings] == [MODEL]
        await asyncio.to_thread(hold_up.touch)
        removing = asyncio.create_task(keeper.remove(partial))
        await until(looking.exists)
        removing.cancel()
        await asyncio.wait([removing])
        await asyncio.sleep(0.1)  # the fetcher hears so
        await asyncio.to_thread(hold_up.unlink)
        await until(lambda: not keeper.holdings, 5.0)


async def test_what_is_removed_is_off_the_shelf_before_its_files_are_gone_and_else_on_it_again(
    tmp_path: Path,
) -> None:
    partial = await asyncio.to_thread(begun, tmp_path)
    off = partial.with_name(OFF)
    async with house(tmp_path, "keeper") as made:
        fetcher = made.start("keeper", module="tests.transfers.absent_minded")
        await up(fetcher)
        writer = await asyncio.to_thread(PartialWriter, partial)
        with pytest.raises(Busy):
            await fetcher.supervisor.remove(partial)
        assert [held.model_id for held in fetcher.supervisor.holdings] == [MODEL]
        await asyncio.to_thread(writer.close)
        await asyncio.to_thread(off.unlink, missing_ok=True)
        await fetcher.supervisor.remove(partial)
        assert off.exists()
        assert not fetcher.supervisor.holdings
