"""What discovery tells the rest of the daemon, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from mesh.types import NodeId


@dataclass(frozen=True, slots=True)
class PeerUp:
    """The control link to a node is up. `initiated` says whether this node dialled."""

    node_id: NodeId
    name: str
    address: str
    initiated: bool
    type: str = "peer_up"


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The control link is gone: ``goodbye`` when the node said so, else why."""

    node_id: NodeId
    name: str
    reason: str
    type: str = "peer_down"


@dataclass(frozen=True, slots=True)
class PeerSeen:
    """A node was heard of that is not linked; `state` is a `mesh.discovery.peering.PeerState`."""

    node_id: NodeId | None
    name: str
    address: str
    state: str
    reason: str
    type: str = "peer_seen"


@dataclass(frozen=True, slots=True)
class Warned:
    """Something a person should know. Nothing has stopped. Where it ends by itself it is so `until`
    that time, in ISO 8601."""

    code: str
    message: str
    fix: str
    until: str | None = None
    type: str = "warning"


PeerEvent = PeerUp | PeerDown | PeerSeen | Warned
