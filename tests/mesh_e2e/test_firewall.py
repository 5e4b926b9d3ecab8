"""Two machines, one of which lets packets out and not in: what `hearthnet doctor` says on each."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.namespaces import why_not
from tests.chaos.street import House, street
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ANSWERS, MULTICAST = "ct state established,related", "udp dport 5353"


@pytest.fixture(scope="module")
def houses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[House]]:
    """Two houses on one switch, no daemon running."""
    reason = why_not() or ("" if shutil.which("nft") else "there is no nft here (nftables)")
    if reason:
        pytest.skip(reason)
    with street(tmp_path_factory.mktemp("street"), ("attic", "barn")) as houses:
        yield houses


def found(house: House, check: str) -> dict[str, str]:
    """The sentences of a check, each with how it stands; the exit code agrees with all of them."""
    code, said = house.ended("doctor")
    states = [each["state"] for each in said["findings"]]
    assert code == int("wrong" in states), said
    assert said["well"] is (code == 0)
    rows: list[dict[str, Any]] = said["findings"]
    return {each["said"]: each["state"] for each in rows if each["check"] == check}


def test_a_firewall_is_told_apart_from_nobody_there(houses: list[House]) -> None:
    """The first test of the module: nobody runs yet."""
    attic, _ = houses
    alone = found(attic, "neighbours")
    assert alone == {"No other node announces itself here.": "note"}
    assert list(found(attic, "multicast").values()) == ["fine"]
    attic.let_in(ANSWERS)
    ((said, state),) = found(attic, "multicast").items()
    assert state == "wrong"
    assert "multicast goes out and does not come in: a firewall on this machine" in said
    attic.let_in()


def test_a_machine_that_takes_no_connections_is_named_on_both_sides(houses: list[House]) -> None:
    attic, barn = houses
    attic.start()
    window = attic.hearthnet("invite")
    place = f"{window['host']}:{window['port']}"
    barn.hearthnet("join", window["code"], "--peer", place, "--name", "barn")
    barn.start()
    wait_until(lambda: attic.linked() == {"barn"} and barn.linked() == {"attic"}, "they are linked")
    assert set(found(attic, "peers").values()) == {"fine"}
    attic.let_in(ANSWERS, MULTICAST)  # as most firewalls are set where they are on
    ((said, state),) = found(attic, "peers").items()
    assert state == "wrong"
    assert "barn does not reach port" in said
    assert "a firewall on this machine lets connections out and not in" in said
    ((said, state),) = found(barn, "peers").items()
    assert state == "wrong"
    assert said.startswith("This machine is linked with attic and does not reach port")
    assert "timed out" in said
    attic.let_in()
    assert set(found(barn, "peers").values()) == {"fine"}
