"""Windows for invitations in the daemon: one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from ipaddress import IPv4Interface
from pathlib import Path

import pytest

from mesh.accounts.ledger import ResourceLedger
from mesh.clock import SystemClock
from mesh.discovery.directory import ShardStore
from mesh.discovery.events import PeerEvent, Warned
from mesh.discovery.interfaces import Interface, Reach
from mesh.discovery.peering import PeeringSettings
from mesh.errors import Busy, PairingRejected
from mesh.events.intake import Report
from mesh.hearth.founding import found
from mesh.hearth.hearth import Hearth, Waits
from mesh.hearth.inviting import Inviting
from mesh.hearth.network import Network
from mesh.hearth.network_settings import NetworkHooks, NetworkSettings
from mesh.hearth.news import warned
from mesh.hearth.publishing import Serving
from mesh.identity.certificates import make_certificate
from mesh.identity.decisions import Added
from mesh.identity.invitations import WindowEnding, parse_ticket
from mesh.identity.keys import NodeKey
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
    network = await in_network(key, tmp_path, lambda: table, lambda event: None)
    await network.start()
    try:
        table[:] = [at("127.0.0.3")]
        window = await network.invite(TrustLevel.TRUSTED, 60.0)
        ticket = parse_ticket(window.link)
        assert window.host == ticket.host == "127.0.0.3"
    finally:
        await network.stop()


async def test_nobody_is_invited_before_this_node_may_sign_that_it_is_in(tmp_path: Path) -> None:
    key, other = new_key(), new_key()
    record = (await found(key, "attic", tmp_path, CLOCK, unexpected)).record
    hearth = await Hearth.open(key, record, tmp_path, CLOCK, unexpected)
    await hearth.decide(Added(make_certificate(other), "barn", TrustLevel.TRUSTED))
    await hearth.close()
    hearth = await Hearth.open(key, record, tmp_path, CLOCK, unexpected, waits=Waits(alone_s=0.3))

    async def announce(port: int | None) -> None:
        assert port is None or may_sign.done()

    may_sign = asyncio.create_task(hearth.heard())
    inviting = Inviting(hearth, CLOCK, announce, lambda ending, joined: None)
    try:
        await inviting.open(TrustLevel.TRUSTED, 60.0, "127.0.0.1", "127.0.0.1")
        assert may_sign.done()
    finally:
        await inviting.close()
        await hearth.close()


async def test_a_node_whose_key_is_lost_is_told_that_it_is_not_in_its_hearth(
    tmp_path: Path,
) -> None:
    told: list[PeerEvent] = []
    for key, is_told in ((new_key(), False), (new_key(), True)):
        network = await in_network(key, tmp_path, list, told.append)
        await network.start()
        await network.stop()
        codes = [event.code for event in told if isinstance(event, Warned)]
        assert ("not_a_member" in codes) is is_told


async def test_who_asks_for_the_hearth_while_a_node_joins_another_is_told_to_wait(
    tmp_path: Path,
) -> None:
    network = await in_network(new_key(), tmp_path, list, lambda event: None, "127.0.0.1")
    await network.start()
    gone = asyncio.Event()

    async def listen_until_gone(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gone.wait()
        writer.close()

    silent = await asyncio.start_server(listen_until_gone, "127.0.0.1", 0)
    place = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    joining = asyncio.create_task(network.join("amber-river-42", place))
    try:
        async with asyncio.timeout(20):
            while network.hearth is not None:  # noqa: ASYNC110 - nobody else is told
                await asyncio.sleep(0.01)
        with pytest.raises(Busy, match="joining"):
            await network.join("amber-river-42", place)
        with pytest.raises(Busy, match="joining"):
            await network.invite(TrustLevel.TRUSTED, 60.0)
        gone.set()
        with pytest.raises(PairingRejected, match="hung up"):
            await joining
        assert network.hearth is not None, "it is back in its own"
    finally:
        silent.close()
        await network.stop()


async def test_a_report_names_its_member(tmp_path: Path) -> None:
    key = new_key()
    record = (await found(key, "attic", tmp_path, CLOCK, unexpected)).record
    hearth = await Hearth.open(key, record, tmp_path, CLOCK, unexpected)
    roster = hearth.roster
    await hearth.close()
    until = "2030-01-01T00:00:00+00:00"
    said = f"The clock of {key.node_id} is ahead."
    report = Report("clock_skew", key.node_id, said, "Set it.", until)
    shown = Warned("clock_skew", "The clock of attic is ahead.", "Set it.", until)
    assert warned(report, roster) == shown
    assert warned(report, None).message == report.message


async def in_network(
    key: NodeKey,
    state: Path,
    table: Callable[[], list[Interface]],
    on_event: Callable[[PeerEvent], None],
    interface: str = "home0",
) -> Network:
    """A node that is not started yet."""
    reach = Reach(["home0"], "127.0.0.2", table)
    settings = PeeringSettings(key.node_id, "attic", "", "test/0", "127.0.0.2", answers_at=reach)
    return Network(
        key,
        await asyncio.to_thread(StatePaths(state).create),
        NetworkSettings(settings, (interface,), is_enabled=True),
        ShardStore(CLOCK, expiry_s=60.0),
        CLOCK,
        NetworkHooks(Serving, on_event, lambda: None, lambda kind, fields: None),
        ResourceLedger(CLOCK),
    )
