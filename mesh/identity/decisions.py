"""The membership events' payloads: what they say, and their form in the log.

A payload is checked completely when it is decoded; what it is worth is decided by
`mesh.identity.membership`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from mesh.errors import BadEvent, UntrustedPeer
from mesh.identity.certificates import check_certificate
from mesh.identity.keys import is_node_id, node_id
from mesh.identity.roster import Cut, TrustLevel
from mesh.types import NodeId

FOUNDED = "hearth.founded"
ADDED = "member.added"
LEVEL_CHANGED = "member.level_changed"
REVOKED = "member.revoked"
MEMBERSHIP_TYPES = frozenset({FOUNDED, ADDED, LEVEL_CHANGED, REVOKED})

NONCE_BYTES = 16
MAX_NAME = 64
MAX_REASON = 200
_MAX_SEQ = 2**63 - 1
_HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class Founded:
    """The first event of a hearth; its author is the first anchor.

    `two_signatures`: promotions to anchor need two anchors once there are two, revocations and
    demotions of an anchor once there are three. The hearth id is the hash of founder and nonce.
    """

    hearth_name: str
    nonce: bytes
    certificate: bytes
    founder_name: str
    two_signatures: bool = True


@dataclass(frozen=True, slots=True)
class Added:
    """A node is let in at `level`, ``member`` or ``trusted``."""

    certificate: bytes
    name: str
    level: TrustLevel

    @property
    def subject(self) -> NodeId:
        """Who is let in."""
        return node_id(check_certificate(self.certificate))


@dataclass(frozen=True, slots=True)
class LevelChanged:
    """One anchor's vote for a member's new level.

    `cut` is the subject's head as the author knows it: what an anchor decided up to there outlives
    its demotion, nothing after does.
    """

    subject: NodeId
    level: TrustLevel
    cut: Cut


@dataclass(frozen=True, slots=True)
class Revoked:
    """One anchor's vote to put a node out, or the node's own leave. The key never comes back."""

    subject: NodeId
    cut: Cut
    reason: str = ""


Decision = Founded | Added | LevelChanged | Revoked


def hearth_id(founder_key: bytes, nonce: bytes) -> str:
    """The id of the hearth that the owner of `founder_key` (raw) founds with `nonce`."""
    digest = hashlib.sha256(b"hearthnet/hearth/v1\0" + founder_key + nonce).digest()
    return "hh1" + base64.b32encode(digest[:20]).decode().lower()


def encode(decision: Decision) -> tuple[str, dict[str, Any]]:
    """The event type and the payload with which the log keeps a decision."""
    match decision:
        case Founded():
            return FOUNDED, {
                "hearth_name": decision.hearth_name,
                "nonce": decision.nonce,
                "certificate": decision.certificate,
                "name": decision.founder_name,
                "two_signatures": decision.two_signatures,
            }
        case Added(certificate, name, level):
            return ADDED, {"certificate": certificate, "name": name, "level": int(level)}
        case LevelChanged(subject, level, cut):
            return LEVEL_CHANGED, {"subject": subject, "level": int(level), **_cut_fields(cut)}
        case Revoked(subject, cut, reason):
            return REVOKED, {"subject": subject, "reason": reason, **_cut_fields(cut)}


def decode(kind: str, payload: Any) -> Decision:
    """Read a payload; keys that nobody knows are ignored. Raises BadEvent naming the field."""
    if not isinstance(payload, Mapping):
        _refuse("payload", "it is not a map")
    read = _Reader(payload)
    if kind == FOUNDED:
        return Founded(
            read.text("hearth_name"),
            read.blob("nonce", NONCE_BYTES),
            read.certificate(),
            read.text("name"),
            read.flag("two_signatures"),
        )
    if kind == ADDED:
        level = read.level()
        if level is TrustLevel.ANCHOR:
            _refuse("level", "nobody starts as an anchor")
        return Added(read.certificate(), read.text("name"), level)
    if kind == LEVEL_CHANGED:
        return LevelChanged(read.subject(), read.level(), read.cut())
    if kind != REVOKED:
        _refuse("type", f"{kind!r} is no membership event")
    reason = read.text("reason", shortest=0, longest=MAX_REASON)
    return Revoked(read.subject(), read.cut(), reason)


class _Reader:
    """Takes checked values out of a payload."""

    def __init__(self, payload: Mapping[str, Any]) -> None:
        self._payload = payload

    def text(self, field: str, shortest: int = 1, longest: int = MAX_NAME) -> str:
        value = self._payload.get(field)
        if type(value) is not str or not shortest <= len(value) <= longest:
            _refuse(field, f"it must have {shortest} to {longest} characters")
        if not value.isprintable():
            _refuse(field, "it has characters that cannot be printed")
        return value

    def blob(self, field: str, length: int) -> bytes:
        value = self._payload.get(field)
        if type(value) is not bytes or len(value) != length:
            _refuse(field, f"it is not {length} bytes")
        return value

    def flag(self, field: str) -> bool:
        value = self._payload.get(field)
        if type(value) is not bool:
            _refuse(field, "it is not a boolean")
        return value

    def certificate(self) -> bytes:
        value = self._payload.get("certificate")
        if type(value) is not bytes:
            _refuse("certificate", "it is not bytes")
        try:
            check_certificate(value)
        except UntrustedPeer as error:
            raise BadEvent(error.message, fix=error.fix, param="certificate") from error
        return value

    def level(self) -> TrustLevel:
        value = self._payload.get("level")
        if type(value) is not int or not TrustLevel.MEMBER <= value <= TrustLevel.ANCHOR:
            _refuse("level", "it is not a trust level")
        return TrustLevel(value)

    def subject(self) -> NodeId:
        value = self._payload.get("subject")
        if type(value) is not str or not is_node_id(value):
            _refuse("subject", "it is not a node id")
        return NodeId(value)

    def cut(self) -> Cut:
        seq = self._payload.get("last_seq")
        if type(seq) is not int or not 0 <= seq <= _MAX_SEQ:
            _refuse("last_seq", "it is not a sequence number")
        return Cut(seq, self.blob("last_hash", _HASH_BYTES if seq else 0))


def _cut_fields(cut: Cut) -> dict[str, Any]:
    return {"last_seq": cut.last_seq, "last_hash": cut.last_hash}


def _refuse(field: str, why: str) -> NoReturn:
    raise BadEvent(
        f"The {field} of a membership event is unusable: {why}.",
        fix="Run the same hearthnet version on all machines.",
        param=field,
    )
