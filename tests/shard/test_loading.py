"""What does not fit is refused before it is loaded; what killed its process is not loaded again."""

from __future__ import annotations

import asyncio
import math
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from mesh.errors import DeviceFailed, MeshError, NotEnoughMemory, ShardCorrupt
from mesh.processes.attempts import Attempts
from mesh.processes.headroom import ram
from mesh.shard.footprint import position_bytes
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import LayerRange, ShardId
from tests import secure
from tests.cgroups import limited_group
from tests.processes.test_progress import shown
from tests.shard import doomed_host
from tests.shard.hosts import hosted
from tests.shard.spans import checkpoint

DOOMED = "tests.shard.doomed_host"
LAYERS = LayerRange(1, 4)


@pytest.fixture(autouse=True)
def _made() -> None:
    checkpoint()  # which blocks, the first time


def shard(model_id: str = "toy", *, caches_mb: int = 0) -> dict[str, Any]:
    """A load command; `caches_mb` is what its sessions are promised."""
    manifest = checkpoint()
    tokens = caches_mb * 2**20 // position_bytes(manifest, LAYERS, 4)
    return {
        "directory": str(manifest.directory), "model_id": model_id, "layers": str(LAYERS),
        "dtype": "fp32", "kv_tokens": max(1024, tokens),
    }  # fmt: skip


def named(model_id: str) -> ShardId:
    return ShardId(f"{model_id}:{LAYERS}")


async def test_what_does_not_fit_is_refused_with_what_it_needs_and_what_there_is() -> None:
    total_mb = psutil.virtual_memory().total >> 20
    async with hosted(shard(caches_mb=2 * total_mb), shard("small")) as (host, _):
        error = host.failed[named("toy")]
        assert isinstance(error, NotEnoughMemory)
        assert f"{2 * total_mb} for caches" in error.message
        assert "MiB are free" in error.message
        assert "--layers" in error.fix
        assert [each.descriptor.model_id for each in host.serving] == ["small"]
        with pytest.raises(NotEnoughMemory):
            await host.ensure(secure.request(**shard("at home", caches_mb=2 * total_mb)))


async def most_mb() -> int:
    """Most of the memory that is free now: others who come and go here take it not, nor do they
    give so much again."""
    return int((await asyncio.to_thread(ram)).free_mb * 0.7)


async def test_an_idle_shard_goes_for_one_that_is_wanted_and_its_footprint_is_told() -> None:
    much_mb = await most_mb()
    async with hosted(shard("first", caches_mb=much_mb)) as (host, sees):
        (first,) = host.serving
        assert first.descriptor.vram_required_mb > much_mb
        await sees(lambda: first.health.memory is not None)
        before = first.health.memory
        assert before is not None
        assert (before.weights_mb, before.caches_mb) == (1, 0)
        second = await host.ensure(secure.request(**shard("second", caches_mb=much_mb)))
        await sees(lambda: first.health.memory != before)
        assert first.health.memory is not None
        assert first.health.memory.total_mb == 0, "it is here when somebody asks, at no cost"
        await sees(lambda: second.health.memory is not None)
        assert host.health.memory is not None
        assert 0 < host.health.memory.device.free_mb <= host.health.memory.device.total_mb


async def test_a_load_that_killed_its_process_is_told_and_not_repeated() -> None:
    doomed = shard(doomed_host.KILLED, caches_mb=await most_mb())
    attempts = Attempts(first_wait_s=0.5)
    async with hosted(doomed, shard("good"), module=DOOMED, attempts=attempts) as (host, sees):
        error = host.failed[named(doomed_host.KILLED)]
        assert isinstance(error, NotEnoughMemory)
        assert "was killed" in error.message
        await sees(lambda: len(host.serving) == 1)
        assert host.starts == 2
        for _ in range(5):  # far beyond the wait: there is still no more memory than there was
            await asyncio.sleep(1.0)
            assert host.starts == 2
        with pytest.raises(NotEnoughMemory):
            await host.ensure(secure.request(**doomed))
        host.try_again()
        await sees(lambda: host.starts == 3 and len(host.serving) == 1)
        assert list(host.failed) == [named(doomed_host.KILLED)]


async def test_a_load_that_failed_for_a_passing_reason_is_tried_again() -> None:
    attempts, stumbling = Attempts(first_wait_s=2.0), shard(doomed_host.STUMBLES)
    async with hosted(stumbling, module=DOOMED, attempts=attempts) as (host, sees):
        assert isinstance(host.failed[named(doomed_host.STUMBLES)], DeviceFailed)
        await sees(lambda: len(host.serving) == 1)
        assert not host.failed
        assert host.starts == 1
        # It is here: another failure, some day, is a first one.
        assert attempts.why_not(named(doomed_host.STUMBLES), 0.0, 0) is None


async def test_what_failed_for_this_node_alone_is_loaded_at_once_where_it_is_to_be_served() -> None:
    total_mb = psutil.virtual_memory().total >> 20
    async with secure.hosting(None) as host:
        much, little = (secure.request(**shard(caches_mb=mb)) for mb in (2 * total_mb, 0))
        for request in (much, little):  # it is left alone for a while
            with pytest.raises(NotEnoughMemory, match=f"{2 * total_mb} for caches"):
                await host.ensure(request)
        served = await host.serve(little)
        assert host.serving == [served]


class ToldRoom(Attempts):
    """Takes note of the room that it is told of: at failures, and when it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.at_failures: list[int | None] = []
        self.now_mb = 0

    def failed(self, name: str, error: MeshError, now: float, room_mb: int | None = None) -> None:
        self.at_failures.append(room_mb)
        super().failed(name, error, now, room_mb)

    def why_not(self, name: str, now: float, free_mb: int, room_mb: int = 0) -> MeshError | None:
        self.now_mb = room_mb
        return super().why_not(name, now, free_mb, room_mb)


async def test_how_much_room_there_is_decides_when_what_found_too_little_is_tried() -> None:
    total_mb, attempts = psutil.virtual_memory().total >> 20, ToldRoom()
    async with hosted(shard(caches_mb=2 * total_mb), attempts=attempts) as (host, sees):
        (at_failure,) = attempts.at_failures
        assert at_failure is not None
        assert 0 <= at_failure <= total_mb
        await sees(lambda: host.health.memory is not None)
        await sees(lambda: 0 < attempts.now_mb <= total_mb)


@pytest.fixture
def group() -> Any:
    with limited_group(1024) as directory:
        yield directory


async def test_a_kernel_that_runs_out_of_memory_is_believed(
    group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(doomed_host.GROUP, str(group))
    async with hosted(shard(doomed_host.HOG), shard("good"), module=DOOMED) as (host, sees):
        error = host.failed[named(doomed_host.HOG)]
        assert isinstance(error, NotEnoughMemory)
        assert "was killed" in error.message
        await sees(lambda: len(host.serving) == 1)
        assert host.starts == 2


async def test_a_load_under_way_says_how_far_it_is() -> None:
    lingers = secure.request(**shard(doomed_host.LINGERS))
    host = ShardSupervisor(secure.start_command(), [lingers], lambda: None, module=DOOMED)
    host.start()
    try:
        load = await shown(host, 100)
        assert load["name"] == named(doomed_host.LINGERS)
        assert (load["phase"], load["done_bytes"]) == ("reading", 50)
    finally:
        await host.stop()


async def test_a_span_that_gives_no_numbers_is_not_served(tmp_path: Path) -> None:
    directory = tmp_path / "broken"

    def spoil() -> None:
        shutil.copytree(checkpoint().directory, directory)
        file = directory / "model.safetensors"
        tensors = load_file(file)
        name = next(each for each in tensors if ".layers.3." in each and "norm" in each)
        tensors[name] = torch.full_like(tensors[name], math.nan)
        save_file(tensors, file, {"format": "pt"})

    await asyncio.to_thread(spoil)
    broken = {**shard("broken"), "directory": str(directory), "quant": "int8"}
    async with hosted(broken, shard("good")) as (host, _):
        error = host.failed[named("broken")]
        assert isinstance(error, ShardCorrupt)
        assert "Layers 1-3" in error.message
        assert [each.descriptor.model_id for each in host.serving] == ["good"]
