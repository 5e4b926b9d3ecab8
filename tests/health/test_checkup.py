"""What is said of a machine, its daemon and its peers, from what they answer."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import pytest

from mesh.discovery.announcement import Announcement, instance_name
from mesh.discovery.echo import Echo
from mesh.discovery.interfaces import InterfaceChoice
from mesh.health.checkup import machine
from mesh.health.checkup.daemon import daemon
from mesh.health.checkup.findings import Examination, Finding, Grade, fine, note, wrong
from mesh.health.checkup.network import cloned, multicast
from mesh.health.checkup.peers import peers
from mesh.paths import StatePaths
from tests.discovery.network import new_id
from tui.words import out_of_order

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
OWN = "hearthnet/0.2.0"
ETH = InterfaceChoice("eth0", IPv4Address("192.0.2.5"), IPv4Network("192.0.2.0/24"), "")
NODE = {
    "name": "sofa", "software": OWN, "started_at": NOW.isoformat(), "enabled": True,
    "paused": False, "interfaces": [{"network": "192.0.2.0/24", "used": True}],
}  # fmt: skip
UP = {"id": "a", "name": "attic", "address": "192.0.2.7:8421", "state": "up", "back_unknown": ""}
OPEN = {"what": "nodes", "port": 8421, "why": None}
SHUT = {"what": "layers", "port": 43107, "why": "timed out"}
REFUSING = {"what": "nodes", "port": 8421, "why": "refused"}


def tried(out: list[Any], back: list[Any] | None, ahead_s: float | None = 0.1, **more: Any) -> Any:
    return {**UP, "out": out, "back": back, "ahead_s": ahead_s, **more}


def of_peers(*rows: Any, seen: Any = None, members: Any = ()) -> list[Finding]:
    known = {
        "id": "a",
        "name": "attic",
        "state": "up",
        "rtt_ms": 0.7,
        "software": OWN,
        "skew": None,
    }
    picture = {"node": NODE, "peers": [{**known, **(seen or {})}]}
    return list(peers(picture, {"peers": list(rows)}, members))


def said(findings: Iterable[Finding], state: Grade) -> str:
    """All sentences and fixes that are so."""
    return " ".join(f"{each.said} {each.fix}" for each in findings if each.state is state)


def test_what_is_wrong_comes_first_and_is_counted() -> None:
    found = Examination((fine("a", "A."), note("b", "B.", "Look."), wrong("c", "C.", "Repair.")))
    assert found.to_lines() == [
        "WRONG   c: C.", "        fix: Repair.", "note    b: B.", "        Look.", "ok      a: A.",
        "1 thing is wrong",
    ]  # fmt: skip
    assert not found.to_dict()["well"]
    well = Examination((fine("a", "A."),))
    assert (well.to_lines()[-1], well.to_dict()["well"]) == ("nothing is wrong", True)


def test_two_that_reach_each_other_are_well() -> None:
    found = of_peers(tried([OPEN], [OPEN]))
    assert {each.state for each in found} == {Grade.FINE}
    assert "attic: hearthnet 0.2.0, 0.7 ms away, both reach each other" in said(found, Grade.FINE)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (tried([OPEN], [OPEN, SHUT]), "a firewall on this machine lets connections out and not in"),
        (tried([OPEN], [OPEN, SHUT]), "sudo ufw allow from 192.0.2.0/24"),
        (tried([OPEN], [REFUSING]), "nothing listens at port 8421 (daemon: refused) of this"),
        (tried([OPEN, SHUT], [OPEN]), "does not reach port 43107 (layers: timed out) there"),
        (tried([{**OPEN, "why": "timed out"}], None, None, state="unreachable"),
         "it is off, or a firewall there drops what arrives"),
        (tried([REFUSING], None, None, state="unreachable"), "nothing listens at 192.0.2.7:8421"),
        (tried([OPEN], None, None, state="trying"), "takes calls at 192.0.2.7:8421, and there is"),
        (tried([{**OPEN, "why": "No route to host"}], None, None, state="trying"),
         "cannot be called: No route to host"),
        (tried([OPEN], [OPEN], 1200.0), "The clock of attic is 20 min ahead of this machine's"),
    ],
)  # fmt: skip
def test_what_keeps_two_machines_apart_is_told_apart(row: Any, expected: str) -> None:
    found = of_peers(row)
    assert expected in said(found, Grade.WRONG)


def test_what_may_be_so_is_noted_and_nothing_more() -> None:
    older = {"software": "hearthnet/0.1.0", "skew": "older"}
    unknown = tried([OPEN], None, None, back_unknown="attic runs hearthnet/0.1.0, which cannot.")
    found = of_peers(unknown, tried([OPEN], [OPEN], -7.0), seen=older)
    assert said(found, Grade.WRONG) == ""
    notes = said(found, Grade.NOTE)
    assert "Whether attic reaches this machine is not known: attic runs hearthnet/0.1.0" in notes
    assert "attic runs hearthnet 0.1.0, older than the one here, 0.2.0." in notes
    assert "The clock of attic is 7 s behind this machine's." in notes


def test_a_clock_that_all_others_contradict_is_this_machines() -> None:
    barn = {"id": "b", "name": "barn"}
    found = of_peers(tried([OPEN], [OPEN], 3600), tried([OPEN], [OPEN], 3601, **barn))
    assert "This machine's clock is 60 min behind those of attic, barn." in said(found, Grade.WRONG)


def test_members_of_whom_nothing_is_seen_are_named() -> None:
    members = [{"node_id": "a", "name": "attic", "self": False},
               {"node_id": "b", "name": "barn", "self": False},
               {"node_id": "s", "name": "sofa", "self": True}]  # fmt: skip
    found = of_peers(tried([OPEN], [OPEN]), members=members)
    assert "Nothing is seen of barn, who is in the hearth" in said(found, Grade.NOTE)
    assert "No other machine is in the hearth." in said(of_peers(members=members[2:]), Grade.NOTE)


def test_who_is_no_peer_or_of_another_version_is_wrong() -> None:
    for state in ("other version", "not a peer"):
        row = {"address": "192.0.2.9:8421", "state": state, "reason": "because"}
        assert "192.0.2.9:8421" in said(of_peers(seen=row), Grade.WRONG)
    stranger = {**row, "state": "other hearth"}
    assert "192.0.2.9:8421 is in another hearth" in said(of_peers(seen=stranger), Grade.NOTE)


def test_all_machines_of_other_hearths_are_one_line() -> None:
    rows = [{"id": name, "name": name, "address": f"192.0.2.9:842{n}", "state": "other hearth"}
            for n, name in enumerate("ab")]  # fmt: skip
    found = list(peers({"node": NODE, "peers": rows}, {"peers": []}, ()))
    said_of = [each.said for each in found if "hearths" in each.said]
    assert said_of == ["a at 192.0.2.9:8420, b at 192.0.2.9:8421 are in other hearths."]


def of_daemon(missing: Iterable[tuple[str, str]] = (), **more: Any) -> list[Finding]:
    picture = {"node": NODE, "processes": [], "models": [], "warnings": []} | more
    return list(daemon(picture, missing, OWN, NOW, out_of_order))


def test_a_daemon_that_is_well() -> None:
    up = {"name": "the shards' process", "state": "up", "ending": None}
    found = of_daemon(processes=[up], models=[{"id": "m", "runnable": True, "reason": None}])
    assert {each.state for each in found} == {Grade.FINE}
    assert "m can be asked" in said(found, Grade.FINE)


def test_layers_that_are_just_being_loaded_are_waited_for() -> None:
    found = of_daemon([("loading", "no node serves layers 4-7 of m")])
    assert {each.state for each in found} == {Grade.FINE, Grade.NOTE}


@pytest.mark.parametrize(
    ("days", "told"), [(-1, "expired on 2029-12-31"), (13, "expires on 2030-01-14"), (15, "")]
)
def test_a_certificate_that_expires_is_told_of_in_time(days: int, told: str) -> None:
    expires = (NOW + timedelta(days=days)).isoformat()
    tls = {"sha256": "AB", "certificate": "own.pem", "expires": expires}
    told_of = said(of_daemon(node={**NODE, "api_tls": tls}), Grade.WRONG)
    assert told in told_of
    assert ("Renew it" in told_of) == bool(told)


def test_what_a_daemon_says_of_itself_is_passed_on_with_a_fix() -> None:
    ended = {"name": "the jobs' process", "state": "ended", "ending": "killed by signal 9"}
    held = {"name": "the asker", "state": "ended", "ending": None, "held": "it needs 9 MiB."}
    old = {**NODE, "software": "hearthnet/0.1.0", "paused": True}
    warned = {"message": "The disk is full.", "fix": "Free some.", "code": "disk"}
    found = of_daemon(
        [("loading", "m is loading"), ("loading", "the ends of m are loading"),
         ("layers", "no node serves layers 4-7 of m"), ("failed", "m:0-3 did not load: no room.")],
        node=old, processes=[ended, held],
        warnings=[
            {**warned, "at": (NOW - timedelta(minutes=5)).isoformat()},
            {**warned, "message": "Long ago.", "at": (NOW - timedelta(hours=5)).isoformat()},
            {**warned, "message": "Deaf.", "code": "no_multicast", "at": NOW.isoformat()},
        ],
    )  # fmt: skip
    faults, notes = said(found, Grade.WRONG), said(found, Grade.NOTE)
    assert "The daemon runs hearthnet 0.1.0, which is older than this command's 0.2.0." in faults
    assert "the jobs' process is ended: killed by signal 9. It is started again" in faults
    assert "the asker is not started: it needs 9 MiB. It is started once" in faults
    assert "m:0-3 did not load: no room. `hearthnet status --all`" in faults
    assert "no node serves layers 4-7 of m. Start the machine that has them" in faults
    assert "The disk is full. (5 min ago) Free some." in faults
    for what in (
        "m is loading.",
        "the ends of m are loading.",
        "It is paused",
        "Long ago. (5 h ago)",
        "Deaf. (0 s ago)",
    ):
        assert what in notes


@pytest.mark.parametrize(
    ("echo", "state", "expected"),
    [
        (Echo(heard=True, others={"192.0.2.9"}), Grade.FINE, "1 other machine answered"),
        (Echo(heard=True), Grade.FINE, "nobody else answered"),
        (Echo(), Grade.WRONG, "multicast goes out and does not come in: a firewall on this"),
        (
            Echo("Operation not permitted"),
            Grade.WRONG,
            "can be sent by multicast: Operation not",
        ),
    ],
)
def test_a_round_of_multicast_tells_a_firewall_from_nobody(
    echo: Echo, state: Grade, expected: str
) -> None:
    found = multicast(ETH, echo)
    assert (found.state, expected in found.said) == (state, True)


def test_one_identity_at_two_addresses_is_a_copied_key() -> None:
    copied, alone = new_id(), new_id()

    def running(node: Any, nonce: str, *addresses: str) -> Announcement:
        return Announcement(instance_name(node, nonce), node, "h", "attic", 1, 8421, addresses)

    there = [
        running(alone, "000001", "192.0.2.1", "192.0.2.2"),
        running(alone, "000002", "192.0.2.2"),
        running(copied, "000003", "192.0.2.3"),
        running(copied, "000004", "192.0.2.4"),
    ]
    (found,) = cloned(there)
    assert found.state is Grade.WRONG
    assert "192.0.2.3 and 192.0.2.4" in found.said


def test_a_clock_is_not_before_what_was_written(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path).create()
    now = datetime.now(UTC)
    assert said(machine.clock(now, paths), Grade.WRONG) == ""
    paths.hearth.write_text("{}")
    future = (now + timedelta(days=2)).timestamp()
    os.utime(paths.hearth, (future, future))
    assert "hearth.json was written at" in said(machine.clock(now, paths), Grade.WRONG)


def test_disks_that_hold_what_is_to_come_are_looked_at_and_made_by_nobody(tmp_path: Path) -> None:
    paths, models = StatePaths(tmp_path / "state"), tmp_path / "models" / "deep"
    found = list(machine.disks(paths, models))
    assert [each.check for each in found] == ["disk", "disk"]
    assert str(models) in found[1].said
    assert not list(tmp_path.iterdir())


def test_the_versions_that_are_installed_are_those_that_are_needed() -> None:
    (found,) = machine.versions()
    assert (found.state, "torch" in found.said) == (Grade.FINE, True)
