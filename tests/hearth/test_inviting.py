"""Windows for invitations in the daemon: one at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path

from mesh.clock import SystemClock
from mesh.events.intake import Report
from mesh.hearth.founding import found
from mesh.hearth.hearth import Hearth
from mesh.hearth.inviting import Inviting
from mesh.identity.invitations import WindowEnding
from mesh.identity.roster import TrustLevel
from tests.discovery.network import new_key

CLOCK = SystemClock()


def unexpected(report: Report) -> None:
    raise AssertionError(report)


async def test_of_two_that_open_a_window_at_once_one_is_open(tmp_path: Path) -> None:
    key = new_key()
    record = (await found(key, "attic", tmp_path, CLOCK, unexpected)).record
    hearth = await Hearth.open(key, record, tmp_path, CLOCK, unexpected)
    announced: list[int | None] = []

    async def announce(port: int | None) -> None:
        announced.append(port)

    inviting = Inviting(hearth, CLOCK, announce, lambda ending, joined: None)
    try:
        first, second = await asyncio.gather(
            *(inviting.open(TrustLevel.TRUSTED, 60.0, "127.0.0.1", "127.0.0.1") for _ in range(2))
        )
        assert announced[-1] == second.port
        shut = await inviting.outcome(first.port, 5.0)
        assert shut is not None
        assert shut.ending is WindowEnding.CLOSED
    finally:
        await inviting.close()
        await hearth.close()
    assert announced[-1] is None
