"""Members of the hearth that are seen nowhere, and since when.

A machine that sleeps is forgotten by mDNS and by those who dial it within a minute or two; that it
is one of the hearth is in the log all the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from mesh.clock import Clock
from mesh.identity.roster import Roster
from mesh.types import NodeId


@dataclass(frozen=True, slots=True)
class Away:
    """A member that is not seen; `last_seen` (UTC) is None where it was not since this start."""

    node_id: NodeId
    name: str
    last_seen: datetime | None

    def row(self) -> dict[str, str | None]:
        """``{"id", "name", "last_seen": ISO 8601 | None}``."""
        last_seen = None if self.last_seen is None else self.last_seen.isoformat()
        return {"id": self.node_id, "name": self.name, "last_seen": last_seen}


class Presence:
    """When each member was linked last."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_seen: dict[NodeId, datetime] = {}

    def parted(self, node: NodeId) -> None:
        """The link to it has ended."""
        self._last_seen[node] = self._clock.now()

    def away(self, roster: Roster, seen: Collection[NodeId]) -> list[Away]:
        """The members that are not among those `seen`, by name. Who is no member is forgotten."""
        members = roster.members
        self._last_seen = {node: at for node, at in self._last_seen.items() if node in members}
        missing = (member for node, member in members.items() if node not in seen)
        return sorted(
            (Away(each.node_id, each.name, self._last_seen.get(each.node_id)) for each in missing),
            key=lambda each: (each.name, each.node_id),
        )
