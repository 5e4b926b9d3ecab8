"""The hearth's verbs: view, invite, join, leave, promote, demote, revoke, recover.

The HTTP API's `mesh.api.services.HearthControl`; JSON-able values in and out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mesh.discovery.sightings import PeerState
from mesh.errors import BadRequest, NotFound
from mesh.events.types import TOKEN_REVOKED
from mesh.hearth.hearth import Hearth
from mesh.hearth.listing import LogFilter, listing
from mesh.hearth.network import Network
from mesh.identity.decisions import LevelChanged, Readmitted, Revoked
from mesh.identity.fingerprints import fingerprint
from mesh.identity.invitations import DEFAULT_TTL_S, qr_code
from mesh.identity.keys import short_id
from mesh.identity.naming import nodes_meant, told_apart
from mesh.identity.roster import Member, Roster, TrustLevel
from mesh.types import NodeId

_ANSWER_S = 30.0
"""The longest that a question waits; who asked asks again."""


class Control:
    """The hearth's verbs for the API: plain arguments in, JSON-able answers out."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def view(self) -> dict[str, Any]:
        """The members, those who are out, and the log's record, ready for JSON."""
        hearth = self._network.require_hearth()
        roster, own = hearth.roster, hearth.key.node_id
        standing = self._standing(own)
        return {
            "id": hearth.id,
            "name": roster.name,
            "self": own,
            "is_member": roster.is_member(own),
            "two_signatures": roster.two_signatures,
            "members": [
                {
                    **_member(m),
                    **standing.get(m.node_id, {}),
                    "self": m.node_id == own,
                    "forked": m.node_id in roster.forked,
                }
                for m in sorted(roster.members.values(), key=lambda m: (-m.level, m.name))
            ],
            "pending": [
                {
                    "node_id": p.subject,
                    "name": _name(roster, p.subject),
                    "action": p.action,
                    "voters": [_name(roster, voter) for voter in p.voters],
                    "needed": p.needed,
                }
                for p in roster.pending
            ],
            "out": [
                {
                    "node_id": node,
                    "name": _name(roster, node),
                    "why": "frozen" if node in roster.frozen else "revoked",
                }
                for node in sorted(roster.cuts)
            ],
            "models": [
                {**fact.payload, "id": name, "by": _name(roster, fact.author)}
                for name, fact in sorted(hearth.log.state.models().items())
            ],
            "shards": [
                {**fact.payload, "node": _name(roster, node)}
                for (node, _), fact in sorted(hearth.log.state.advertised_shards().items())
            ],
        }

    async def log(self, wanted: LogFilter) -> dict[str, Any]:
        """A page of the signed log; see `mesh.hearth.listing.listing`."""
        hearth = self._network.require_hearth()
        return await listing(hearth.log, wanted, partial(_name, hearth.roster))

    async def invite(self, level: str | None, ttl_s: float | None) -> dict[str, Any]:
        """Open a window for one node."""
        wanted = _level(level) if level is not None else TrustLevel.TRUSTED
        window = await self._network.invite(wanted, DEFAULT_TTL_S if ttl_s is None else ttl_s)
        return {
            "code": window.invitation.code,
            "link": window.link,
            "qr": qr_code(window.link),
            "level": wanted.label,
            "ttl_s": window.invitation.ttl_s,
            "host": window.host,
            "port": window.port,
        }

    async def invitation(self, port: int) -> dict[str, Any]:
        """What became of the window at `port`; answers when it ends, or after a while."""
        outcome = await self._network.invitation(port, _ANSWER_S)
        if outcome is None:
            said = ("ending", "node_id", "name", "level", "before", "error")
            return {"open": True, **dict.fromkeys(said)}
        joined, refused = outcome.joined, outcome.refused
        return {
            "open": False,
            "ending": outcome.ending.value,
            "node_id": joined.node_id if joined is not None else None,
            "name": joined.name if joined is not None else None,
            "level": outcome.level.label if outcome.level is not None else None,
            "before": outcome.before.label if outcome.before is not None else None,
            "error": refused.to_dict() if refused is not None else None,
        }

    async def close_invitation(self) -> dict[str, Any]:
        """Shut the open window."""
        await self._network.close_invitation()
        return {"open": False}

    async def join(self, code: str, peer: str | None) -> dict[str, Any]:
        """Take up an invitation."""
        record = await self._network.join(code, peer)
        level = record.level_of(self._network.require_hearth().key.node_id)
        return {"id": record.hearth_id, "name": record.name, "level": level.label}

    async def promote(self, who: str, level: str | None) -> dict[str, Any]:
        """Raise a member to `level`, or by one."""
        hearth = self._network.require_hearth()
        member = _find(hearth.roster, who)
        wanted = _level(level) if level else TrustLevel(min(member.level + 1, TrustLevel.ANCHOR))
        if wanted <= member.level:
            raise _pointless(member, "promote")
        return await self._change(hearth, member, wanted)

    async def demote(self, who: str, level: str | None) -> dict[str, Any]:
        """Lower a member to `level`, or by one."""
        hearth = self._network.require_hearth()
        member = _find(hearth.roster, who)
        wanted = _level(level) if level else TrustLevel(max(member.level - 1, TrustLevel.MEMBER))
        if wanted >= member.level:
            raise _pointless(member, "demote")
        _keep_an_anchor(hearth.roster, member)
        return await self._change(hearth, member, wanted)

    async def revoke(self, who: str, reason: str) -> dict[str, Any]:
        """Put a member out for good."""
        hearth = self._network.require_hearth()
        member = _find(hearth.roster, who)
        _keep_an_anchor(hearth.roster, member)
        end = hearth.end_of_facts(member.node_id)
        await hearth.decide(Revoked(member.node_id, end, reason))
        done = member.node_id in hearth.roster.cuts
        return _outcome(hearth.roster, member, "revoke", done=done)

    async def leave(self) -> dict[str, Any]:
        """Take this node out of its hearth, into a new one of its own."""
        hearth = self._network.require_hearth()
        roster, own = hearth.roster, hearth.key.node_id
        member = roster.members.get(own)
        if member is not None:
            _require_others(roster)
            _keep_an_anchor(roster, member)
        gone = await self._network.leave()
        remain = [m for m in roster.members.values() if m.node_id != own]
        return {
            "left": roster.name,
            "remain": [_member(m) for m in sorted(remain, key=lambda m: (-m.level, m.name))],
            "told": sorted(_name(roster, node) for node in gone.told),
            "founded": gone.founded.record.name,
            "recovery_code": gone.founded.code,
        }

    async def readmit(self, who: str) -> dict[str, Any]:
        """Let a member decide again that signed two histories because it was restored."""
        hearth = self._network.require_hearth()
        member = _find(hearth.roster, who)
        if member.node_id not in hearth.roster.forked:
            raise BadRequest(
                f"{member.name} has not signed two histories.",
                fix="There is nothing to readmit.",
                param="member",
            )
        await hearth.decide(Readmitted(member.node_id))
        done = member.node_id not in hearth.roster.forked
        now = hearth.roster.members.get(member.node_id, member)
        return _outcome(hearth.roster, now, "readmit", done=done)

    async def recover(self, code: str) -> dict[str, Any]:
        """Make this node the hearth's only anchor, by the code that its founding printed."""
        hearth = self._network.require_hearth()
        before = set(hearth.roster.anchors)
        await hearth.recover(code, self._network.name)
        roster, own = hearth.roster, hearth.key.node_id
        return {
            "anchor": _member(roster.members[own]),
            "demoted": [_name(roster, node) for node in sorted(before - {own})],
        }

    async def revoke_token(self, token_id: str) -> dict[str, Any]:
        """End the session that was opened with this token, wherever it runs."""
        hearth = self._network.require_hearth()
        hearth.roster.require(hearth.key.node_id, TrustLevel.TRUSTED)
        await hearth.publish(TOKEN_REVOKED, {"token_id": token_id})
        return {"token_id": token_id}

    def _standing(self, own: NodeId) -> dict[NodeId, dict[str, Any]]:
        """How each member stands with this node: ``{"state", "last_seen"}``."""
        seen = {row.node_id: row.state.value for row in self._network.peers() if row.node_id}
        found: dict[NodeId, dict[str, Any]] = {
            node: {"state": state, "last_seen": None} for node, state in seen.items()
        }
        for member in self._network.away():
            found[member.node_id] = {"state": "away", "last_seen": member.row()["last_seen"]}
        return found | {own: {"state": PeerState.SELF.value, "last_seen": None}}

    async def _change(self, hearth: Hearth, member: Member, level: TrustLevel) -> dict[str, Any]:
        await hearth.decide(LevelChanged(member.node_id, level))
        now = hearth.roster.members.get(member.node_id)
        done = now is not None and now.level is level
        return _outcome(hearth.roster, now or member, level.label, done=done)


def _outcome(roster: Roster, member: Member, action: str, *, done: bool) -> dict[str, Any]:
    """What became of a decision; one that is not done waits for another anchor."""
    waiting = [p for p in roster.pending if p.subject == member.node_id and p.action == action]
    missing = waiting[0].needed - len(waiting[0].voters) if waiting else 0
    return {"done": done, "action": action, "votes_missing": missing, "member": _member(member)}


def _member(member: Member) -> dict[str, Any]:
    return {
        "node_id": member.node_id,
        "short_id": short_id(member.node_id),
        "fingerprint": fingerprint(member.node_id),
        "name": member.name,
        "let_in_as": member.let_in_as or None,
        "level": member.level.label,
        "added_by": member.added_by,
    }


def _name(roster: Roster, node: NodeId) -> str:
    member = roster.members.get(node) or roster.former.get(node)
    return member.name if member is not None else short_id(node)


def _find(roster: Roster, who: str) -> Member:
    """The member of that name or id, see `nodes_meant`. Raises NotFound, BadRequest for two."""
    members = roster.members.values()
    known = [(member.node_id, member.name) for member in members]
    before = [(member.node_id, member.let_in_as) for member in members if member.let_in_as]
    found = nodes_meant(who, known) or nodes_meant(who, before)
    if len(found) == 1:
        return roster.members[found[0]]
    if not found:
        raise NotFound(f"{who!r} is no member.", fix="See `hearthnet members`.", param="member")
    raise BadRequest(
        f"{len(found)} members are called {who!r}.",
        fix=f"Name one of: {told_apart(known)}.",
        param="member",
    )


def _level(text: str) -> TrustLevel:
    try:
        return TrustLevel.parse(text)
    except ValueError as error:
        raise BadRequest(f"{error}.", fix="Choose one of them.", param="level") from error


def _keep_an_anchor(roster: Roster, member: Member) -> None:
    if roster.anchors == (member.node_id,):
        raise BadRequest(
            f"{member.name} is the only anchor; nobody could decide anything without it.",
            fix="Promote another member to anchor first.",
            param="member",
        )


def _require_others(roster: Roster) -> None:
    if len(roster.members) == 1:
        raise BadRequest(
            f"This node is alone in {roster.name!r}: there is nobody to leave.",
            fix="`hearthnet join CODE` takes it into another hearth as it is.",
        )


def _pointless(member: Member, verb: str) -> BadRequest:
    return BadRequest(
        f"{member.name} is {member.level.label} already.",
        fix=f"There is nothing to {verb}.",
        param="level",
    )
