"""What is found out about a repository of the hub before any of its weights is asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.deployments.shape import shape_of
from mesh.errors import BadCheckpoint, BadRequest
from mesh.models.manifest import Manifest, read_manifest
from mesh.transfers.hub import HubSettings
from tests.checkpoints import make_checkpoint
from tests.transfers.house import MODEL, house, up
from tests.transfers.hub_standin import HubStandin
from tests.transfers.test_hub import weights_sent

METHODS = ["bitsandbytes", "hqq", "compressed-tensors"]


@pytest.fixture
def whole(tmp_path: Path) -> Manifest:
    return read_manifest(make_checkpoint(tmp_path / "whole", "llama", layers=4), model_id=MODEL)


@pytest.fixture
def hub(whole: Manifest) -> Iterator[HubStandin]:
    with HubStandin(whole.directory) as standin:
        yield standin


def quantise(directory: Path, method: str) -> None:
    """Have its config say that the weights are stored so."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))


def _add_index(directory: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _shard(directory: Path) -> None:
    _add_index(directory)
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")


async def test_plans_are_made_of_headers_alone(
    tmp_path: Path, whole: Manifest, hub: HubStandin
) -> None:
    # One that is left from a time of several files, and does not count beside the whole one.
    await asyncio.to_thread(_add_index, hub.directory)
    async with house(tmp_path, "one") as made:
        made.hub = HubSettings(hub.url)
        one = made.start("one")
        await up(one)
        directory = await one.supervisor.headers("org/toy")
        found = await asyncio.to_thread(read_manifest, directory, is_hashed=False)
        assert (found.model_id, found.weights_sha256) == ("org/toy", "")
        as_read = replace(found, model_id=MODEL, weights_sha256=whole.weights_sha256)
        assert shape_of(as_read, 256) == shape_of(whole, 256)
        first = min(entry.offset for entry in whole.tensors.values())
        assert weights_sent(hub) == first  # all before the first tensor, and no more
        asked = hub.asked["bytes"]
        assert await one.supervisor.headers("org/toy") == directory
        assert hub.asked["bytes"] == asked
        # What is kept for plans is no model that could be served, or found.
        assert not one.supervisor.holdings


@pytest.mark.parametrize("method", METHODS)
async def test_weights_stored_quantised_are_refused_before_they_are_sent(
    method: str, tmp_path: Path, whole: Manifest, hub: HubStandin
) -> None:
    await asyncio.to_thread(quantise, whole.directory, method)
    async with house(tmp_path, "one") as made:
        made.hub = HubSettings(hub.url)
        one = made.start("one")
        await up(one)
        for ask in (one.supervisor.pull, one.supervisor.headers):
            with pytest.raises(BadRequest, match=rf"stored quantised \({method}\).*GGUF"):
                await ask("org/toy")
    assert weights_sent(hub) == 0


async def test_a_neighbours_weights_stored_quantised_are_refused_as_well(
    tmp_path: Path, whole: Manifest
) -> None:
    """One of an earlier version, which says no hash of its config, may hold and offer such."""
    async with house(tmp_path, "full", "empty") as made:
        full, empty = made.start("full", whole.directory), made.start("empty", patience_s=5.0)
        await up(full, empty)
        offered = [
            replace(peer, held=replace(peer.held, files_sha256="")) for peer in full.holding()
        ]
        await asyncio.to_thread(quantise, whole.directory, "hqq")
        empty.supervisor.hear(offered)
        with pytest.raises(BadRequest, match=r"stored quantised \(hqq\)"):
            await empty.supervisor.ensure(MODEL, whole.weights_sha256)
        assert full.supervisor.sent_bytes == 0
        assert not await asyncio.to_thread(lambda: list((made.root / "empty/models").glob("toy*")))


async def test_what_does_not_begin_as_safetensors_is_refused(
    tmp_path: Path, whole: Manifest, hub: HubStandin
) -> None:
    weights = whole.directory / "model.safetensors"
    await asyncio.to_thread(weights.write_bytes, b"\xff" * 4096)
    async with house(tmp_path, "one") as made:
        made.hub = HubSettings(hub.url)
        one = made.start("one")
        await up(one)
        with pytest.raises(BadCheckpoint, match="does not begin as a safetensors file"):
            await one.supervisor.headers("org/toy")
    assert weights_sent(hub) == 8


def _adapter(directory: Path) -> None:
    (directory / "config.json").rename(directory / "adapter_config.json")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda directory: (directory / "config.json").unlink(), "org/toy has no config.json"),
        (_shard, "no model-00002-of-00002.safetensors, which its model.safetensors.index.json"),
        (_adapter, "org/toy is an adapter"),
    ],
)
async def test_what_lacks_a_file_is_refused_before_weights_are_sent(
    tmp_path: Path, hub: HubStandin, change: Callable[[Path], object], why: str
) -> None:
    await asyncio.to_thread(change, hub.directory)
    async with house(tmp_path, "one") as made:
        made.hub = HubSettings(hub.url)
        one = made.start("one")
        await up(one)
        for ask in (one.supervisor.pull, one.supervisor.headers):
            with pytest.raises(BadCheckpoint, match=why):
                await ask("org/toy")
    assert weights_sent(hub) == 0
