"""Who holds which model: what real daemons publish, hear of each other, and read back."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from mesh.cli.local_node import LocalNode
from mesh.paths import StatePaths
from tests.mesh_e2e.conftest import StartNode

Rows = dict[tuple[str, str, str], dict[str, Any]]


def rows(node: LocalNode) -> Rows:
    """The workers of the only model by holder, kind and layers."""
    seen = node.get("/mesh/v1/coordination")
    names = {node.get("/mesh/v1/status")["node"]["id"]: "self"}
    names |= {peer["id"]: peer["name"] for peer in node.get("/mesh/v1/peers")["peers"]}
    return {
        (names.get(each["holder"], "?"), each["kind"], each["layers"]): each
        for model in seen["models"]
        for each in model["workers"]
    }


def wait_for(node: LocalNode, is_so: Callable[[Rows], bool]) -> Rows:
    until = time.monotonic() + 60
    while not is_so(found := rows(node)):
        assert time.monotonic() < until, json.dumps([*map(str, found)])
        time.sleep(0.2)
    return found


def waiting_for(node: LocalNode, model: str, *more: str, timeout_s: float) -> subprocess.Popen[str]:
    """`hearthnet status --wait-ready`, as a script runs it."""
    return subprocess.Popen(
        [
            sys.executable, "-m", "mesh.cli.main", "status", "--state-dir", str(node.state_dir),
            "--wait-ready", model, "--timeout", str(timeout_s), *more,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_holders_are_published_heard_and_read_back(own_node: StartNode) -> None:
    attic = own_node("attic", "--layers", "0-4")
    attic.wait_up()
    (model,) = (each["id"] for each in attic.get("/mesh/v1/models")["models"])
    with waiting_for(attic, model, timeout_s=120) as waiting:
        with waiting_for(attic, model, "--layers", "0-4", timeout_s=60) as some:
            out, _ = some.communicate(timeout=90)
        assert (some.returncode, out.count("ready:")) == (0, 1)
        with waiting_for(attic, model, timeout_s=0.5) as in_vain:
            out, err = in_vain.communicate(timeout=30)
        assert (in_vain.returncode, out) == (5, "")
        assert f"layers 5, 6, 7 of {model}. [not_ready]" in err
        with waiting_for(attic, model, "--layers", "5-8", timeout_s=60) as impossible:
            _, err = impossible.communicate(timeout=30)
        assert (impossible.returncode, f"{model} has layers 0-7, not 5-8." in err) == (2, True)
        assert waiting.poll() is None
        kitchen = own_node("kitchen", "--layers", "3-7")
        out, err = waiting.communicate(timeout=180)
        assert (waiting.returncode, err) == (0, "")
        assert {f"ready: {model} 0-4", f"ready: {model} 3-7"} == {
            line.partition(" on ")[0] for line in out.splitlines()
        }
    for node in (attic, kitchen):
        node.wait_ready()
    mine, theirs = ("self", "shard", "0-4"), ("kitchen", "shard", "3-7")
    files = ("self", "checkpoint", "0-7")
    found = wait_for(attic, lambda found: {mine, theirs, files} <= found.keys())
    assert set(found) == {mine, theirs, files}
    assert (found[mine]["ready"], found[mine]["stability_verified"]) == (True, True)
    assert (found[theirs]["ready"], found[theirs]["stability_verified"]) == (True, True)
    assert found[files]["ready"] is False
    assert found[files]["tensor_count"] > found[mine]["tensor_count"] > 0
    assert [each["worker_rank"] for each in found.values()] == sorted(
        each["worker_rank"] for each in found.values()
    )
    view = attic.get("/mesh/v1/coordination")
    assert (view["store"], view["error"]) == ("sqlite", None)
    assert StatePaths(attic.state_dir).coordination.stat().st_mode & 0o777 == 0o600

    kitchen.stop()
    wait_for(attic, lambda found: theirs not in found)

    # What a run that was killed has published is taken back where the next one does not hold it.
    attic.kill()
    attic.flags = ("--threads", "1", "--layers", "2-7")
    attic.start()
    attic.wait_up()
    now = ("self", "shard", "2-7")
    found = wait_for(attic, lambda found: now in found and mine not in found)
    assert set(found) == {now, files}
