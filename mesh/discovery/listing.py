"""From what peers say to what the directory lists, and to who else is dialled: only what verifies,
and to the directory only from who may serve.

Owns no link; is told what came over one, and from whom.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from mesh.accounts.ledger import Resource, of_peer
from mesh.discovery import neighbours
from mesh.discovery.advertisement import Advertisement, at_host
from mesh.discovery.dialing import Dialer
from mesh.discovery.directory import NodeInfo, ShardStore
from mesh.discovery.events import Warned
from mesh.discovery.greeting import PeerHello, label
from mesh.discovery.links import ControlLink, LinkTable
from mesh.discovery.notices import Notices, PeerTrust
from mesh.discovery.sightings import Sightings
from mesh.errors import BadAdvertisement, LimitReached
from mesh.types import NodeId
from mesh.wire.messages import Advertise


class Listing:
    """Keeps the directory's entries of linked peers.

    Who sends too much that is forged or malformed is not listened to for some minutes, and who
    sends too much at all for the rest of the minute: nobody keeps this node busy with checking.
    """

    def __init__(
        self,
        store: ShardStore,
        notices: Notices,
        trust: PeerTrust,
        sightings: Sightings,
        links: LinkTable,
        dialer: Dialer,
    ) -> None:
        self._store = store
        self._notices = notices
        self._trust = trust
        self._sightings = sightings
        self._accounts = trust.accounts
        self._links = links
        self._dialer = dialer

    def hear(self, end: ControlLink, message: Advertise) -> None:
        """Take down what a peer signed of itself; all else is told once and changes nothing."""
        peer = end.hello
        principal = of_peer(peer.node_id)
        if self._accounts.exhausted(principal, Resource.BAD_ADVERTISEMENTS_PER_MINUTE):
            return
        try:
            self._accounts.spend(principal, Resource.ADVERTISEMENTS_PER_MINUTE)
        except LimitReached:  # the ledger shows it
            return
        try:
            heard, ttl_s = self._notices.read(message, peer.node_id)
        except BadAdvertisement as error:
            self._accounts.charge(principal, Resource.BAD_ADVERTISEMENTS_PER_MINUTE)
            self._warn(peer, error)
            return
        end.advertised = heard
        end.advertised_until = asyncio.get_running_loop().time() + ttl_s
        self.relist(end)
        neighbours.follow(self._links.all(), self._trust.tls.trusts, self._dialer, self._sightings)

    def relist(self, end: ControlLink) -> None:
        """List what a peer last said it serves, if it is trusted to serve, for what is left."""
        peer, heard = end.hello, end.advertised
        if heard is None:
            return
        if not self._trust.may_serve(peer.node_id):
            heard = replace(heard, shards=(), weights=())
        if end.host in peer.hosts:
            # Of a peer on several networks, the address by which it is reached from here.
            shards = tuple(_reached_at(end.host, shard) for shard in heard.shards)
            weights = [
                replace(held, endpoint=at_host(held.endpoint, end.host)) for held in heard.weights
            ]
            heard = replace(heard, shards=shards, weights=tuple(weights))
        left_s = end.advertised_until - asyncio.get_running_loop().time()
        try:
            self._store.update(info(peer), heard, left_s)
        except BadAdvertisement as error:
            self._warn(peer, error)

    def lost(self, node: NodeId, *, has_left: bool) -> None:
        """Its link is gone; `has_left`: it said so."""
        if has_left:
            self._store.remove(node)
        else:
            self._store.offline(node)
        neighbours.forget(self._links.all(), node)

    def drop(self, node: NodeId) -> None:
        """The node is no member any more."""
        self._store.remove(node)
        self._notices.forget(node)

    def _warn(self, peer: PeerHello, error: BadAdvertisement) -> None:
        warning = Warned(error.code, f"{label(peer)}: {error.message}", error.fix)
        self._sightings.warn_once(f"{peer.run} {error.param}", warning)


def _reached_at(host: str, shard: Advertisement) -> Advertisement:
    endpoint = at_host(shard.descriptor.endpoint, host)
    return replace(shard, descriptor=replace(shard.descriptor, endpoint=endpoint))


def info(peer: PeerHello) -> NodeInfo:
    """How the directory names a peer."""
    return NodeInfo(peer.node_id, peer.name, peer.address, peer.software)
