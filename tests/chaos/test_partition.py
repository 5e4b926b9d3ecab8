"""Three daemons, a cable pulled out of the switch, decisions on both sides, the cable back in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.namespaces import why_not
from tests.chaos.street import House, street
from tests.waiting import wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]


def join(anchor: House, other: House, level: str) -> None:
    window = anchor.hearthnet("invite", "--level", level)
    place = f"{window['host']}:{window['port']}"
    other.hearthnet("join", window["code"], "--peer", place, "--name", other.name)


def test_both_sides_of_a_partition_decide_and_agree_when_it_heals(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with street(tmp_path, ("attic", "barn", "sofa", "shed")) as (attic, barn, sofa, shed):
        attic.start()
        join(attic, shed, "member")  # it never runs: its membership is what barn decides about
        for house, level in ((barn, "trusted"), (sofa, "member")):
            join(attic, house, level)
            house.start()
        assert attic.hearthnet("members", "promote", "barn", "--to", "anchor")["done"]
        everybody = {"attic": "anchor", "barn": "anchor", "sofa": "member", "shed": "member"}
        for house in (attic, barn, sofa):
            wait_until(lambda house=house: house.members() == everybody, f"{house.name} knows all")
        wait_until(lambda: sofa.linked() == {"attic", "barn"}, "all are linked")
        wait_until(lambda: attic.linked() == {"barn", "sofa"}, "all are linked")

        attic.unplug()
        assert attic.hearthnet("members", "promote", "sofa")["done"]
        assert barn.hearthnet("members", "revoke", "shed", "--yes", "--reason", "sold")["done"]
        wait_until(lambda: not attic.linked(), "attic is alone")
        wait_until(lambda: "shed" not in sofa.members(), "barn and sofa go on")
        # Neither side knows what the other decided.
        assert attic.members() == {**everybody, "sofa": "trusted"}
        assert sofa.members() == {"attic": "anchor", "barn": "anchor", "sofa": "member"}
        assert sofa.linked() == {"barn"}

        attic.plug()
        agreed = {"attic": "anchor", "barn": "anchor", "sofa": "trusted"}
        for house in (attic, barn, sofa):
            wait_until(lambda house=house: house.members() == agreed, f"{house.name} agrees")
            assert house.out() == {"shed": "revoked"}
        wait_until(lambda: attic.linked() == {"barn", "sofa"}, "the links are back")
