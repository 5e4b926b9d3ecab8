"""Who can open connections to whom: this node to each of its peers, and each of them back.

Every layer and every checkpoint is served at a port of its own, so that a link between two daemons
says little: all ports that either side names are tried. Reads what others own; what it means is
said by whoever asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from mesh.discovery.directory import NodeView, ShardStore
from mesh.discovery.knocking import knock
from mesh.discovery.links import ControlLink
from mesh.discovery.sightings import PeerState, PeerView
from mesh.discovery.weights import HeldWeights
from mesh.errors import ConnectFailed, LinkLost
from mesh.hearth.network import Network
from mesh.types import NodeId
from mesh.wire.call_back import MAX_PORTS

KNOCK_S = 2.0
_AT_ONCE = 16
_TRIED = (PeerState.UP, PeerState.TRYING, PeerState.UNREACHABLE)
NODES, LAYERS, WEIGHTS = "nodes", "layers", "weights"
"""What is served at a port: links between daemons, layers, checkpoints."""

Port = tuple[str, int]
"""What is there, and its number."""


class ReachProbe:
    """Implements `mesh.api.services.ReachView`. `own_weights` are what this node offers."""

    def __init__(
        self,
        own: NodeId,
        network: Network,
        store: ShardStore,
        own_weights: Callable[[], Sequence[HeldWeights]],
    ) -> None:
        self._own = own
        self._network = network
        self._store = store
        self._own_weights = own_weights
        self._looking = asyncio.Lock()
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def look(self) -> dict[str, Any]:
        """Try all of it now, which takes seconds; one look at a time."""
        async with self._looking:
            wanted = [peer for peer in self._network.peers() if peer.state in _TRIED]
            known = {view.info.node_id: view for view in self._store.nodes()}
            own = self._own_ports(known.get(self._own))
            rows = [self._row(peer, known, own) for peer in wanted]
            return {"peers": await asyncio.gather(*rows)}

    async def _row(
        self, peer: PeerView, known: dict[NodeId, NodeView], own: Sequence[Port]
    ) -> dict[str, Any]:
        link = None if peer.node_id is None else self._network.link(peer.node_id)
        view = None if peer.node_id is None else known.get(peer.node_id)
        async with self._slots:
            there = asyncio.create_task(self._there(peer, link, view), name="reach a peer")
            back = await self._back(peer.node_id, own) if link is not None else {}
            return {
                "id": peer.node_id,
                "name": peer.name,
                "address": peer.address,
                "state": peer.state.value,
                "out": await there,
                "back": None,
                "back_unknown": "",
                "ahead_s": None,
                **back,
            }

    async def _there(
        self, peer: PeerView, link: ControlLink | None, view: NodeView | None
    ) -> list[dict[str, Any]]:
        """Whether what the peer says that it serves can be reached from here."""
        host, _, control = peer.address.rpartition(":")
        host = (link.host if link is not None else "") or host.removeprefix("[").removesuffix("]")
        ports = [(NODES, int(control))] if control.isdecimal() else []
        if view is not None and view.online:
            ports += _served(view)
        ports = list(dict.fromkeys(ports))[:MAX_PORTS]
        found = await asyncio.gather(*(knock(host, port, KNOCK_S) for _, port in ports))
        return _rows(ports, found)

    async def _back(self, peer: NodeId | None, own: Sequence[Port]) -> dict[str, Any]:
        """Whether a linked peer can reach what this node serves; empty of one that is gone."""
        assert peer is not None  # noqa: S101 - it is linked
        try:
            returned = await self._network.callbacks.ask(peer, [port for _, port in own])
        except LinkLost:
            return {}
        except ConnectFailed as error:
            return {"back_unknown": error.message}
        found = [returned.found[port] for _, port in own]
        return {"back": _rows(own, found), "ahead_s": round(returned.ahead_s, 3)}

    def _own_ports(self, own: NodeView | None) -> list[Port]:
        ports = [(NODES, self._network.port)]
        ports += _served(own) if own is not None else []
        ports += _numbers(WEIGHTS, (held.endpoint for held in self._own_weights()))
        return [port for port in dict.fromkeys(ports) if port[1]][:MAX_PORTS]


def _served(view: NodeView) -> list[Port]:
    shards = (shard.descriptor.endpoint for shard in view.offers.shards if shard.health.online)
    weights = (held.endpoint for held in view.offers.weights)
    return [*_numbers(LAYERS, shards), *_numbers(WEIGHTS, weights)]


def _numbers(what: str, endpoints: Iterable[str]) -> list[Port]:
    """The ports of ``wss://HOST:PORT`` each; what has none is left out."""
    ports = (urlsplit(endpoint).port for endpoint in endpoints)
    return [(what, port) for port in ports if port]


def _rows(ports: Sequence[Port], found: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"what": what, "port": port, "why": why or None}
        for (what, port), why in zip(ports, found, strict=True)
    ]
