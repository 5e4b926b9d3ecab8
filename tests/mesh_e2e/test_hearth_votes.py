"""Putting nodes out while they serve, and decisions that take two anchors: real daemons."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mesh.cli.local_node import LocalNode
from mesh.events.gossip import GossipSettings
from mesh.models.builtin import checkpoint_dir
from tests.mesh_e2e.spread import hugging_face
from tests.mesh_e2e.test_hearth import answers, hearthnet, members, run, up_peers
from tests.mesh_e2e.test_losing_nodes import COUNT, PROMPT, stream
from tests.waiting import wait_until
from tests.warm.daemons import command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def inviting(node: LocalNode) -> tuple[subprocess.Popen[str], str]:
    """`hearthnet invite` as people run it, waiting; and the code that it shows."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mesh.cli.main", "invite", "--state-dir", str(node.state_dir)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(r"hearthnet join (\S+ --peer \S+)$", line.strip())
        if found is not None:
            return process, found[1]
    raise AssertionError(process.communicate())


def join(node: LocalNode, words: str) -> subprocess.CompletedProcess[str]:
    return command("join", *words.split(), "--name", node.name, "--state-dir", str(node.state_dir))


def post(node: LocalNode, verb: str, **body: Any) -> dict[str, Any]:
    response = node.post(f"/mesh/v1/hearth/{verb}", body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def serving(asker: LocalNode, *nodes: LocalNode) -> LocalNode:
    """Who holds the layers of the one answer under way."""
    route = asker.get("/mesh/v1/status")["generations"][0]["route"]
    return {node.name: node for node in nodes}[route[0]["node"]]


def _joins_by_the_code_that_invite_shows(attic: LocalNode, barn: LocalNode, root: Path) -> None:
    """`invite` waits and says who joined; ended, it takes its code back."""
    process, words = inviting(attic)
    joined = join(barn, words)
    assert joined.returncode == 0
    # Whose invitation had to be named may have to be named itself, at another port.
    host = words.rpartition(" ")[2].rpartition(":")[0]
    assert f"`hearthnet up --peer {host}:8421`" in joined.stdout
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out.strip()) == (0, "barn joined as trusted."), err

    process, words = inviting(attic)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    late = run(root, "late")
    assert join(late, words).returncode != 0
    assert members(attic) == {"attic": "anchor", "barn": "trusted"}


def test_invite_waits_answers_leave_a_node_that_is_put_out_and_anchors_vote(tmp_path: Path) -> None:
    """One story, because every daemon takes seconds to start."""
    attic = run(tmp_path, "attic", "--layers", "none")
    barn, shed = run(tmp_path, "barn"), run(tmp_path, "shed")
    expected = hugging_face(checkpoint_dir(), PROMPT, COUNT)[0]
    with ExitStack() as stack:
        stack.enter_context(attic).wait_up()
        _joins_by_the_code_that_invite_shows(attic, barn, tmp_path)
        shed.join(attic)
        stack.enter_context(barn)
        stack.enter_context(shed)
        for node in (attic, barn, shed):
            node.wait_ready()
        holders: list[LocalNode] = []

        def revoke_tokens() -> None:
            node = serving(attic, barn, shed)
            wait_until(lambda: node.get("/mesh/v1/status")["sessions"], "the session shows")
            for session in node.get("/mesh/v1/status")["sessions"]:
                post(attic, "revoke_token", token_id=session["token_id"])
            holders.append(node)

        _, events, ids, _ = stream(attic, 20, revoke_tokens)
        assert ids == expected
        assert "shard_failover" in [event["type"] for event in events]
        assert members(attic)[holders[0].name] == "trusted"

        times: list[float] = []

        def revoke_the_serving_one() -> None:
            gone = serving(attic, barn, shed)
            stays = barn if gone is shed else shed
            begin = time.monotonic()
            assert post(attic, "revoke", member=gone.name, reason="sold")["done"]
            wait_until(lambda: gone.name not in up_peers(stays), "it is cut off everywhere")
            times.append(time.monotonic() - begin)
            holders.append(gone)

        _, events, ids, _ = stream(attic, 20, revoke_the_serving_one)
        assert ids == expected
        assert "shard_failover" in [event["type"] for event in events]
        gone = holders[-1]
        stays = barn if gone is shed else shed
        wait_until(lambda: not up_peers(gone), "it has no link left")
        print(f"cut off everywhere after {times[0]:.2f} s")
        assert times[0] < 2 * 2 * GossipSettings().interval_s  # two rounds at their longest
        gone.stop()

        # A second anchor takes one vote, a third one two, and so does putting one of three out.
        loft = run(tmp_path, "loft", "--layers", "none")
        loft.join(attic)
        stack.enter_context(loft).wait_up()
        assert hearthnet("members", "promote", stays.name, "--to", "anchor", node=attic)["done"]
        wait_until(lambda: members(stays).get(stays.name) == "anchor", "it knows that it decides")
        vote = hearthnet("members", "promote", "loft", "--to", "anchor", node=attic)
        assert (vote["done"], vote["votes_missing"]) == (False, 1)
        pending = attic.get("/mesh/v1/hearth")["pending"]
        assert [(p["name"], p["action"], p["voters"]) for p in pending] == [
            ("loft", "anchor", ["attic"])
        ]
        wait_until(lambda: stays.get("/mesh/v1/hearth")["pending"], "the vote arrives")
        assert hearthnet("members", "promote", "loft", "--to", "anchor", node=stays)["done"]
        wait_until(lambda: members(loft).get("loft") == "anchor", "it knows that it decides")

        assert not hearthnet("members", "revoke", "--yes", stays.name, node=attic)["done"]
        assert stays.name in up_peers(attic)
        wait_until(lambda: loft.get("/mesh/v1/hearth")["pending"], "the vote arrives")
        assert hearthnet("members", "revoke", "--yes", stays.name, node=loft)["done"]
        for node in (attic, loft):
            wait_until(lambda node=node: stays.name not in up_peers(node), "it is out everywhere")
        assert members(attic) == {"attic": "anchor", "loft": "anchor"}
        assert not answers(attic)
