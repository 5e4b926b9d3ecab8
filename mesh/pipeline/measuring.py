"""The process that measures how fast this machine is: ``python -m mesh.pipeline.measuring``.

Started by the daemon when it has to be known (`mesh.node.own_capacity`), which keeps it; ends when
it is told to, after one answer. At the lowest priority: nothing waits for it. Should memory run out
meanwhile, it is the one to go.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from mesh.capacity import Device, Measurement
from mesh.errors import MeshError
from mesh.models.builtin import checkpoint_dir
from mesh.paths import cache_dir
from mesh.pipeline.asker_speed import asker_ms
from mesh.pipeline.checkpoint import load_asker
from mesh.pipeline.commands import AskerOptions
from mesh.pipeline.model import AskerModel
from mesh.processes.headroom import ram
from mesh.processes.messages import Handlers
from mesh.processes.processor import OthersLoad
from mesh.processes.worker import Worker
from mesh.shard.commands import Measure
from mesh.shard.device import choose_device, headroom, occupy
from mesh.shard.failures import device_failed
from mesh.shard.speed import measure
from mesh.shard.threads import kept_threads
from mesh.types import ModelId

_LOWEST = 19
_OOM_SCORE = Path("/proc/self/oom_score_adj")


class MeasuringProcess(Worker):
    """Measures when it is told to."""

    def commands(self) -> Handlers:
        return {Measure: _measured}

    def unforeseen(self, error: Exception) -> MeshError:
        return device_failed(error)

    async def close(self) -> None:
        """See `Worker`."""


async def _measured(command: Measure) -> Measurement:
    """The device, then the asker on it. Raises MeshError."""

    def look() -> tuple[Device, AskerModel, float]:
        device = occupy(command.device)
        threads = kept_threads(command.threads, device.value, command.threads_dir)
        load = OthersLoad()
        found = measure(device.value, threads.value, command.dtype)
        options = AskerOptions(
            command.dtype, command.device, threads.value, cache_dir(), quant="none"
        )
        model, _ = load_asker(checkpoint_dir(), ModelId("builtin"), options)
        return found, model, load.share()

    if command.memory_only:
        return Measurement(await asyncio.to_thread(_memory, command.device))
    device, model, share = await asyncio.to_thread(look)
    return Measurement(device, await asker_ms(model), share)


def _memory(requested: str) -> Device:
    """The device as it is now, without speeds."""
    device = choose_device(requested).value
    memory = headroom(device, ram())
    return Device(str(device), memory.free_mb << 20, memory.total_mb << 20)


def main() -> None:
    """Be the process."""
    os.nice(_LOWEST)
    with contextlib.suppress(OSError):  # Linux alone has it
        _OOM_SCORE.write_text("1000")
    asyncio.run(MeasuringProcess().run())


if __name__ == "__main__":
    main()
