"""What is known of nodes that are not linked, and what was already said about them.

Turns repeated findings into one event each, so that a node which stays unreachable is reported once
and not at every attempt. Knows nothing of links.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

from mesh.discovery.events import PeerEvent, PeerSeen, Warned
from mesh.errors import ConnectFailed
from mesh.identity.keys import short_id
from mesh.types import NodeId

NOT_KNOWN_THERE = "it does not know this node as a member of the hearth"
"""The reason of a member of the hearth that refuses this node."""
_MAX_WARNED = 256
_MAX_NAMES = 256


class PeerState(StrEnum):
    """How this node stands with another one."""

    UP = "up"
    TRYING = "trying"
    UNREACHABLE = "unreachable"
    OTHER_HEARTH = "other hearth"
    OTHER_VERSION = "other version"
    NOT_A_PEER = "not a peer"
    SELF = "this node"


@dataclass(frozen=True, slots=True)
class PeerView:
    """A row of the peers table. `node_id` is None while a named address has not answered yet."""

    node_id: NodeId | None
    name: str
    address: str
    state: PeerState
    reason: str
    rtt_ms: float | None


class Sightings:
    """The rows of nodes that are not linked, by what led to them."""

    def __init__(self, on_event: Callable[[PeerEvent], None]) -> None:
        self._on_event = on_event
        self._rows: dict[str, PeerView] = {}
        self._names: dict[NodeId, str] = {}
        self._warned: set[str] = set()

    def rows(self) -> list[PeerView]:
        """The present rows: one of a node at an address, whether named, announced or both."""
        return list({(row.node_id, row.address): row for row in self._rows.values()}.values())

    def met(self, node_id: NodeId, name: str) -> None:
        """A member is linked: it keeps its name once it is not; a bounded number does."""
        self._names.pop(node_id, None)
        self._names[node_id] = name
        if len(self._names) > _MAX_NAMES:
            del self._names[next(iter(self._names))]

    def name_of(self, node_id: NodeId | None) -> str | None:
        """The name under which a node was linked last; None for one that never was."""
        return self._names.get(node_id) if node_id is not None else None

    def show(self, key: str, view: PeerView) -> None:
        """Put the row in place; an event only when it says something new."""
        before = self._rows.get(key)
        self._rows[key] = view
        if before != view:
            self._on_event(
                PeerSeen(view.node_id, view.name, view.address, view.state.value, view.reason)
            )

    def expect(self, keys: Collection[str], view: PeerView) -> None:
        """Show the row of who was linked until now; that it is gone was said already."""
        self._rows |= dict.fromkeys(keys, view)

    def keep_only(self, keys: Collection[str]) -> None:
        """Forget all other rows."""
        self._rows = {key: view for key, view in self._rows.items() if key in keys}

    def forget(self, key: str) -> None:
        """Nothing to say about this one any more."""
        self._rows.pop(key, None)

    def warn_once(self, key: str, warning: Warned) -> None:
        """Hand the warning on unless one with this key was; remembers a bounded number of keys."""
        if len(self._warned) >= _MAX_WARNED:
            self._warned.clear()
        if key not in self._warned:
            self._warned.add(key)
            self._on_event(warning)

    def warn_cloned(self, node_id: NodeId, one: str, other: str) -> None:
        """Two machines have one key: a copied home directory, most likely."""
        warning = Warned(
            code="cloned_key",
            message=f"Two machines have the key of node {short_id(node_id)}: {one} and {other}.",
            fix="Give one of them a new --state-dir; if you copied nothing, revoke the member.",
        )
        self.warn_once(f"cloned {' '.join(sorted((one, other)))}", warning)


def why_not(error: Exception) -> tuple[PeerState, str]:
    """What a failed dial says of whoever is there."""
    if isinstance(error.__cause__, ssl.SSLError):
        if not isinstance(error.__cause__, ssl.SSLCertVerificationError):  # it is one to this node
            return PeerState.NOT_A_PEER, NOT_KNOWN_THERE
        return PeerState.NOT_A_PEER, "it and this node are not members of one hearth"
    reached = not isinstance(error, ConnectFailed | UnicodeError)
    return PeerState.NOT_A_PEER if reached else PeerState.UNREACHABLE, str(error)
