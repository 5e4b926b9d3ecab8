"""`hearthnet doctor`: what it finds out by itself, and of a daemon that was asked."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from mesh.interventions.jail import kernel
from mesh.paths import StatePaths
from tests.api.conftest import Served
from tests.cli.conftest import Run

HERE = {"HEARTHNET_INTERFACE": "127.0.0.1"}
"""Nothing is asked of the real network."""


def findings(out: str) -> dict[str, list[dict[str, Any]]]:
    """Those of each check."""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in json.loads(out)["findings"]:
        found.setdefault(each["check"], []).append(each)
    return found


async def test_without_a_daemon_the_machine_is_looked_at(hearthnet: Run) -> None:
    ports = {"HEARTHNET_PORT": "0", "HEARTHNET_API_PORT": "0"}
    told = await hearthnet("doctor", "--json", **HERE, **ports)
    found = findings(told.out)
    # What other tests start and kill on this interface may still be announced there.
    is_alone = all(each["state"] != "wrong" for each in found.pop("neighbours", []))
    assert {each["state"] for check in found.values() for each in check} <= {"fine", "note"}, found
    assert found.keys() >= {
        "configuration", "versions", "clock", "disk", "models", "ports", "interfaces", "multicast",
        "daemon",
    }  # fmt: skip
    assert (told.code, json.loads(told.out)["well"]) == (int(not is_alone), is_alone)
    assert "lo (127.0.0.1) sends it and hears it" in found["multicast"][0]["said"]
    assert "No daemon runs with" in found["daemon"][0]["said"]


async def test_what_is_wrong_is_said_first_with_its_fix_and_by_the_exit_code(
    hearthnet: Run,
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:  # noqa: S104 - nobody is accepted
        port = str(taken.getsockname()[1])
        off = {"HEARTHNET_POLICY__RESEARCH__ENABLE": "false"}  # no network is looked at
        told = await hearthnet("doctor", HEARTHNET_PORT=port, HEARTHNET_API_PORT="0", **off)
    first, fix, *_, last = told.out.splitlines()
    assert (told.code, last) == (1, "1 thing is wrong")
    assert first == f"WRONG   ports: Port {port} on 0.0.0.0 is taken."
    assert fix.startswith("        fix: Stop what uses it")
    unread = await hearthnet("doctor", HEARTHNET_PORT="many")
    assert (unread.code, unread.out.startswith("WRONG   configuration: port")) == (1, True)


async def test_a_daemon_that_is_named_is_asked_and_this_machine_left_alone(
    hearthnet: Run, daemon: Served
) -> None:
    daemon.view.missing = ["no node serves layers 8-11 of org/half"]
    told = await hearthnet("doctor", "--host", daemon.url, "--json")
    found = findings(told.out)
    assert told.code == 1
    assert "ports" not in found
    assert found["ready"][0]["said"] == "no node serves layers 8-11 of org/half."
    assert "The daemon runs hearthnet 0, which is older than this command's" in str(found["daemon"])
    assert "The daemon is too old to say who reaches whom." in str(found["peers"])
    gone = await hearthnet("doctor", "--api-port", "1", "--json", **HERE)
    assert (gone.code, "Nothing answers at" in gone.out) == (1, True)
    assert "name another with --host" in gone.out, "the error's own fix"


async def test_what_cannot_be_read_is_a_finding_among_others(
    hearthnet: Run, tmp_path: Path
) -> None:
    state = await asyncio.to_thread(StatePaths(tmp_path / "state").create)
    await asyncio.to_thread(state.hearth.mkdir)
    await asyncio.to_thread(state.identity_key.touch, 0o644)
    told = await hearthnet("doctor", "--json", "--state-dir", str(state.root), **HERE)
    found = findings(told.out)
    assert (told.code, "hearth.json" in found["hearth"][0]["said"]) == (1, True)
    (key,) = found["identity"]
    assert "is open to others (mode 0644)" in key["said"]
    assert "chmod 600" in key["fix"]
    assert found["disk"]


@pytest.mark.slow
async def test_a_daemon_that_hangs_is_not_waited_for_long(hearthnet: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        told = await hearthnet("doctor", "--json", "--host", url)
    (found,) = findings(told.out)["daemon"]
    assert (told.code, found["state"]) == (1, "wrong")
    assert "takes connections and does not answer" in found["said"]
    assert "hearthnet restart" in found["fix"]


async def test_an_interface_that_a_daemon_was_told_to_use_and_that_is_gone_is_what_is_wrong(
    hearthnet: Run, daemon: Served
) -> None:
    """As when the router gives out other addresses, and one of those before was named."""
    plain, gone = daemon.view.status, "192.0.2.5"
    row = {"name": gone, "address": None, "network": None, "used": False, "why": "It is gone."}
    node = {**plain()["node"], "interfaces": [row]}
    daemon.view.status = lambda: {**plain(), "node": node}  # type: ignore[method-assign]
    told = await hearthnet("doctor", "--json")
    (found,) = findings(told.out)["interfaces"]
    assert (found["state"], f"no interface '{gone}'" in found["said"]) == ("wrong", True), found


async def test_flags_belong_behind_the_command(hearthnet: Run) -> None:
    told = await hearthnet("doctor", "--json", "privacy")
    assert (told.code, "doctor privacy --json" in told.err) == (2, True)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the walls are weaker")
async def test_the_jail_is_examined_and_the_exit_code_says_whether_every_wall_holds(
    hearthnet: Run,
) -> None:
    machine = kernel.machine()
    if machine is None or not kernel.landlock_abi(machine):
        pytest.skip("this kernel has no Landlock")
    told = await hearthnet("doctor", "jail", "--json", "--no-namespaces")
    report = json.loads(told.out)
    assert report["level"] == "os", report["broken"]
    assert told.code == 0
    assert not report["namespaces"]
    assert {"control", "socket", "never_ends"} <= set(report["held"])
    words = await hearthnet("doctor", "jail")
    assert words.out.startswith("jail: os (every member's code may run)")
