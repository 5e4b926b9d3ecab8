"""A node that takes itself out of its hearth, and into another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh.cli.local_node import LocalNode
from tests.mesh_e2e.test_hearth import answers, hearthnet, members, run, up_peers
from tests.waiting import wait_until
from tests.warm.daemons import command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def let_in(inviter: LocalNode, node: LocalNode) -> None:
    window = hearthnet("invite", node=inviter)
    place = f"{window['host']}:{window['port']}"
    hearthnet("join", window["code"], "--peer", place, node=node)
    wait_until(lambda: up_peers(node), "they link")
    wait_until(lambda: len(members(node)) == len(members(inviter)), "the log arrives")


def warned(node: LocalNode) -> list[str]:
    return [row["code"] for row in node.get("/mesh/v1/status")["warnings"]]


def test_a_node_leaves_says_so_and_joins_elsewhere(tmp_path: Path) -> None:
    attic, barn = run(tmp_path, "attic", "--layers", "none"), run(tmp_path, "barn")
    with attic, barn:
        attic.wait_up()
        barn.wait_ready()
        alone = command("members", "leave", "--yes", "--state-dir", str(barn.state_dir))
        assert alone.returncode != 0
        assert "alone" in alone.stderr
        let_in(attic, barn)
        wait_until(lambda: answers(attic), "barn's layers serve attic")

        # The last anchor has to name another first.
        stays = command("members", "leave", "--yes", "--state-dir", str(attic.state_dir))
        assert "attic is the only anchor; nobody could decide anything without it" in stays.stderr
        unasked = command("members", "leave", "--state-dir", str(barn.state_dir))
        assert "--yes" in unasked.stderr
        assert members(attic) == {"attic": "anchor", "barn": "trusted"}

        old = attic.get("/mesh/v1/hearth")["id"]
        said = command("members", "leave", "--yes", "--state-dir", str(barn.state_dir))
        assert said.returncode == 0, said.stderr
        assert "In it remain: attic." in said.stdout
        assert "Told before it went: attic;" in said.stdout
        assert "recovery code of the new hearth" in said.stderr
        assert members(attic) == {"attic": "anchor"}, "it was told before the node went"
        assert not answers(attic), "nobody there is served any more"
        assert members(barn) == {"barn": "anchor"}
        assert barn.get("/mesh/v1/hearth")["id"] != old
        assert not up_peers(barn)
        assert answers(barn), "what it holds is still its own"
        notices = barn.get("/mesh/v1/status")["warnings"]
        assert not [row for row in notices if row["kind"] == "revoked"]

        # Its key is out of that hearth for good; who is alone there now may come after it.
        window = hearthnet("invite", node=attic)
        place = f"{window['host']}:{window['port']}"
        back = ("join", window["code"], "--peer", place, "--state-dir", str(barn.state_dir))
        refused = command(*back)
        assert (refused.returncode, "a new --state-dir makes a new one" in refused.stderr) == (
            6,
            True,
        )
        ended = attic.get(f"/mesh/v1/hearth/invitation/{window['port']}")
        assert (ended["ending"], ended["name"]) == ("used", None)
        assert "The key of barn was revoked" in ended["error"]["message"]
        assert members(barn) == {"barn": "anchor"}
        let_in(barn, attic)
        assert members(attic) == {"attic": "trusted", "barn": "anchor"}

        # An anchor needs nobody's vote to go; who was put out gets away the same way, also where it
        # has not heard of that.
        assert hearthnet("members", "promote", "attic", "--to", "anchor", node=barn)["done"]
        wait_until(lambda: members(attic)["attic"] == "anchor", "it knows that it decides")
        assert hearthnet("members", "revoke", "--yes", "attic", node=barn)["done"]
        wait_until(lambda: not up_peers(attic), "it is cut off")
        wait_until(
            lambda: "not_let_in" in warned(attic), "whose link was cut is told what that means"
        )
        left = hearthnet("members", "leave", "--yes", node=attic)
        assert (left["left"], left["founded"]) == ("barn's hearth", "attic's hearth")
        assert left["told"] == []
        assert members(attic) == {"attic": "anchor"}
