"""A thousand events a second: all that the filter shows is there, in order; memory is bounded."""

from __future__ import annotations

import asyncio

from textual.widgets import Log

from tests.tui.conftest import Daemon, running
from tui.journal import KEPT, Journal


async def test_nothing_that_the_filter_shows_is_lost_in_a_flood(daemon: Daemon) -> None:
    async with running(daemon.connect) as top:
        await top.until("working")
        await top.press("6", "slash", *"wanted")
        for number in range(3000):
            kind = "wanted" if number % 10 == 0 else "peer_seen"
            daemon.house.stream.emit(kind, number=number)
            if number % 10 == 0:
                await asyncio.sleep(0.01)
        lines = top.app.screen.query_one(Log)
        await top.until(lambda: len(lines.lines) >= 300)
        shown = [line.rpartition("number=")[2] for line in lines.lines if "number=" in line]
        assert shown == [str(number) for number in range(0, 3000, 10)]


def event(number: int, kind: str) -> dict[str, object]:
    return {"id": number, "type": kind, "at": "2030-01-01T12:00:00+00:00", "number": number}


def test_a_flood_of_others_pushes_nothing_out_that_the_filter_shows() -> None:
    journal = Journal()
    journal.set_filter("WANTED")
    journal.add([event(0, "wanted")])
    journal.add([event(number, "other") for number in range(1, 2 * KEPT)])
    journal.add([event(1, "wanted")], missed=7)
    assert [line.rpartition(" ")[2] for line in journal.lines] == ["number=0", "more", "number=1"]
    assert journal.count == 3
    journal.set_filter("")
    assert len(journal.lines) == KEPT
    assert "7 events were missed" in "\n".join(journal.newest(2))
    assert journal.newest(0) == []
