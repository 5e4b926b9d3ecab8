"""One round of multicast DNS on loopback, and what is announced meanwhile."""

from __future__ import annotations

import secrets

from mesh.discovery.echo import echo
from mesh.discovery.looking import look_around
from tests.discovery.network import loopback
from tests.discovery.test_mdns import Listener, listening

OWN = frozenset({"127.0.0.1"})


async def test_what_is_sent_is_heard_and_this_machine_is_nobody_else() -> None:
    hearth = f"test-{secrets.token_hex(8)}"
    async with listening(Listener(hearth)):  # it answers from an address of this machine
        found = await echo("127.0.0.1", OWN, 0.4)
    assert (found.error, found.heard, found.others) == ("", True, set())


async def test_who_answers_from_elsewhere_is_somebody_else() -> None:
    async with listening(Listener(f"test-{secrets.token_hex(8)}")):
        found = await echo("127.0.0.1", frozenset(), 0.4)
    assert found.others == {"127.0.0.1"}


async def test_an_address_that_is_not_here_says_why() -> None:
    found = await echo("203.0.113.1", OWN, 0.2)
    assert (found.heard, bool(found.error)) == (False, True)


async def test_what_is_announced_is_seen_by_who_announces_nothing() -> None:
    one = Listener(f"test-{secrets.token_hex(8)}")
    async with listening(one):
        seen = await look_around(loopback(), 2.5)
    (found,) = (each for each in seen if each.instance == one.own.instance)
    assert (found.node_id, found.endpoints()) == (one.own.node_id, ["127.0.0.1:7700"])
