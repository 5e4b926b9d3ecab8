"""Weights that are not, or not any more, what their node says: who fetches is told, and by whom."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from mesh.errors import TransferFailed
from mesh.models.manifest import Manifest, read_manifest
from tests.transfers.house import MODEL, house, up
from tests.transfers.test_fetcher import right, spoil, whole

__all__ = ["whole"]


async def test_a_liar_is_said_to_be_one_until_it_offers_its_weights_anew(
    tmp_path: Path, whole: Manifest
) -> None:
    copy = await asyncio.to_thread(shutil.copytree, whole.directory, tmp_path / "copy")
    async with house(tmp_path, "liar", "empty") as made:
        liar, empty = made.start("liar", copy, lies=True), made.start("empty", patience_s=1.5)
        await up(liar, empty)
        await asyncio.to_thread(spoil, copy)
        made.introduce()
        fetch = asyncio.create_task(empty.supervisor.ensure(MODEL, whole.weights_sha256))
        async with asyncio.timeout(20):
            while "liar: It gave wrong bytes" not in str(empty.supervisor.transfers):  # noqa: ASYNC110 - it says so by itself
                await asyncio.sleep(0.05)
        with pytest.raises(TransferFailed, match="liar: It gave wrong bytes of "):
            await fetch
        await asyncio.to_thread(spoil, copy)
        made.introduce()
        with pytest.raises(TransferFailed, match="liar: It gave wrong bytes of "):
            await empty.supervisor.ensure(MODEL, whole.weights_sha256)
        empty.supervisor.hear([])
        made.introduce()
        directory = await empty.supervisor.ensure(MODEL, whole.weights_sha256)
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)


async def test_weights_that_changed_on_the_disk_are_offered_as_what_they_are_now(
    tmp_path: Path, whole: Manifest
) -> None:
    copy = await asyncio.to_thread(shutil.copytree, whole.directory, tmp_path / "copy")
    async with house(tmp_path, "full", "empty") as made:
        full, empty = made.start("full", copy), made.start("empty", patience_s=0.5)
        await up(full, empty)
        made.introduce()
        await asyncio.to_thread(spoil, copy)
        for file in copy.glob("*.safetensors"):
            os.utime(file)
        with pytest.raises(TransferFailed, match="full: This node"):
            await empty.supervisor.ensure(MODEL, whole.weights_sha256)
        assert empty.events == []
        async with asyncio.timeout(20):
            while not full.supervisor.holdings:  # noqa: ASYNC110 - it says so by itself
                await asyncio.sleep(0.05)
        made.introduce()
        (now,) = full.supervisor.holdings
        assert now.weights_sha256 != whole.weights_sha256
        directory = await empty.supervisor.ensure(MODEL, now.weights_sha256)
        there = await asyncio.to_thread(read_manifest, copy)
        assert await asyncio.to_thread(right, directory, there) == set(whole.tensors)
