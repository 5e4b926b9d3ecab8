"""The process that measures how fast this machine is: ``python -m mesh.shard.measuring``.

Started by the daemon once per machine, as its result is kept (`mesh.node.own_capacity`); ends when
it is told to, after one answer. At the lowest priority: nothing waits for it.
"""

from __future__ import annotations

import asyncio
import os

from mesh.errors import MeshError, as_mesh_error
from mesh.processes.messages import Handlers
from mesh.processes.worker import Worker
from mesh.shard.commands import Measure, Measured, NotMeasured
from mesh.shard.device import choose_device
from mesh.shard.failures import device_failed
from mesh.shard.speed import measure
from mesh.shard.threads import kept_threads

_LOWEST = 19


class MeasuringProcess(Worker):
    """Measures when it is told to."""

    def commands(self) -> Handlers:
        """See `Worker`."""
        return {Measure: self._start}

    async def close(self) -> None:
        """See `Worker`."""

    def _start(self, command: Measure) -> None:
        self.spawn(self._measure(command), "measure")

    async def _measure(self, command: Measure) -> None:
        def work() -> Measured:
            device = choose_device(command.device)
            threads = kept_threads(command.threads, device.value, command.threads_dir)
            return Measured(measure(device.value, threads.value))

        try:
            self.say(await as_mesh_error(asyncio.to_thread(work), "measuring", device_failed))
        except MeshError as error:
            self.say(NotMeasured(error))


def main() -> None:
    """Be the process."""
    os.nice(_LOWEST)
    asyncio.run(MeasuringProcess().run())


if __name__ == "__main__":
    main()
