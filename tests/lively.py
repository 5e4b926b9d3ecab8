"""A child process for tests of who supervises it: does what it is told, and says its loop turns."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from mesh.errors import DeviceLost, PortInUse
from mesh.models.progress import Progress
from mesh.processes.lifecycle import LoadNeed
from mesh.processes.messages import Handlers, ProcessMessage, Request, Start
from mesh.processes.worker import Worker


class Work(ProcessMessage, frozen=True):
    """Work beside the loop for so long."""

    seconds: float


NOWHERE = "nowhere"
"""A process of a node that is called so cannot start."""


class Repeat(Request[str], frozen=True):
    """Answer with this text, after so long; none fails in a way nobody foresaw."""

    text: str
    pause_s: float = 0.0


class FailForGood(ProcessMessage, frozen=True):
    """As if the device were gone."""


class Garble(ProcessMessage, frozen=True):
    """Say something that no supervisor understands: this."""


class Count(ProcessMessage, frozen=True):
    """Begin a load of which so much is done already."""

    phase: str
    done_bytes: int
    total_bytes: int


class Lively(Worker):
    """Does what it is told."""

    def commands(self) -> Handlers:
        """See `Worker`."""
        return {
            Start: self._start,
            Repeat: self._repeat,
            Work: self._work,
            FailForGood: lambda _: self.end_failed(
                DeviceLost("The device fell off the bus.", fix="Look.")
            ),
            Garble: self.say,
            Count: self._count,
        }

    async def _start(self, command: Start[Any]) -> None:
        if command.hello.node_name == NOWHERE:
            raise PortInUse("The port is taken.", fix="Free it.")

    async def _repeat(self, request: Repeat) -> str:
        if request.pause_s:
            await asyncio.sleep(request.pause_s)
        if not request.text:
            raise ValueError("there is nothing to repeat")
        return request.text

    async def close(self) -> None:
        """There is nothing to close."""

    def _count(self, command: Count) -> None:
        progress = Progress()
        progress.now = (command.phase, command.done_bytes, command.total_bytes)
        self.say_loading(LoadNeed("m", 7, 100), progress)

    def _work(self, command: Work) -> None:
        asyncio.get_running_loop().run_in_executor(None, time.sleep, command.seconds)


def main() -> None:
    """Be the process."""
    asyncio.run(Lively().run())
