"""Where a node's peers are, told to the others: who names one node of a hearth finds all of it.

Multicast shows everybody to everybody; where it is filtered, this does. A node tells whom it is
linked to, never whom it was only told of, so that nobody who has gone is passed round. What is told
is dialled and not believed: who answers there proves to be the member that was meant.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from mesh.codec import Text
from mesh.discovery.dialing import Dialer, parse_endpoint
from mesh.discovery.sightings import Sightings
from mesh.errors import BadValue
from mesh.identity.keys import NodeIdText
from mesh.types import NodeId

if TYPE_CHECKING:
    from mesh.discovery.links import ControlLink

MAX_NEIGHBOURS = 64
_MAX_ENDPOINTS = 4
_LONGEST = 64
"""Characters of an endpoint: an address of IPv6, its zone and a port."""
_TOLD = "told "


@dataclass(frozen=True, slots=True)
class LinkedPeer:
    """A member that the sender is linked to, and where its control port is: ``HOST:PORT`` each."""

    node_id: NodeIdText
    endpoints: Annotated[tuple[Text, ...], Meta(max_length=_MAX_ENDPOINTS)]


def linked(links: Collection[ControlLink]) -> tuple[LinkedPeer, ...]:
    """What to tell of these links; a bounded number of them."""
    return tuple(map(_neighbour, list(links)[:MAX_NEIGHBOURS]))


def follow(
    links: Collection[ControlLink],
    is_member: Callable[[NodeId], bool],
    dialer: Dialer,
    sightings: Sightings,
) -> None:
    """Dial those that peers are linked to; give up who is neither told of nor linked any more.

    Who is announced or named is dialled as such, and not once more.
    """
    known = {t.node_id for t in dialer.targets() if not t.key.startswith(_TOLD)} | {dialer.own_id}
    wanted: dict[NodeId, dict[str, None]] = {}
    for end in links:
        here = _is_loopback(end.host)
        for each in end.advertised.neighbours if end.advertised is not None else ():
            if each.node_id in known or not is_member(each.node_id):
                continue
            if found := [place for place in each.endpoints if _is_dialable(place, told_here=here)]:
                wanted.setdefault(each.node_id, {}).update(dict.fromkeys(found))
    for node_id, endpoints in wanted.items():
        dialer.add(f"{_TOLD}{node_id}", tuple(endpoints), node_id)
    up = {end.hello.node_id for end in links}
    for target in dialer.targets():
        if not target.key.startswith(_TOLD) or target.node_id in wanted:
            continue
        if target.node_id in known or target.node_id not in up:
            dialer.discard(target.key)
            sightings.forget(target.key)


def forget(links: Collection[ControlLink], node_id: NodeId) -> None:
    """The link to a node is gone: of where it is counts only what peers tell from now on."""
    for end in links:
        if end.advertised is not None:
            left = tuple(each for each in end.advertised.neighbours if each.node_id != node_id)
            end.advertised = replace(end.advertised, neighbours=left)


def _neighbour(end: ControlLink) -> LinkedPeer:
    port = end.hello.address.rpartition(":")[2]
    # As it was reached comes first: of several networks that is one which goes further.
    hosts = dict.fromkeys([end.host, *end.hello.hosts])
    places = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
    # What a peer says of itself must not make this node's own notice one that nobody can read.
    usable = [place for place in places if _host(place) is not None]
    return LinkedPeer(end.hello.node_id, tuple(usable[:_MAX_ENDPOINTS]))


# Every peer tells every other one's address again and again.
@lru_cache(maxsize=1024)
def _is_dialable(endpoint: str, *, told_here: bool) -> bool:
    """Nobody may point this node at its own services, unless it is one of this machine's."""
    host = _host(endpoint)
    if host is None or host.is_multicast or host.is_unspecified:
        return False
    return told_here or not host.is_loopback


def _is_loopback(teller: str) -> bool:
    told_from = _address(teller)
    return told_from is not None and told_from.is_loopback


def _host(endpoint: str) -> IPv4Address | IPv6Address | None:
    """Of an endpoint that is an address and a port; None for all else."""
    if len(endpoint) > _LONGEST:
        return None
    try:
        return _address(parse_endpoint(endpoint)[0])
    except BadValue:
        return None


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
