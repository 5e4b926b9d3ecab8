"""A shard process whose memory is changed from outside withdraws the shard and loads it again."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mesh.errors import WeightsCorrupted, WeightsDamaged
from mesh.models.manifest import read_manifest
from mesh.processes.attempts import MAX_RELOADS
from mesh.shard.local_shard import LocalShard
from mesh.shard.scheduler import Scheduler
from mesh.shard.supervisor import ShardSupervisor
from mesh.shard.weight_check import WeightCheck
from mesh.shard.weight_watch import WeightWatch
from mesh.types import ShardId, WireDtype
from tests import secure
from tests.checkpoints import make_checkpoint
from tests.shard.asker import Asker
from tests.shard.spans import rows
from tests.transfers.test_fetcher import spoil

SHARD = ShardId("toy:1-3")
WEIGHT = "model.layers.2.mlp.up_proj.weight"
TIMEOUT_S = 60.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="writes to /proc/PID/mem")


def strike(pid: int, file: Path, offset: int) -> None:
    """Change a bit of what another process has mapped of `file`, read-only or not."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if line.endswith(str(file)):
            area, _, first = line.split()[:3]
            start, stop = (int(end, 16) for end in area.split("-"))
            place = start + offset - int(first, 16)
            if start <= place < stop:
                break
    else:
        raise AssertionError(f"{file} is not mapped")
    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    try:
        (before,) = os.pread(memory, 1, place)
        os.pwrite(memory, bytes([before ^ 64]), place)
    finally:
        os.close(memory)


class Struck:
    """A shard process, and what the daemon thinks of it."""

    def __init__(self, directory: Path, cache_dir: Path | None = None) -> None:
        self._changed = asyncio.Event()
        self.manifest = read_manifest(
            make_checkpoint(directory, "llama", layers=4, dtype="float16")
        )
        shard = {
            "directory": str(directory), "model_id": "toy", "layers": "1-3", "dtype": "fp16",
            "advertise_host": "127.0.0.1", "cache_dir": cache_dir,
        }  # fmt: skip
        requests = [secure.request(**shard)]
        self.host = ShardSupervisor(secure.start_command(), requests, self._changed.set)

    async def until(self, so: Callable[[], object]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not so():
                self._changed.clear()
                await self._changed.wait()

    async def asker(self) -> Asker:
        asker = Asker()
        assert self.host.port is not None
        asker.use(await secure.dial("127.0.0.1", self.host.port, asker))
        return asker

    async def answer(self, asker: Asker, session: int) -> torch.Tensor:
        """What three rows become; the session stays open."""
        await asker.open(
            session, weights_sha256=self.manifest.weights_sha256, start=1, stop=4,
            wire_dtype=WireDtype.FP32,
        )  # fmt: skip
        return await asker.step(0, 0, rows(3), session)

    def strike(self) -> None:
        entry = self.manifest.tensors[WEIGHT]
        assert self.host.pid is not None
        strike(self.host.pid, entry.file, entry.offset + entry.nbytes // 2)

    def served(self) -> LocalShard | None:
        return self.host.shards.get(SHARD)


async def test_weights_that_change_in_memory_are_withdrawn_and_loaded_again(tmp_path: Path) -> None:
    here = await asyncio.to_thread(Struck, tmp_path)
    here.host.start()
    try:
        await secure.settled(here.host)
        asker = await here.asker()
        right = await here.answer(asker, 1)
        for time in range(1, MAX_RELOADS + 2):
            here.strike()
            await here.until(lambda: not here.served())
            error = here.host.failed[SHARD]
            assert isinstance(error, WeightsCorrupted)
            assert "up_proj.weight in memory is not what was loaded" in str(error)
            if time > MAX_RELOADS:
                assert "test this machine's memory" in error.fix
                break
            await here.until(here.served)
            assert not here.host.failed
            hosted = here.served()
            assert hosted is not None
            assert any("loaded again" in reason for reason in hosted.facts["reasons"])
            assert torch.equal(await here.answer(await here.asker(), 1), right)
        with pytest.raises(Exception, match="serves no shard"):
            await here.answer(await here.asker(), 1)
    finally:
        await here.host.stop()


async def test_weights_that_change_on_the_disk_are_no_fault_of_the_memory(tmp_path: Path) -> None:
    """They are mapped: what is in memory changes with the file, and loading it again is no help."""
    here = await asyncio.to_thread(Struck, tmp_path / "toy", cache_dir=tmp_path / "cache")
    here.host.start()
    try:
        await secure.settled(here.host)
        right = await here.answer(await here.asker(), 1)
        await asyncio.to_thread(spoil, here.manifest.directory, WEIGHT)
        await here.until(lambda: isinstance(here.host.failed.get(SHARD), WeightsDamaged))
        error = here.host.failed[SHARD]
        assert f"{WEIGHT} in {here.manifest.tensors[WEIGHT].file} is not what it was" in str(error)
        await asyncio.to_thread(spoil, here.manifest.directory, WEIGHT)  # back
        here.host.try_again()
        await here.until(here.served)
        assert torch.equal(await here.answer(await here.asker(), 1), right)
        for _ in range(MAX_RELOADS + 1):  # as often as a bad disk has it so
            here.host.distrust(SHARD, error)
            await here.until(lambda: not here.served())
            await here.until(here.served)
        assert torch.equal(await here.answer(await here.asker(), 1), right)
    finally:
        await here.host.stop()


class Counted:
    """A small layer's weights, and how often they were looked at."""

    def __init__(self) -> None:
        self.layer = torch.nn.Linear(8, 8)
        self.check = WeightCheck(self.layer, {})

    def weight_check(self) -> WeightCheck:
        return self.check


async def test_many_small_shards_cost_no_more_than_one() -> None:
    shards, turn, scheduler = [Counted() for _ in range(8)], asyncio.Lock(), Scheduler()
    watches = [WeightWatch(lambda each=each: [each], scheduler, turn) for each in shards]
    looking = asyncio.gather(*(watch.changed() for watch in watches))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(looking, 0.8)
    scheduler.close()
    assert 1 <= sum(each.check.rounds for each in shards) <= 4
