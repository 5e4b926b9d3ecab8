"""What the hub gives, in this process: listings that break off, downloads that are cut short, and
where the files go in the end."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx  # noqa: F401 - imported by the hub on its first request, which blocks
import pytest

from mesh.errors import BadCheckpoint, Busy
from mesh.models.builtin import checkpoint_dir
from mesh.models.partial_draft import create_sparse, discard
from mesh.models.partial_writer import lock_directory
from mesh.transfers.fetches import kept_in
from mesh.transfers.fetching import WantedLayers
from mesh.transfers.hub import Hub, HubSettings
from mesh.transfers.hub_download import HubDownload
from mesh.transfers.hub_files import HubModel
from mesh.transfers.hub_pull import HubPull
from mesh.transfers.meter import Meter
from mesh.transfers.pacing import Pace
from mesh.types import LayerRange, ModelId
from tests.transfers.hub_standin import HubStandin


@pytest.fixture
def hub() -> Iterator[HubStandin]:
    with HubStandin(checkpoint_dir()) as standin:
        yield standin


async def test_a_listing_that_breaks_off_is_asked_for_anew(hub: HubStandin) -> None:
    hub.mischief.cut_listings = 1
    asking = Hub(HubSettings(hub.url))
    try:
        repository = await asking.repository("org/toy")
    finally:
        await asking.close()
    assert "model.safetensors" in repository.files
    assert hub.asked["api"] == 2


def test_what_is_no_checkpoint_is_in_the_way_and_stays(tmp_path: Path) -> None:
    there = tmp_path / "toy@0123"
    there.mkdir()
    (there / "diary.txt").write_text("dear diary")
    with pytest.raises(BadCheckpoint, match="in the way"):
        create_sparse(there, {}, {"config.json": b"{}"}, "config.json")
    assert [file.name for file in there.iterdir()] == ["diary.txt"]
    discard(there)
    create_sparse(there, {}, {"config.json": b"{}"}, "config.json")
    assert [file.name for file in there.iterdir()] == ["config.json"]


@pytest.mark.parametrize("after", [1, 2])
async def test_what_is_cancelled_has_written_each_byte_once(
    hub: HubStandin, tmp_path: Path, after: int
) -> None:
    """`after` so many writes, in the middle of which the cancellation comes."""
    name = "model.safetensors"
    content = await asyncio.to_thread((hub.directory / name).read_bytes)
    written, ended, begun = bytearray(), [0], asyncio.Event()
    loop = asyncio.get_running_loop()

    def into(data: bytes) -> None:
        if ended[0] == after - 1:
            loop.call_soon_threadsafe(begun.set)
            time.sleep(0.2)
        written.extend(data)
        ended[0] += 1

    asking = Hub(HubSettings(hub.url))
    try:
        repository = await asking.repository("org/toy")
        download = HubDownload(asking, repository, Pace(), Meter())
        pouring = asyncio.create_task(download.pour(repository.files[name], 0, into))
        await begun.wait()
        pouring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pouring
    finally:
        await asking.close()
    assert ended[0] >= after, "nobody writes any more once it has ended"
    assert 0 < len(written) < len(content)
    assert content.startswith(written)


@pytest.mark.parametrize("layers", [None, (LayerRange(0, 1),)], ids=["all", "one layer"])
async def test_who_gives_up_while_it_becomes_a_checkpoint_leaves_it_to_nobody_before(
    hub: HubStandin, tmp_path: Path, layers: tuple[LayerRange, ...] | None
) -> None:
    """What reads its hashes goes on in its thread: whoever pulled it again would be there, too."""
    loop, go_on = asyncio.get_running_loop(), threading.Event()
    made: asyncio.Future[Path] = loop.create_future()
    told: list[Path] = []

    def then(directory: Path) -> None:
        loop.call_soon_threadsafe(made.set_result, directory)
        go_on.wait(10)
        told.append(kept_in(directory).place)

    asking = Hub(HubSettings(hub.url))
    try:
        model = HubModel(await asking.repository("org/toy"), ModelId("org/toy"), ())
        pull = HubPull(asking, model, tmp_path, Pace(), Meter())
        pulling = asyncio.create_task(
            pull.run(WantedLayers(layers), drop=layers is not None, then=then)
        )
        directory = await made
        pulling.cancel()
        _, left = await asyncio.wait([pulling], timeout=0.1)
        assert left
        with pytest.raises(Busy):
            await asyncio.to_thread(lock_directory, directory)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await pulling
    finally:
        go_on.set()
        await asking.close()
    assert told == [directory]
    os.close(await asyncio.to_thread(lock_directory, directory))
