"""Who of a hearth is away, and since when."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from mesh.clock import SystemClock
from mesh.hearth.presence import Away, Presence
from tests.hearth.door import opened

SEVEN = datetime(2030, 1, 1, 7, tzinfo=UTC)


class AtSeven(SystemClock):
    def now(self) -> datetime:
        return SEVEN


async def test_a_member_that_is_not_seen_is_away_since_its_link_ended(tmp_path: Path) -> None:
    presence = Presence(AtSeven())
    async with opened(tmp_path) as door:
        roster, own, barn = door.hearth.roster, door.hearth.key.node_id, door.key.node_id
        assert presence.away(roster, {own, barn}) == []
        assert presence.away(roster, {own}) == [Away(barn, "barn", None)]
        presence.parted(barn)
        assert presence.away(roster, {own, barn}) == []
        assert presence.away(roster, {own}) == [Away(barn, "barn", SEVEN)]
        assert presence.away(roster, {own})[0].row()["last_seen"] == "2030-01-01T07:00:00+00:00"
        alone = replace(roster, members={own: roster.members[own]})
        assert presence.away(alone, {own}) == []
        assert presence.away(roster, {own}) == [Away(barn, "barn", None)], "it was no member"
