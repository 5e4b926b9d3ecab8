"""What is said where nobody lets this node in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mesh.discovery.sightings import NOT_KNOWN_THERE, PeerState, PeerView
from mesh.hearth.let_in import WhetherLetIn

_SHORT_S = 0.01


def _row(state: PeerState, reason: str = "") -> PeerView:
    return PeerView(None, "attic", "127.0.0.1:1", state, reason, None)


async def test_a_refusal_is_told_once_it_has_lasted() -> None:
    rows: list[PeerView] = []
    told: list[Sequence[str]] = []
    let_in = WhetherLetIn(lambda: rows, told.append, _SHORT_S)
    refused, linked = _row(PeerState.NOT_A_PEER, NOT_KNOWN_THERE), _row(PeerState.UP)

    async def seen(now: Sequence[PeerView]) -> None:
        rows[:] = now
        let_in.look()

    await seen([refused])
    await seen([refused, linked])  # it had not been heard of there
    await asyncio.sleep(2 * _SHORT_S)
    assert told == []
    for _ in range(2):
        await seen([refused])
        await asyncio.sleep(2 * _SHORT_S)
    assert told == [["attic"]], "once"
    await seen([linked])
    await seen([refused])
    let_in.close()
    await asyncio.sleep(2 * _SHORT_S)
    assert told == [["attic"]]
