"""Joining a hearth: finding the invitation's window, and the call there.

Used by the daemon, and by `hearthnet join` when none runs. The result is kept on the disk before
the inviter hears that it worked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from mesh.clock import Clock
from mesh.discovery.announcement import Announcement
from mesh.discovery.dialing import parse_endpoint
from mesh.discovery.interfaces import InterfaceChoice
from mesh.discovery.looking import announcements
from mesh.errors import ConnectFailed, MeshError, PairingRejected
from mesh.hearth.hearth import Hearth
from mesh.hearth.record import HearthRecord, read_record, write_record
from mesh.identity.decisions import HEARTH_PREFIX
from mesh.identity.invitations import Ticket, parse_ticket
from mesh.identity.keys import NodeKey
from mesh.identity.pairing import Joined
from mesh.identity.pairing_tcp import join
from mesh.paths import StatePaths

SEARCH_S = 15.0
_MAX_WINDOWS = 8


@dataclass(frozen=True, slots=True)
class JoiningNode:
    """The node that joins: its key, its name, the directory of its state."""

    key: NodeKey
    name: str
    paths: StatePaths
    clock: Clock


async def join_hearth(
    joiner: JoiningNode, code: str, peer: str | None, interfaces: Sequence[InterfaceChoice]
) -> HearthRecord:
    """Take up an invitation and keep what it says; the node is a member when this returns.

    `code` is what the inviter's screen shows, short or long; `peer` is ``HOST:PORT`` of its window,
    which else is in the long form or searched by mDNS. Raises BadValue for a code or address of the
    wrong form, ConnectFailed when there is no window, and PairingRejected, also when this node
    shares a hearth with others already.
    """
    ticket = parse_ticket(code)
    await require_alone(joiner)
    if peer is not None:
        return await _join_at(joiner, ticket, *parse_endpoint(peer))
    if ticket.host is not None and ticket.port is not None:
        return await _join_at(joiner, ticket, ticket.host, ticket.port)
    return await _search(joiner, ticket, interfaces)


async def require_alone(joiner: JoiningNode) -> None:
    """A node is in one hearth. Raises PairingRejected when others are in this one's."""
    paths = joiner.paths
    record = await asyncio.to_thread(read_record, paths.hearth)
    if record is None:
        return
    hearth = await Hearth.open(
        joiner.key, record, paths.events_dir, joiner.clock, lambda report: None
    )
    try:
        check_alone(hearth)
    finally:
        await hearth.close()


def check_alone(hearth: Hearth) -> None:
    """Refuse, for a hearth that is open already, when it has other members than this node."""
    roster, own = hearth.roster, hearth.key.node_id
    others = len(roster.members) - 1
    if own in roster.members and others:
        raise PairingRejected(
            f"This node is in {roster.name!r} already, with {others} other node(s).",
            fix="Take it out first (`hearthnet members leave`), or use another --state-dir.",
            param="member",
        )


async def _search(
    joiner: JoiningNode, ticket: Ticket, interfaces: Sequence[InterfaceChoice]
) -> HearthRecord:
    """Try the code at every window that the network shows, until one takes it."""
    failure: MeshError | None = None
    with suppress(TimeoutError):
        async with asyncio.timeout(SEARCH_S), aclosing(windows(interfaces)) as found:
            tried = 0
            async for window in found:
                for address in window.addresses:
                    try:
                        return await _join_at(joiner, ticket, address, window.pairing or 0)
                    except ConnectFailed as error:
                        failure = failure or error
                    except PairingRejected as error:
                        failure = error
                        break
                tried += 1
                if tried >= _MAX_WINDOWS:
                    break
    raise failure or ConnectFailed(
        "No open invitation was found on the network.",
        fix="Run `hearthnet invite` on the other machine, or name it with --peer HOST:PORT.",
    )


async def windows(
    interfaces: Sequence[InterfaceChoice],
) -> AsyncGenerator[Announcement, None]:
    """The nodes that announce an open invitation, as they are found; without end."""
    seen: set[tuple[str, int]] = set()
    try:
        async with aclosing(announcements(interfaces)) as found:
            async for each in found:
                place = (each.instance, each.pairing or 0)
                if each.pairing is not None and place not in seen:
                    seen.add(place)
                    yield each
    except OSError as error:
        raise ConnectFailed(
            f"Multicast DNS does not work here: {error}.",
            fix="Name the inviting machine with --peer HOST:PORT.",
        ) from error


async def _join_at(joiner: JoiningNode, ticket: Ticket, host: str, port: int) -> HearthRecord:
    kept: list[HearthRecord] = []

    async def keep(joined: Joined) -> None:
        record = _record(joined, joiner.name)
        await asyncio.to_thread(write_record, joiner.paths.hearth, record)
        kept.append(record)

    await join(host, port, key=joiner.key, name=joiner.name, ticket=ticket, keep=keep)
    return kept[0]


def _record(joined: Joined, node_name: str) -> HearthRecord:
    welcome = joined.welcome
    if not welcome.hearth_id.startswith(HEARTH_PREFIX):
        raise PairingRejected(
            f"{welcome.hearth_name!r} was founded by another version of hearthnet, whose log has"
            " another form.",
            fix="Run the same hearthnet version on both machines; one that is replaced founds its"
            " hearth anew.",
            param="protocol",
        )
    if not any(member.node_id == joined.inviter for member in welcome.members):
        raise PairingRejected(
            "The inviter is not a member of the hearth that it invites to.",
            fix="Check what runs there.",
            param="protocol",
        )
    return HearthRecord(welcome.hearth_id, welcome.hearth_name, welcome.members, node_name)
