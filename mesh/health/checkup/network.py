"""What this machine can do on its network without a daemon: interfaces, multicast, who is there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mesh.discovery.announcement import Announcement
from mesh.discovery.echo import Echo, echo
from mesh.discovery.interfaces import Interface, InterfaceChoice, Skipped, read_table, select
from mesh.discovery.knocking import REFUSED, TIMED_OUT, knock
from mesh.discovery.looking import look_around
from mesh.errors import BadValue
from mesh.health.checkup.findings import Finding, failed, fine, note, wrong
from mesh.identity.keys import short_id
from mesh.types import NodeId

ROUND_S = 1.5
LOOK_S = 2.5
KNOCK_S = 2.0
MULTICAST = "multicast"
_BE = ("is", "are")
NAME_ONE = "name one node on the other: `hearthnet up --peer HOST:PORT`"


@dataclass(frozen=True, slots=True)
class Known:
    """Who need not be looked at: this node, and those with whom its daemon is in touch. `hearth` is
    the id of the hearth that this node is in, empty in none."""

    own: NodeId | None = None
    hearth: str = ""
    peers: frozenset[NodeId] = frozenset()


async def network(requested: Sequence[str], known: Known) -> list[Finding]:
    """All of it, at the same time; takes seconds. `requested` as the setting ``interface``."""
    table = await asyncio.to_thread(read_table)
    try:
        chosen, skipped = select(table, requested)
    except BadValue as error:
        return [failed("interfaces", error)]
    own = frozenset(str(a.ip) for each in table for a in each.addresses)
    rounds = [echo(str(choice.address), own, ROUND_S) for choice in chosen]
    there = asyncio.create_task(_around(chosen), name="look around")
    echoes = await asyncio.gather(*rounds)
    findings = [*_interfaces(chosen, skipped, table, asked=bool(requested))]
    findings += [multicast(each, heard) for each, heard in zip(chosen, echoes, strict=True)]
    announced = await there
    return [*findings, *cloned(announced), *await _neighbours(announced, known, chosen)]


def multicast(choice: InterfaceChoice, found: Echo) -> Finding:
    """What one round says of an interface, and of a packet filter on this machine."""
    where = f"{choice.name} ({choice.address})"
    if found.error:
        return wrong(
            MULTICAST, f"On {where} nothing can be sent by multicast: {found.error}.",
            f"If a firewall is on, let UDP port 5353 out; else {NAME_ONE}.",
        )  # fmt: skip
    if not found.heard:
        return wrong(
            MULTICAST,
            f"On {where} multicast goes out and does not come in: a firewall on this machine drops"
            " what arrives, so it sees nobody, whoever is there.",
            f"{let_in(str(choice.network))} Until then, {NAME_ONE}.",
        )
    many = len(found.others)
    who = f"{many} other machine{'s' * (many != 1)} answered" if many else "nobody else answered"
    return fine(MULTICAST, f"{where} sends it and hears it; {who}")


def let_in(network: str) -> str:
    """How a firewall lets nodes of this network in; each layer's port is another."""
    return (
        f"Let UDP port 5353 and all TCP ports in from {network}, for instance with `sudo ufw allow"
        f" from {network}`."
    )


def cloned(announced: Sequence[Announcement]) -> Iterator[Finding]:
    """One identity that answers at two places."""
    by_node: dict[NodeId, list[Announcement]] = {}
    for each in announced:
        by_node.setdefault(each.node_id, []).append(each)
    for node, runs in by_node.items():
        places = {frozenset(each.addresses) for each in runs}
        apart = [place for place in places if all(place.isdisjoint(o) for o in places - {place})]
        if len(apart) > 1:
            where = " and ".join(sorted(min(place) for place in apart))
            yield wrong(
                "identity",
                f"Two machines have the key of node {short_id(node)} ({runs[0].name}): {where}.",
                "Give one of them a new --state-dir; if you copied nothing, revoke the member:"
                " `hearthnet members revoke`.",
            )


def _interfaces(
    chosen: Sequence[InterfaceChoice],
    skipped: Sequence[Skipped],
    table: Sequence[Interface],
    *,
    asked: bool,
) -> Iterator[Finding]:
    inner = {each.name for each in table if each.is_loopback}
    for choice in chosen:
        if not choice.address.is_loopback:
            yield fine("interfaces", f"{choice.name} ({choice.address}) is used: {choice.reason}")
        elif asked:
            yield note("interfaces", f"{choice.name} is used, as asked for: no other machine is.")
        else:
            yield wrong(
                "interfaces", "There is no network to use: only nodes on this machine are found.",
                "Connect it, or name one that is left out: --interface NAME. It has to have an IPv4"
                " address, as nodes call each other over IPv4.",
            )  # fmt: skip
    left: dict[str, list[str]] = {}
    for each in skipped:
        if each.name not in inner:
            left.setdefault(each.reason, []).append(each.name)
    for why, names in left.items():
        yield note("interfaces", f"{', '.join(names)} {_BE[len(names) > 1]} not used: {why}")


async def _around(chosen: Sequence[InterfaceChoice]) -> list[Announcement]:
    try:
        return await look_around(chosen, LOOK_S)
    except OSError:  # the round on that interface says why
        return []


async def _neighbours(
    announced: Sequence[Announcement], known: Known, chosen: Sequence[InterfaceChoice]
) -> list[Finding]:
    others = {
        each.node_id: each
        for each in announced
        if each.node_id != known.own and each.node_id not in known.peers
    }
    found = await asyncio.gather(*(_neighbour(each, known) for each in others.values()))
    if found or known.peers or not chosen:
        return list(found)
    nobody = note(
        "neighbours",
        "No other node announces itself here.",
        "If one runs on this network, it is cut off from this machine: by a firewall there, or by a"
        f" Wi-Fi that keeps its guests apart; {NAME_ONE}.",
    )
    return [nobody]


async def _neighbour(each: Announcement, known: Known) -> Finding:
    who, where = f"{each.name} ({short_id(each.node_id)})", each.endpoints()[0]
    tried = await asyncio.gather(*(knock(host, each.port, KNOCK_S) for host in each.addresses))
    why = tried[0] if all(tried) else ""
    if why == TIMED_OUT:
        return wrong(
            "neighbours",
            f"{who} announces itself at {where} and answers nobody who calls: a firewall there"
            " drops what arrives.",
            f"On {each.name}, let all TCP ports in from this network.",
        )
    if why:
        reason = "nothing listens there, or a firewall says no" if why == REFUSED else why
        return wrong(
            "neighbours", f"{who} announces itself at {where}, but cannot be called: {reason}.",
            f"See whether it still runs: `hearthnet status` on {each.name}.",
        )  # fmt: skip
    if known.hearth and each.hearth != known.hearth:
        return note(
            "neighbours", f"{who} at {where} can be called, and is in another hearth.",
            "`hearthnet invite` lets a machine in.",
        )  # fmt: skip
    return fine("neighbours", f"{who} at {where} can be called")
