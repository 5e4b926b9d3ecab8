"""A model of the hub of which only a part is to stay here: all of it is hashed as it passes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mesh.errors import TransferFailed
from mesh.models.builtin import checkpoint_dir
from mesh.models.manifest import Manifest, read_manifest
from mesh.transfers.hub import HubSettings
from mesh.types import LayerRange
from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf
from tests.transfers.house import MODEL, house, up
from tests.transfers.hub_standin import HubStandin
from tests.transfers.test_fetcher import right

_DISK_MB = 90
"""64 of them are left free."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    directory = make_checkpoint(
        tmp_path_factory.mktemp("whole"), "llama", layers=8, hidden=256, vocab=9000
    )
    return read_manifest(directory, model_id=MODEL)


def test_a_disk_without_room_for_all_keeps_what_is_wanted(tmp_path: Path, whole: Manifest) -> None:
    mount = f"mount -t tmpfs -o size={_DISK_MB}m tmpfs {tmp_path}"
    unshare = ["unshare", "--mount", "--map-root-user", "--user", "bash", "-c"]
    probe = subprocess.run([*unshare, mount], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no small tmpfs here: {probe.stderr.strip()}")
    script = f"{mount} && exec {sys.executable} -m tests.transfers.small_disk {tmp_path}"
    ran = subprocess.run(
        [*unshare, f"{script} {whole.directory}"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    size = (whole.directory / "model.safetensors").stat().st_size
    assert size > (_DISK_MB - 64) << 20
    assert "MB free" in seen["refused"]
    assert seen["before_refusal"] < 20_000, "a header"
    assert seen["staged"] == 10 << 20, "it is kept where nothing can be had for it"
    assert seen["made_way"]
    assert size <= seen["passed"] < size + 20_000, "once"
    layers = [entry.name for entry in whole.layer_tensors(LayerRange(0, 2))]
    assert (seen["kept"], seen["is_known"]) == (sorted(layers), True)
    # Of what the second wants the first has one layer; the other comes from the hub again.
    more = whole.layer_tensors(LayerRange(2, 3))
    wanted = [entry.name for entry in whole.layer_tensors(LayerRange(1, 3))]
    assert seen["fetched"] == sorted(wanted)
    assert seen["ranged"] == sum(entry.nbytes for entry in more)


async def test_wrong_bytes_are_read_once_more_and_then_said(
    tmp_path: Path, whole: Manifest
) -> None:
    layers = [LayerRange(0, 2)]
    size = (await asyncio.to_thread((whole.directory / "model.safetensors").stat)).st_size
    with HubStandin(whole.directory) as hub:
        async with house(tmp_path, "one") as made:
            made.hub = HubSettings(hub.url)
            one = made.start("one")
            await up(one)
            hub.mischief.wrong = 2
            with pytest.raises(TransferFailed, match="other bytes than the hub says, 2 times"):
                await one.supervisor.pull("org/toy", layers, ends=False, drop=True)
            assert not any(held.weights_sha256 for held in one.supervisor.holdings)
            hub.mischief.wrong, hub.mischief.cut = 1, 1
            directory = await one.supervisor.pull("org/toy", layers, ends=False, drop=True)
            names = {entry.name for entry in whole.layer_tensors(layers[0])}
            assert await asyncio.to_thread(right, directory, whole) == names
            assert (await asyncio.to_thread(occupied, directory)) < size / 2


def occupied(directory: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in directory.iterdir())


async def test_a_file_that_has_passed_is_not_asked_for_again(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    file = folder / "toy-Q8_0.gguf"
    first = await asyncio.to_thread(write_gguf, checkpoint_dir(), file, "Q8_0", parts=2)
    second = first.with_name(first.name.replace("00001-of", "00002-of"))
    whole = await asyncio.to_thread(read_manifest, first)
    with HubStandin(folder) as hub:
        async with house(tmp_path, "one") as made:
            made.hub = HubSettings(hub.url)
            one = made.start("one")
            await up(one)
            wanted = [LayerRange(0, 1)]
            hub.mischief.bytes_per_s = first.stat().st_size
            pull = asyncio.create_task(
                one.supervisor.pull("org/toy", wanted, ends=False, drop=True)
            )
            header = min(second.stat().st_size, 1 << 20)
            async with asyncio.timeout(60):
                while hub.sent[second.name] <= header:  # noqa: ASYNC110 - another thread's
                    await asyncio.sleep(0.02)
            pull.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pull
            given = hub.sent[first.name]
            assert given > first.stat().st_size
            hub.mischief.bytes_per_s = 0
            # Of the file that has passed other layers were kept: they come by ranges.
            others = [LayerRange(1, 2)]
            directory = await one.supervisor.pull("org/toy", others, ends=False, drop=True)
            names = {entry.name for entry in whole.layer_tensors(LayerRange(0, 2))}
            here = await asyncio.to_thread(right, directory, whole)
            assert {entry.name for entry in whole.layer_tensors(others[0])} < here <= names
            assert hub.sent[first.name] - given < first.stat().st_size, "its header and a layer"
