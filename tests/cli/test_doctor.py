"""`hearthnet doctor`: what it finds out by itself, without a daemon."""

from __future__ import annotations

import json
import sys

import pytest

from mesh.interventions.jail import kernel
from tests.cli.conftest import Run


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
