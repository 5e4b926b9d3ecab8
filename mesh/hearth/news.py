"""What people are told of changes to a hearth's members, and what became of a node that goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mesh.discovery.events import Warned
from mesh.events.intake import Report
from mesh.hearth.founding import Founding
from mesh.identity.roster import Roster, departed
from mesh.types import NodeId

PUT_OUT = Warned(
    "revoked",
    "This node was put out of its hearth; its key never comes back.",
    "`hearthnet members leave` gives it a hearth of its own, from which it can join another; to"
    " come back to that one, use a new --state-dir and ask an anchor for an invitation.",
)


def warned(report: Report, roster: Roster | None) -> Warned:
    """What people are told of a report of the log, with a member's name for its id."""
    known = None if roster is None or report.node is None else roster.members.get(report.node)
    message = report.message
    if known is not None:
        message = message.replace(known.node_id, known.name)
    return Warned(report.kind, message, report.fix, report.until)


def not_in(hearth: str) -> Warned:
    """What is said where the hearth's log, and what was told at joining, do not name this node."""
    return Warned(
        "not_a_member",
        f"This node is no member of its hearth, {hearth!r}: its key is a new one, or the hearth's"
        " log was lost here.",
        "Ask an anchor for an invitation and `hearthnet join` it; `hearthnet members leave` gives"
        " this node a hearth of its own.",
    )


def not_let_in(hearth: str, refusing: Sequence[str]) -> Warned:
    """What is said where members refuse this node and none is linked."""
    return Warned(
        "not_let_in",
        f"No member of {hearth!r} is linked, and this node is refused by {', '.join(refusing)}: it"
        " was put out, or has not been heard of there yet.",
        "See `hearthnet members` there. A node that was put out gets a hearth of its own with"
        " `hearthnet members leave`; to come back, it needs a new --state-dir and an invitation.",
    )


@dataclass(frozen=True, slots=True)
class Departure:
    """Of a node that has left: these others know by now, and it is in what it `founded`."""

    told: frozenset[NodeId]
    founded: Founding


def notices(before: Roster, after: Roster) -> Iterator[tuple[str, dict[str, object]]]:
    """The events, type and fields, of members that left, joined, or are other than before."""
    for node in departed(before, after):
        yield "member_left", _named(before, node)
    for node in after.members:
        if node not in before.members:
            yield "member_joined", _named(after, node)
        elif before.members[node].level is not after.members[node].level:
            yield "member_changed", _named(after, node)
        elif before.members[node].name != after.members[node].name:
            yield "member_renamed", _named(after, node) | {"was": before.members[node].name}


def _named(roster: Roster, node: NodeId) -> dict[str, object]:
    member = roster.members[node]
    return {"node_id": node, "name": member.name, "level": member.level.label}


def forked(roster: Roster, node: NodeId, *, is_own: bool) -> Warned:
    """What is said of a member that has signed two histories."""
    name = "This node" if is_own else roster.members[node].name
    return Warned(
        "decisions_forked",
        f"{name} has signed two different histories: its log was restored from a backup, or its key"
        " was copied. It decides nothing until that is settled.",
        "If it was restored: `hearthnet members readmit` on another anchor. If not: `hearthnet"
        " members revoke`. With no other anchor left: `hearthnet members recover` with the code.",
    )
