"""The kinds of decision about members, and their payloads in the log.

A payload is checked completely when it is decoded; what it is worth is decided by
`mesh.identity.membership`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgpack
from msgspec import Meta

from mesh import codec
from mesh.codec import Fault, Int63, printable
from mesh.errors import BadEvent
from mesh.identity.certificates import Certificate, check_certificate
from mesh.identity.keys import NodeIdText, node_id
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


def _no_anchor(level: TrustLevel) -> None:
    if level > TrustLevel.TRUSTED:
        raise ValueError("is more than a node may begin with")


def _whole(cut: Cut) -> None:
    if len(cut.last_hash) != (32 if cut.last_seq else 0):
        raise Fault("is not the 32 bytes of a hash, or of nothing", "last_hash")


Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME), printable]
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Proof = Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]


@dataclass(frozen=True, slots=True)
class Founded:
    """The first decision of a hearth; its author is the first anchor.

    `two_signatures`: promotions to anchor need two anchors once there are two, revocations and
    demotions of an anchor once there are three. `recovery_key` is the raw Ed25519 public key of the
    recovery code (`mesh.identity.recovery`). `founded_ms` is the decision's own `wall_ms`. The
    hearth's id is a hash of all of it, so one hearth has one founding decision and no other.
    """

    hearth_name: Name
    nonce: Nonce
    certificate: Certificate
    name: Name
    recovery_key: Key
    founded_ms: Int63
    two_signatures: bool = True

    @property
    def founder_key(self) -> bytes:
        """The raw public key of the founder."""
        return check_certificate(self.certificate)


@dataclass(frozen=True, slots=True)
class Added:
    """A node is let in at `level`, ``member`` or ``trusted``."""

    certificate: Certificate
    name: Name
    level: Annotated[TrustLevel, _no_anchor]

    @property
    def subject(self) -> NodeId:
        """The member that is let in."""
        return node_id(check_certificate(self.certificate))


@dataclass(frozen=True, slots=True)
class LevelChanged:
    """An anchor's wish for a member's new level; a vote where it takes more than one."""

    subject: NodeIdText
    level: TrustLevel


@dataclass(frozen=True, slots=True)
class Revoked:
    """An anchor's vote to put a node out, or the node's own leave. The key never comes back.

    `cut` is the end of the subject's chain of facts as the author knows it: what the subject said
    up to there stays, nothing after does.
    """

    subject: NodeIdText
    cut: Annotated[Cut, _whole]
    reason: Annotated[str, Meta(max_length=MAX_REASON), printable] = ""


@dataclass(frozen=True, slots=True)
class Readmitted:
    """An anchor's vote to let a member decide again that had signed two histories.

    Of those histories, what the voters have seen stays; whatever else the member signed before it
    learned of this decision counts for nothing.
    """

    subject: NodeIdText


@dataclass(frozen=True, slots=True)
class Recovered:
    """A recovery: by the recovery code, the author becomes the only anchor.

    `proof` is the recovery key's signature of `recovery_statement`.
    """

    certificate: Certificate
    name: Name
    proof: Proof

    @property
    def subject(self) -> NodeId:
        """The new anchor: the author."""
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
            founded.hearth_name, founded.nonce, founded.certificate, founded.name,
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
    payload = codec.plain(decision)
    cut = payload.pop("cut", {})
    return _KINDS[type(decision)], {**payload, **cut}


def decode(kind: str, payload: Mapping[str, Any]) -> Decision | None:
    """Read a payload; None for a kind of decision that this version does not know.

    Keys that nobody knows are ignored, except in a founding and a recovery, of which there must be
    one form only. Raises BadEvent naming the field.
    """
    form = _FORMS.get(kind)
    if form is None:
        return None
    fields = {**payload, "cut": dict(payload)} if form is Revoked else dict(payload)
    try:
        return codec.convert(fields, form, complete=True, closed=form in (Founded, Recovered))
    except Fault as fault:
        raise BadEvent(
            f"The {fault.field or 'payload'} of a decision about members is unusable: {fault.why}.",
            fix="Run the same hearthnet version on all machines.",
            param=fault.field or "payload",
        ) from fault


_FORMS: dict[str, type[Decision]] = {
    FOUNDED: Founded,
    ADDED: Added,
    LEVEL_CHANGED: LevelChanged,
    REVOKED: Revoked,
    READMITTED: Readmitted,
    RECOVERED: Recovered,
    ACKNOWLEDGED: Acknowledged,
}
_KINDS = {form: kind for kind, form in _FORMS.items()}
