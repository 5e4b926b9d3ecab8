"""How far a load is: counted where it happens, told now and then, shown by the supervisor."""

from __future__ import annotations

import asyncio
from typing import Any

from mesh.models.progress import Progress
from mesh.processes.lifecycle import LoadNeed
from mesh.processes.messages import Loads, ProcessMessage
from mesh.processes.supervisor import Supervisor
from tests.lively import Count, Lively
from tests.processes.test_supervisor import Watched
from tests.simulation.virtual_loop import run_virtually

LOADING = LoadNeed("m:0-3", 5, 100)


class Daemon:
    """Remembers what a process says."""

    def __init__(self) -> None:
        self.said: list[ProcessMessage] = []

    def send(self, message: ProcessMessage, *, soon: bool = False) -> None:
        self.said.append(message)


def test_progress_is_told_five_times_a_second_at_most_and_only_while_something_loads() -> None:
    daemon = Daemon()

    async def main() -> None:
        process, progress = Lively(daemon), Progress()
        process.say_loading(LOADING, progress)
        await asyncio.sleep(1.0)
        assert daemon.said == [Loads(LOADING)], "of what has not begun there is nothing to say"
        progress.begin("reading", 1000)
        for _ in range(1000):
            progress.add(1)
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)
        process.say_loading(None)
        progress.add(1)
        await asyncio.sleep(1.0)

    run_virtually(main)
    told = [one for one in daemon.said if isinstance(one, Loads) and one.phase]
    assert 40 <= len(told) <= 53, "10 s"
    assert [one.done_bytes for one in told] == sorted({one.done_bytes for one in told})
    assert told[-1] == Loads(LOADING, "reading", 1000, 1000), "and nothing twice"
    assert daemon.said[-1] == Loads(None), "nothing behind the end"


async def shown(process: Supervisor, total: int) -> dict[str, Any]:
    """The load that is shown, once it is of so many bytes."""
    async with asyncio.timeout(20):
        while True:
            load = process.load()
            if load is not None and load["total_bytes"] == total:
                return load
            await asyncio.sleep(0.01)


async def test_the_supervisor_shows_how_far_the_load_under_way_is() -> None:
    process = Watched()
    process.start()
    try:
        await process.up()
        assert process.load() is None
        assert process.tell(Count("reading", 30, 100))
        load = await shown(process, 100)
        assert (load["name"], load["need_mb"]) == ("m", 7)
        assert (load["phase"], load["done_bytes"], load["total_bytes"]) == ("reading", 30, 100)
        assert process.tell(Count("", 0, 0))
        load = await shown(process, 0)
        assert load["phase"] == "", "what is said of one load says nothing of the next"
    finally:
        await process.stop()
