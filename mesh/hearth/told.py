"""What people are told of changes in a hearth: who came and went, and who signed two histories."""

from __future__ import annotations

from mesh.discovery.events import Warned
from mesh.identity.roster import Roster
from mesh.types import NodeId


def named(roster: Roster, node: NodeId) -> dict[str, object]:
    """A member for the feed of events: ``{"node_id", "name", "level"}``."""
    member = roster.members[node]
    return {"node_id": node, "name": member.name, "level": member.level.label}


def forked(roster: Roster, node: NodeId, *, is_own: bool) -> Warned:
    """That a member, perhaps this node itself, signed two histories, and what to do."""
    name = "This node" if is_own else roster.members[node].name
    return Warned(
        "decisions_forked",
        f"{name} has signed two different histories: its log was restored from a backup, or its key"
        " was copied. It decides nothing until that is settled.",
        "If it was restored: `hearthnet members readmit` on another anchor. If not: `hearthnet"
        " members revoke`. With no other anchor left: `hearthnet members recover` with the code.",
    )
