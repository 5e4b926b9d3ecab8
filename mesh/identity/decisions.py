"""What can be decided about who is in, and the payloads that say so in the log.

A payload is checked completely when it is decoded; what it is worth is decided by
`mesh.identity.membership`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgpack

from mesh.errors import BadEvent, UntrustedPeer
from mesh.identity.certificates import check_certificate
from mesh.identity.keys import is_node_id, node_id
from mesh.identity.roster import Cut, TrustLevel
from mesh.types import NodeId

FOUNDED = "hearth.founded"
ADDED = "member.added"
LEVEL_CHANGED = "member.level_changed"
REVOKED = "member.revoked"
READMITTED = "member.readmitted"
RECOVERED = "hearth.recovered"
ACKNOWLEDGED = "hearth.acknowledged"

HEARTH_PREFIX = "hh2"
"""How the ids of hearths begin whose decisions have this form."""

NONCE_BYTES = 16
KEY_BYTES = 32
PROOF_BYTES = 64
MAX_NAME = 64
MAX_REASON = 200
_MAX_INT63 = 2**63 - 1
_HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class Founded:
    """The first decision of a hearth; its author is the first anchor.

    `two_signatures`: promotions to anchor need two anchors once there are two, revocations and
    demotions of an anchor once there are three. `recovery_key` is the raw Ed25519 public key of the
    recovery code (`mesh.identity.recovery`). `founded_ms` is the decision's own `wall_ms`. The
    hearth's id is a hash of all of it, so one hearth has one founding decision and no other.
    """

    hearth_name: str
    nonce: bytes
    certificate: bytes
    founder_name: str
    recovery_key: bytes
    founded_ms: int
    two_signatures: bool = True

    @property
    def founder_key(self) -> bytes:
        """The raw public key of the founder."""
        return check_certificate(self.certificate)


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
    """An anchor's wish for a member's new level; a vote where it takes more than one."""

    subject: NodeId
    level: TrustLevel


@dataclass(frozen=True, slots=True)
class Revoked:
    """An anchor's vote to put a node out, or the node's own leave. The key never comes back.

    `cut` is the end of the subject's chain of facts as the author knows it: what the subject said
    up to there stays, nothing after does.
    """

    subject: NodeId
    cut: Cut
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Readmitted:
    """An anchor's vote to let a member decide again that had signed two histories.

    Of those histories, what the voters have seen stays; whatever else the member signed before it
    learned of this decision counts for nothing.
    """

    subject: NodeId


@dataclass(frozen=True, slots=True)
class Recovered:
    """Whoever holds the recovery code makes the author the only anchor.

    `proof` is the recovery key's signature of `recovery_statement`.
    """

    certificate: bytes
    name: str
    proof: bytes

    @property
    def subject(self) -> NodeId:
        """Who becomes the anchor: the author."""
        return node_id(check_certificate(self.certificate))


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """An anchor has seen what it names as its parents, and decides nothing.

    With each anchor's word for what it has seen, nobody can make up another past later.
    """


Decision = Founded | Added | LevelChanged | Revoked | Readmitted | Recovered | Acknowledged


def hearth_id(founded: Founded) -> str:
    """The id of the hearth that this decision founds."""
    content = msgpack.packb(
        [
            founded.hearth_name, founded.nonce, founded.certificate, founded.founder_name,
            founded.recovery_key, founded.founded_ms, founded.two_signatures,
        ]
    )  # fmt: skip
    digest = hashlib.sha256(b"hearthnet/hearth/v2\0" + content).digest()
    return HEARTH_PREFIX + base64.b32encode(digest[:20]).decode().lower()


def recovery_statement(
    hearth: str, recovered: Recovered, parents: Sequence[bytes], wall_ms: int
) -> bytes:
    """What the recovery key signs: the whole decision, so that its proof serves no other one."""
    content: bytes = msgpack.packb(
        [hearth, recovered.certificate, recovered.name, sorted(parents), wall_ms]
    )
    return b"hearthnet/recovery/v1\0" + content


def encode(decision: Decision) -> tuple[str, dict[str, Any]]:
    """The type and the payload with which the log keeps a decision."""
    match decision:
        case Founded():
            said: tuple[str, dict[str, Any]] = (
                FOUNDED,
                {
                    "hearth_name": decision.hearth_name,
                    "nonce": decision.nonce,
                    "certificate": decision.certificate,
                    "name": decision.founder_name,
                    "recovery_key": decision.recovery_key,
                    "founded_ms": decision.founded_ms,
                    "two_signatures": decision.two_signatures,
                },
            )
        case Added(certificate, name, level):
            said = ADDED, {"certificate": certificate, "name": name, "level": int(level)}
        case LevelChanged(subject, level):
            said = LEVEL_CHANGED, {"subject": subject, "level": int(level)}
        case Revoked(subject, cut, reason):
            said = REVOKED, {"subject": subject, "reason": reason, **_cut_fields(cut)}
        case Readmitted(subject):
            said = READMITTED, {"subject": subject}
        case Acknowledged():
            said = ACKNOWLEDGED, {}
        case Recovered(certificate, name, proof):
            said = RECOVERED, {"certificate": certificate, "name": name, "proof": proof}
    return said


def decode(kind: str, payload: Mapping[str, Any]) -> Decision | None:
    """Read a payload; None for a kind of decision that this version does not know.

    Keys that nobody knows are ignored, except in a founding and a recovery, of which there must be
    one form only. Raises BadEvent naming the field.
    """
    read = _READERS.get(kind)
    if read is None:
        return None
    decision = read(_Reader(payload))
    if isinstance(decision, Founded | Recovered) and encode(decision)[1] != payload:
        _refuse("payload", "it has more in it than this decision has")
    return decision


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

    def level(self, highest: TrustLevel = TrustLevel.ANCHOR) -> TrustLevel:
        value = self._payload.get("level")
        if type(value) is not int or not TrustLevel.MEMBER <= value <= highest:
            _refuse("level", f"it is not a trust level up to {highest.label}")
        return TrustLevel(value)

    def count(self, field: str) -> int:
        value = self._payload.get(field)
        if type(value) is not int or not 0 <= value <= _MAX_INT63:
            _refuse(field, "it is not a number that counts something")
        return value

    def subject(self) -> NodeId:
        value = self._payload.get("subject")
        if type(value) is not str or not is_node_id(value):
            _refuse("subject", "it is not a node id")
        return NodeId(value)

    def cut(self) -> Cut:
        seq = self.count("last_seq")
        last_hash = self.blob("last_hash", _HASH_BYTES if seq else 0)
        return Cut(self.count("generation"), seq, last_hash)


_READERS: Mapping[str, Callable[[_Reader], Decision]] = {
    FOUNDED: lambda read: Founded(
        read.text("hearth_name"), read.blob("nonce", NONCE_BYTES), read.certificate(),
        read.text("name"), read.blob("recovery_key", KEY_BYTES), read.count("founded_ms"),
        read.flag("two_signatures"),
    ),
    ADDED: lambda read: Added(
        # Nobody starts as an anchor.
        read.certificate(), read.text("name"), read.level(TrustLevel.TRUSTED)
    ),
    LEVEL_CHANGED: lambda read: LevelChanged(read.subject(), read.level()),
    REVOKED: lambda read: Revoked(
        read.subject(), read.cut(), read.text("reason", shortest=0, longest=MAX_REASON)
    ),
    READMITTED: lambda read: Readmitted(read.subject()),
    ACKNOWLEDGED: lambda read: Acknowledged(),
    RECOVERED: lambda read: Recovered(
        read.certificate(), read.text("name"), read.blob("proof", PROOF_BYTES)
    ),
}  # fmt: skip


def _cut_fields(cut: Cut) -> dict[str, Any]:
    return {
        "generation": cut.generation, "last_seq": cut.last_seq, "last_hash": cut.last_hash,
    }  # fmt: skip


def _refuse(field: str, why: str) -> NoReturn:
    raise BadEvent(
        f"The {field} of a decision about members is unusable: {why}.",
        fix="Run the same hearthnet version on all machines.",
        param=field,
    )
