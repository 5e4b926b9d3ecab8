"""Windows for invitations in the daemon: one at a time."""

from __future__ import annotations

import asyncio
from ipaddress import IPv4Interface
from pathlib import Path

from mesh.accounts.ledger import ResourceLedger
from mesh.clock import SystemClock
from mesh.discovery.directory import ShardStore
from mesh.discovery.interfaces import Interface, Reach
from mesh.discovery.peering import PeeringSettings
from mesh.events.intake import Report
from mesh.hearth.founding import found
from mesh.hearth.hearth import Hearth
from mesh.hearth.inviting import Inviting
from mesh.hearth.network import Network
from mesh.hearth.network_settings import NetworkHooks, NetworkSettings
from mesh.hearth.publishing import Serving
from mesh.identity.invitations import WindowEnding, parse_ticket
from mesh.identity.roster import TrustLevel
from mesh.paths import StatePaths
from tests.discovery.network import new_key

CLOCK = SystemClock()


def unexpected(report: Report) -> None:
    raise AssertionError(report)


async def test_of_two_that_open_a_window_at_once_one_is_open(tmp_path: Path) -> None:
    key = new_key()
    record = (await found(key, "attic", tmp_path, CLOCK, unexpected)).record
    hearth = await Hearth.open(key, record, tmp_path, CLOCK, unexpected)
    announced: list[int | None] = []

    async def announce(port: int | None) -> None:
        announced.append(port)

    inviting = Inviting(hearth, CLOCK, announce, lambda ending, joined: None)
    try:
        first, second = await asyncio.gather(
            *(inviting.open(TrustLevel.TRUSTED, 60.0, "127.0.0.1", "127.0.0.1") for _ in range(2))
        )
        assert announced[-1] == second.port
        shut = await inviting.outcome(first.port, 5.0)
        assert shut is not None
        assert shut.ending is WindowEnding.CLOSED
    finally:
        await inviting.close()
        await hearth.close()
    assert announced[-1] is None


async def test_an_invitation_names_the_address_that_this_machine_has_now(tmp_path: Path) -> None:
    def at(address: str) -> Interface:
        return Interface("home0", True, (IPv4Interface(f"{address}/8"),))

    key, table = new_key(), [at("127.0.0.2")]
    reach = Reach(["home0"], "127.0.0.2", lambda: table)
    settings = PeeringSettings(key.node_id, "attic", "", "test/0", "127.0.0.2", answers_at=reach)
    network = Network(
        key,
        await asyncio.to_thread(StatePaths(tmp_path).create),
        NetworkSettings(settings, ("home0",), is_enabled=True),
        ShardStore(CLOCK, expiry_s=60.0),
        CLOCK,
        NetworkHooks(Serving, lambda event: None, lambda: None, lambda kind, fields: None),
        ResourceLedger(CLOCK),
    )
    await network.start()
    try:
        table[:] = [at("127.0.0.3")]
        window = await network.invite(TrustLevel.TRUSTED, 60.0)
        ticket = parse_ticket(window.link)
        assert window.host == ticket.host == "127.0.0.3"
    finally:
        await network.stop()
