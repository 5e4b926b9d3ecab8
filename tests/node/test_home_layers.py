"""The layers a node loads for itself alone, with a real shard process."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from mesh.api.services import LackKind
from mesh.config import Config
from mesh.errors import NotEnoughMemory, WeightsMissing
from mesh.models.local import LocalModel
from mesh.models.manifest import Manifest
from mesh.models.partial_writer import PartialWriter
from mesh.node import wiring
from mesh.node.home_layers import HomeLayers, load_at_home
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import LayerRange, ModelId
from tests import secure
from tests.models.test_partial import empty_copy, stored
from tests.shard.spans import checkpoint

LAYER_MB = 10


@pytest.mark.slow
async def test_what_is_loaded_to_check_others_is_bounded_in_all() -> None:
    manifest = await asyncio.to_thread(checkpoint)
    layers = manifest.total_layers
    model = LocalModel(
        ModelId("toy"), str(manifest.directory), "", layers, None, None, layers * LAYER_MB
    )
    limit = {"research": {"distributed_inference": {"spot_check_home_mb": 3 * LAYER_MB}}}
    config = await asyncio.to_thread(Config.model_validate, limit)
    changed = asyncio.Event()
    host = ShardSupervisor(secure.start_command(), (), changed.set)
    home = HomeLayers(config, [model], host, lambda: None)
    one, two, three = LayerRange(0, 2), LayerRange(2, 4), LayerRange(3, 4)
    with pytest.raises(NotEnoughMemory):
        await home.judge(model, one)
    host.start()
    try:
        async with asyncio.timeout(60):
            found = await asyncio.gather(
                home.judge(model, one), home.judge(model, two), return_exceptions=True
            )
            assert [type(each).__name__ for each in found] == ["LocalShard", "NotEnoughMemory"]
            assert await home.judge(model, one) is found[0]
            await home.judge(model, three)
            assert host.pid is not None
            os.kill(host.pid, signal.SIGKILL)
            while host.private:
                changed.clear()
                await changed.wait()
            await home.judge(model, two)  # what ended with the process takes no room
    finally:
        await host.stop()


@pytest.mark.slow
async def test_what_was_to_be_loaded_before_it_was_fetched_is_loaded_once_it_is(
    tmp_path: Path,
) -> None:
    whole = await asyncio.to_thread(checkpoint)
    part = await asyncio.to_thread(empty_copy, whole, tmp_path)
    layers = LayerRange(0, 2)
    model = LocalModel(ModelId("toy"), str(part), whole.weights_sha256, 4, None, None, LAYER_MB)
    config = await asyncio.to_thread(Config)
    host = ShardSupervisor(secure.start_command(), (), lambda: None)
    host.start()
    try:
        async with asyncio.timeout(60):
            await host.wait_up()
            with pytest.raises(WeightsMissing):
                await load_at_home(config, model, layers, host)
            await asyncio.to_thread(fill, part, whole, layers)
            served = await host.serve(wiring.shard(config, model, layers))
            assert served.descriptor.layers == layers
    finally:
        await host.stop()


def fill(part: Path, whole: Manifest, layers: LayerRange) -> None:
    with PartialWriter(part) as writer:
        for entry in whole.layer_tensors(layers):
            writer.put(entry.name, 0, [stored(whole, entry.name)])


@pytest.mark.slow
async def test_what_does_not_fit_holds_up_nothing_else() -> None:
    manifest = await asyncio.to_thread(checkpoint)
    total, directory = manifest.total_layers, str(manifest.directory)
    rest = LayerRange(1, total)
    small = LocalModel(ModelId("small"), directory, "", total, None, rest, total * LAYER_MB)
    large = LocalModel(ModelId("large"), directory, "", total, None, rest, total * 10 * LAYER_MB)
    limits = {
        "routing": {"keep_first": 1},
        "research": {"distributed_inference": {"host": {"shard_max_vram_mb": 2 * LAYER_MB}}},
    }
    config = await asyncio.to_thread(Config.model_validate, limits)
    changed = asyncio.Event()
    host = ShardSupervisor(secure.start_command(), (), changed.set)
    home = HomeLayers(config, [large], host, changed.set)
    host.start()
    home.start()
    try:
        async with asyncio.timeout(60):
            await changed.wait()
            while home.lacking()[0].code == LackKind.LOADING:
                changed.clear()
                await changed.wait()
            home.add(small)
        async with asyncio.timeout(8):  # the other one is tried again after ten
            while len(home.lacking()) > 1:
                changed.clear()
                await changed.wait()
        assert home.lacking()[0].said.startswith("large:0-0 has to run on this machine")
    finally:
        await home.stop()
        await host.stop()


@pytest.mark.slow
async def test_what_has_to_run_here_and_is_served_here_is_not_lacking() -> None:
    manifest = await asyncio.to_thread(checkpoint)
    total = manifest.total_layers
    model = LocalModel(ModelId("toy"), str(manifest.directory), "", total, None, None, LAYER_MB)
    config = await asyncio.to_thread(Config.model_validate, {"routing": {"keep_first": 1}})
    host = ShardSupervisor(secure.start_command(), (), lambda: None)
    home = HomeLayers(config, [model], host, lambda: None)
    host.start()
    try:
        async with asyncio.timeout(60):
            await host.serve(wiring.shard(config, model, LayerRange(0, 1)))
        assert home.lacking() == []
        assert home.shards(model.model_id) == [], "it is offered as what is served is"
    finally:
        await host.stop()


@pytest.mark.slow
async def test_layers_on_a_disk_that_was_away_are_loaded_once_it_is_there(tmp_path: Path) -> None:
    manifest = await asyncio.to_thread(checkpoint)
    total, disk = manifest.total_layers, tmp_path / "disk"
    disk.symlink_to("n" * 256)  # a name that no disk takes: looking there fails, as on a lost one
    model = LocalModel(ModelId("toy"), str(disk), "", total, None, None, LAYER_MB)
    config = await asyncio.to_thread(Config.model_validate, {"routing": {"keep_first": 1}})
    changed = asyncio.Event()
    host = ShardSupervisor(secure.start_command(), (), changed.set)
    home = HomeLayers(config, [model], host, changed.set)
    host.start()
    home.start()
    try:
        async with asyncio.timeout(60):
            while home.lacking()[0].code is not LackKind.FAILED:
                changed.clear()
                await changed.wait()
            disk.unlink()
            disk.symlink_to(manifest.directory)
            home.add(model)
            while home.lacking():
                changed.clear()
                await changed.wait()
    finally:
        await home.stop()
        await host.stop()
