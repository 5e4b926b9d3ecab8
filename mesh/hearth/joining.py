"""Joining a hearth: finding the invitation's window, and the call there.

Used by the daemon, and by `hearthnet join` when none runs. The result is kept on the disk before
the inviter hears that it worked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

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
from mesh.identity.pairing import ELSEWHERE, Joined
from mesh.identity.pairing_tcp import join
from mesh.identity.roster import Roster
from mesh.paths import StatePaths

SEARCH_S = 15.0
_MORE_S = 2.0
"""For another window, once one has answered that the code is not its own: what is announced is
found within a second of what was found first, and people wait for an answer."""
_ANSWERS = frozenset({"code", "revoked", "refused", ELSEWHERE})
"""Refusals that the same code and key get again, however often they call."""
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
    which else is in the long form or searched by mDNS. Who shares a hearth with others is invited
    by them only: to another level. Raises BadValue for a code or address of the wrong form,
    ConnectFailed when there is no window, and PairingRejected.
    """
    parse_ticket(code)
    return await take_up(joiner, code, peer, interfaces, await _company(joiner))


async def take_up(
    joiner: JoiningNode,
    code: str,
    peer: str | None,
    interfaces: Sequence[InterfaceChoice],
    home: Roster | None,
) -> HearthRecord:
    """As `join_hearth`, for whoever knows the hearth that this node shares with others, if any."""
    ticket = parse_ticket(code)
    if home is not None:
        others = frozenset(home.members) - {joiner.key.node_id}
        ticket = replace(ticket, among=others)
    try:
        record = await _take_up(joiner, ticket, peer, interfaces)
    except PairingRejected as error:
        if home is not None and error.param == ELSEWHERE:
            raise _in_already(home) from error
        raise
    if home is not None and home.hearth_id != record.hearth_id:
        raise _in_already(home)  # whoever invited has left it, and that is not known here
    return record


def _in_already(home: Roster) -> PairingRejected:
    return PairingRejected(
        f"This node is in {home.name!r} already, with {len(home.members) - 1} other node(s).",
        fix="Take it out first (`hearthnet members leave`), or use another --state-dir.",
        param="member",
    )


async def _take_up(
    joiner: JoiningNode, ticket: Ticket, peer: str | None, interfaces: Sequence[InterfaceChoice]
) -> HearthRecord:
    if peer is not None:
        return await _join_at(joiner, ticket, *parse_endpoint(peer))
    if ticket.host is not None and ticket.port is not None:
        return await _join_at(joiner, ticket, ticket.host, ticket.port)
    return await _search(joiner, ticket, interfaces)


async def _company(joiner: JoiningNode) -> Roster | None:
    paths = joiner.paths
    record = await asyncio.to_thread(read_record, paths.hearth)
    if record is None:
        return None
    hearth = await Hearth.open(
        joiner.key, record, paths.events_dir, joiner.clock, lambda report: None
    )
    try:
        return company(hearth)
    finally:
        await hearth.close()


def company(hearth: Hearth) -> Roster | None:
    """The members of a hearth that is open, where this node is one of several; else None."""
    roster, own = hearth.roster, hearth.key.node_id
    return roster if own in roster.members and len(roster.members) > 1 else None


async def _search(
    joiner: JoiningNode, ticket: Ticket, interfaces: Sequence[InterfaceChoice]
) -> HearthRecord:
    """Try the code at every window that the network shows, until one takes it."""
    failure: MeshError | None = None
    now = asyncio.get_running_loop().time
    ends = now() + SEARCH_S
    with suppress(TimeoutError):
        async with asyncio.timeout_at(ends) as search, aclosing(windows(interfaces)) as found:
            tried = 0
            async for window in found:
                for address in window.addresses:
                    try:
                        return await _join_at(joiner, ticket, address, window.pairing or 0)
                    except ConnectFailed as error:
                        failure = failure or error
                    except PairingRejected as error:
                        failure = error
                        if error.param in _ANSWERS:
                            search.reschedule(min(ends, now() + _MORE_S))
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
        if ticket.among is None:  # else its log says more than what it is told here
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
