"""Links follow the members also where that cannot be done at once."""

from __future__ import annotations

from pathlib import Path

from mesh.clock import SystemClock
from mesh.events.intake import Report
from mesh.hearth.founding import found
from mesh.hearth.hearth import Hearth, Waits
from mesh.identity.certificates import make_certificate
from mesh.identity.decisions import Added, Revoked
from mesh.identity.roster import Roster, TrustLevel
from tests.descriptors import none_left
from tests.discovery.network import new_key
from tests.waiting import until


def unheard(report: Report) -> None:
    """Nothing is to be reported."""


async def test_members_are_followed_once_there_are_descriptors_again(tmp_path: Path) -> None:
    key, guest = new_key(), new_key()
    founding = await found(key, "attic", tmp_path, SystemClock(), unheard)
    waits = Waits(alone_s=0.0, retry_s=0.05)
    hearth = await Hearth.open(key, founding.record, tmp_path, SystemClock(), unheard, waits=waits)
    trusted: list[bool] = []

    def told(before: Roster, after: Roster) -> None:
        trusted.append(hearth.tls.trusts(guest.node_id))

    hearth.on_roster.append(told)
    try:
        with none_left():
            await hearth.decide(Added(make_certificate(guest), "barn", TrustLevel.TRUSTED))
        await until(lambda: trusted[-1:] == [True])
        with none_left():
            await hearth.decide(Revoked(guest.node_id, hearth.end_of_facts(guest.node_id), ""))
            assert trusted[-1] is False
    finally:
        await hearth.close()
