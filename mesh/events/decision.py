"""One signed decision about who is in: its exact bytes, what they say, what its author had seen.

A decision names its parents, as a commit of git does: the newest decisions that its author knew.
Through them it carries its whole causal past, which nobody's clock or counter can change
afterwards. The body is a msgpack array in a fixed order, signed behind a domain prefix and named by
its SHA-256; received bytes are kept, hashed and verified as they came. Knows nothing of members.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NewType

import msgpack

from mesh.errors import BadEvent
from mesh.events.types import (
    MAX_EVENT_BYTES,
    MAX_INT63,
    SIGNATURE_BYTES,
    Sign,
    is_author,
    is_hearth_id,
    is_plain,
    is_type,
    unpack,
)
from mesh.types import NodeId

DecisionId = NewType("DecisionId", bytes)
"""The SHA-256 of a decision's body."""

VERSION = 1
DOMAIN = b"hearthnet/decision/v1\0"
MAX_PARENTS = 32
MAX_DEPTH = 1 << 32
_ID_BYTES = 32
_FIX = "Run the same hearthnet version on all machines of the hearth."


@dataclass(frozen=True, slots=True)
class DecisionDraft:
    """A decision before it is signed."""

    hearth_id: str
    author: NodeId
    depth: int
    wall_ms: int
    type: str
    payload: dict[str, Any]
    parents: tuple[DecisionId, ...]


@dataclass(frozen=True, slots=True)
class SignedDecision:
    """A well-formed decision; whether its signature holds and what it is worth is another question.

    `parents` are sorted. `depth` is one more than the largest depth of the parents, 1 without any:
    sorted by it, what a decision depends on comes first. `wall_ms` is the author's clock in Unix
    milliseconds, for people only. `payload` must not be changed.
    """

    hearth_id: str
    author: NodeId
    depth: int
    wall_ms: int
    type: str
    payload: dict[str, Any]
    parents: tuple[DecisionId, ...]
    id: DecisionId
    body: bytes
    signature: bytes

    @property
    def signed_bytes(self) -> bytes:
        """What the signature covers."""
        return DOMAIN + self.body


def seal(draft: DecisionDraft, sign: Sign) -> SignedDecision:
    """Encode and sign. Raises BadEvent for a draft that other nodes would refuse to read."""
    try:
        body = msgpack.packb(
            [
                VERSION, draft.hearth_id, draft.author, draft.depth, draft.wall_ms, draft.type,
                draft.payload, sorted(draft.parents),
            ]
        )  # fmt: skip
    except (TypeError, ValueError, OverflowError) as error:
        raise BadEvent(
            f"The decision cannot be written: {error}.", fix="Use plain values only."
        ) from error
    return decode(body, sign(DOMAIN + body))


def decode(body: bytes, signature: bytes) -> SignedDecision:
    """Read a decision's bytes, as strictly as events are read. Raises BadEvent."""
    if len(body) > MAX_EVENT_BYTES or len(signature) != SIGNATURE_BYTES:
        raise BadEvent(f"A decision of {len(body)} bytes is too large, or unsigned.", fix=_FIX)
    fields = unpack(body, "decision")
    if type(fields) is not list or len(fields) != 8 or not is_plain(fields):
        raise BadEvent("The decision has another shape than this version knows.", fix=_FIX)
    if not _fields_hold(fields) or msgpack.packb(fields) != body:
        raise BadEvent("The decision has a field of the wrong form.", fix=_FIX)
    _, hearth_id, author, depth, wall_ms, kind, payload, parents = fields
    return SignedDecision(
        hearth_id, NodeId(author), depth, wall_ms, kind, payload,
        tuple(DecisionId(parent) for parent in parents),
        DecisionId(hashlib.sha256(body).digest()), body, signature,
    )  # fmt: skip


def _fields_hold(fields: list[Any]) -> bool:
    version, hearth_id, author, depth, wall_ms, kind, payload, parents = fields
    return (
        type(version) is int and version == VERSION
        and is_hearth_id(hearth_id) and is_author(author) and is_type(kind)
        and type(depth) is int and 0 < depth <= MAX_DEPTH
        and type(wall_ms) is int and 0 <= wall_ms <= MAX_INT63
        and type(payload) is dict
        and type(parents) is list and len(parents) <= MAX_PARENTS
        and all(type(parent) is bytes and len(parent) == _ID_BYTES for parent in parents)
        and all(a < b for a, b in pairwise(parents))
        and (depth == 1) == (not parents)
    )  # fmt: skip
