"""Every screen at two sizes, compared with what is kept in `snapshots`.

``python -m tests.tui.snapshots`` writes them again; look at what changed before you keep it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.tui.conftest import Daemon, running

KEPT = Path(__file__).parent / "snapshots"
SIZES = [(80, 24), (120, 40)]
SCREENS = {
    "overview": "22 ms of 32 ms", "nodes": "address wss", "models": "3 min left",
    "chat": "Ask llama", "jobs": "loss 0.25", "log": "peer_up", "doctor": "can compute back",
}  # fmt: skip
"""Each with something that it shows once it is complete."""


async def tour(daemon: Daemon, size: tuple[int, int]) -> dict[str, str]:
    """What each screen shows, one after the other in one app; at last without a daemon."""
    daemon.house.stream.emit("peer_up", name="attic", address="192.0.2.7:8421")
    daemon.house.stream.emit("shard_failover", lost="llama:8-15", replaced_by=["llama:8-15"])
    found = {}
    async with running(daemon.connect, size) as top:
        await top.until("working")
        await top.until(lambda: len(top.app.journal.lines) == 2)
        for number, screen in enumerate(SCREENS, 1):
            await top.press(f"f{number}")
            found[screen] = await top.until(SCREENS[screen])
        await top.press("f3", "down")
        found["coming"] = await top.until("needs 900 MiB")
        await top.press("e")
        found["evict"] = await top.until("Yes, evict it")
        await top.press("escape", "s", "enter")
        found["scale"] = await top.until("a cable to attic")
        await top.press("escape", "f5", "k")
        found["confirm"] = await top.until("Yes, end it")
        await top.press("escape", "f1")
        stopping = asyncio.create_task(daemon.stop())
        lines = (await top.until("The daemon has stopped")).splitlines()  # it is tried in vain soon
        await stopping
        lines[0] = lines[0].partition("again")[0]  # what counts down differs from run to run
        found["lost"] = "\n".join(lines) + "\n"
    return found


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_screens_look_as_kept(daemon: Daemon, size: tuple[int, int]) -> None:
    found = await tour(daemon, size)
    kept = await asyncio.to_thread(read, size)
    assert set(kept) == set(found)
    for screen, text in found.items():
        assert text == kept[screen], f"{screen} differs; it shows now:\n{text}"


def read(size: tuple[int, int]) -> dict[str, str]:
    """The kept screens of a size."""
    files = KEPT.glob(f"*-{size[0]}x{size[1]}.txt")
    return {path.name.partition("-")[0]: path.read_text("utf-8") for path in files}
