"""Invitations of who is in already, codes that are wrong, other names: whole nodes on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mesh.errors import PairingRejected, UntrustedPeer
from mesh.events.types import NODE_NAMED
from mesh.hearth.control import Control
from mesh.hearth.joining import SEARCH_S
from mesh.hearth.listing import LogFilter
from mesh.identity.roster import TrustLevel
from tests.identity.test_pairing import wrong
from tests.mesh_e2e.test_hearth_attacks import PATIENCE_S, House, house, pair


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[House]:
    async with house(tmp_path / "home", "home") as here:
        yield here


async def invited(home: House, guest: House, level: str) -> dict[str, Any]:
    """What the inviter is told once the guest has taken up an invitation to that level."""
    window = await Control(home.network).invite(level, 60.0)
    place = f"{window['host']}:{window['port']}"
    joined = await Control(guest.network).join(window["code"], place)
    outcome = await Control(home.network).invitation(window["port"])
    assert joined["level"] == outcome["level"]
    return {key: outcome[key] for key in ("name", "level", "before")}


def levels(level: str, before: str | None) -> dict[str, Any]:
    return {"name": "guest", "level": level, "before": before}


async def until_level(node: House, level: str) -> None:
    """Until the node has heard what it is."""
    async with asyncio.timeout(PATIENCE_S):
        while level_at(node, node) != level:  # noqa: ASYNC110 - as people look
            await asyncio.sleep(0.02)


def level_at(node: House, of: House) -> str:
    return node.network.require_hearth().roster.members[of.key.node_id].level.label


async def test_who_is_invited_again_has_the_level_of_the_newest_invitation(
    home: House, tmp_path: Path
) -> None:
    async with house(tmp_path / "guest", "guest") as guest:
        assert await invited(home, guest, "member") == levels("member", None)
        await guest.until_up(home)
        up = guest.network.link(home.key.node_id)
        for level, before in (("trusted", "member"), ("member", "trusted"), ("member", "member")):
            assert await invited(home, guest, level) == levels(level, before)
            assert level_at(home, guest) == level
            await until_level(guest, level)
        assert guest.network.link(home.key.node_id) is up, "nobody has to link anew for that"

        # An invitation makes no anchor, and takes no anchor's rights: that is a vote of its own.
        await Control(home.network).promote("guest", "anchor")
        assert await invited(home, guest, "member") == levels("anchor", "anchor")

        # Nor is it passed on: it takes an anchor to invite, whatever the member was.
        await Control(home.network).demote("guest", "trusted")
        await until_level(guest, "trusted")
        with pytest.raises(UntrustedPeer):
            await Control(guest.network).invite("trusted", 60.0)

    # What it has lost of its hearth brings it back as what it is invited to.
    await asyncio.to_thread((tmp_path / "guest" / "hearth.json").unlink)
    async with house(tmp_path / "guest", "guest") as guest:
        assert await invited(home, guest, "member") == levels("member", "trusted")


async def test_who_shares_a_hearth_gives_its_proof_to_none_of_another(
    home: House, tmp_path: Path
) -> None:
    async with house(tmp_path / "guest", "guest") as guest, house(tmp_path / "b", "b") as other:
        await pair(home, guest)
        window = await other.network.invite(TrustLevel.TRUSTED, 60.0)
        for _ in range(4):
            with pytest.raises(PairingRejected, match='in "home\'s hearth" already, with 1'):
                await guest.network.join(window.invitation.code, f"{window.host}:{window.port}")
        assert list(other.network.require_hearth().roster.members) == [other.key.node_id]
        assert (await Control(other.network).close_invitation()) == {"open": False}
        outcome = await Control(other.network).invitation(window.port)
        assert outcome["ending"] == "closed", "none of it was a guess"


async def test_who_takes_up_its_own_invitation_is_told_so_and_it_stays_open(
    home: House, tmp_path: Path
) -> None:
    window = await home.network.invite(TrustLevel.TRUSTED, 60.0)
    for code in (window.invitation.code, window.link):
        with pytest.raises(PairingRejected, match="the machine that invites"):
            await home.network.join(code, None)
    async with house(tmp_path / "guest", "guest") as guest:
        await guest.network.join(window.link, None)


async def test_a_wrong_code_is_said_before_the_search_is_over_and_is_tried_at_all_windows(
    home: House, tmp_path: Path
) -> None:
    async with house(tmp_path / "guest", "guest") as guest, house(tmp_path / "b", "b") as other:
        first = await home.network.invite(TrustLevel.TRUSTED, 60.0)
        with pytest.raises(PairingRejected, match="The code is wrong"):
            async with asyncio.timeout(SEARCH_S / 2):
                await guest.network.join(wrong(first.invitation.code), None)
        second = await other.network.invite(TrustLevel.TRUSTED, 60.0)
        await guest.network.join(second.invitation.code, None)
        assert guest.network.require_hearth().id == other.network.require_hearth().id


def named(node: House, of: House) -> tuple[str, str | None]:
    """What a node is called at another, and what it was let in as if that is another name."""
    rows = Control(node.network).view()["members"]
    return next((r["name"], r["let_in_as"]) for r in rows if r["node_id"] == of.key.node_id)


async def test_a_machine_that_has_another_name_has_it_at_all_and_is_found_by_both(
    home: House, tmp_path: Path
) -> None:
    async with house(tmp_path / "guest", "guest") as guest:
        await pair(home, guest)
        assert named(home, guest) == ("guest", None)
    for name, before in (("laptop", "guest"), ("laptop", "guest"), ("guest", None)):
        async with house(tmp_path / "guest", name) as guest:
            await home.until_up(guest)
            async with asyncio.timeout(PATIENCE_S):
                while not named(home, guest) == named(guest, guest) == (name, before):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            for who in (name, before or name):
                assert (await Control(home.network).demote(who, None))["done"]
                assert (await Control(home.network).promote(who, None))["done"]
            assert named(home, guest) == (name, before), "whatever it may"
            facts = await Control(home.network).log(
                LogFilter("guest" if before is None else name, "node.", 50, None)
            )
    assert [fact["says"]["name"] for fact in facts["facts"]] == ["guest", "laptop"], "said once"


async def test_what_a_member_is_called_goes_before_what_another_was_let_in_as(
    home: House, tmp_path: Path
) -> None:
    async with house(tmp_path / "first", "guest") as first:
        await pair(home, first)
    async with house(tmp_path / "first", "laptop") as first:
        await home.until_up(first)
        async with house(tmp_path / "second", "guest") as second:
            await invited(home, second, "trusted")
            async with asyncio.timeout(PATIENCE_S):
                while named(home, first) != ("laptop", "guest"):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert (await Control(home.network).demote("guest", None))["done"]
            assert (level_at(home, first), level_at(home, second)) == ("trusted", "member")


@pytest.mark.parametrize("name", ["", "x" * 65, "a\nb", 7, None])
async def test_what_is_no_name_is_none(home: House, name: object) -> None:
    own = home.key.node_id
    await home.network.require_hearth().publish(NODE_NAMED, {"node_id": own, "name": name})
    assert named(home, home) == ("home", None)
