"""One signed decision about who is in: its exact bytes, what they say, what its author had seen.

A decision names its parents, as a commit of git does: the newest decisions that its author knew.
Through them it carries its whole causal past, which nobody's clock or counter can change
afterwards. The body is a msgpack array in a fixed order, signed behind a domain prefix and named by
its SHA-256; received bytes are kept, hashed and verified as they came. Knows nothing of members.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, NewType

from msgspec import Meta
from msgspec.structs import replace

from mesh.codec import Canonical, Fault, Int63, SignedForm
from mesh.events.types import MAX_DEPTH as MAX_PAYLOAD_DEPTH
from mesh.events.types import (
    MAX_EVENT_BYTES,
    Author,
    HearthName,
    Kind,
    Seals,
    Sign,
)

DecisionId = NewType("DecisionId", bytes)
"""The SHA-256 of a decision's body."""

VERSION = 1
DOMAIN = b"hearthnet/decision/v1\0"
MAX_PARENTS = 32
MAX_DEPTH = 1 << 32


class DecisionDraft(SignedForm, frozen=True, tag=VERSION):
    """A decision before it is signed: the fields of its body in their order."""

    hearth_id: HearthName
    author: Author
    depth: Annotated[int, Meta(ge=1, le=MAX_DEPTH)]
    wall_ms: Int63
    type: Kind
    payload: dict[str, Any]
    parents: Annotated[
        tuple[Annotated[DecisionId, Meta(min_length=32, max_length=32)], ...],
        Meta(max_length=MAX_PARENTS),
    ]


def _check(draft: DecisionDraft) -> None:
    if any(a >= b for a, b in pairwise(draft.parents)):
        raise Fault("are not distinct and in order", "parents")
    if (draft.depth == 1) != (not draft.parents):
        raise Fault("is 1 where there are parents, or more where there are none", "depth")


class SignedDecision(DecisionDraft, frozen=True, tag=VERSION):
    """A well-formed decision; whether its signature holds and what it is worth is another question.

    `parents` are sorted. `depth` is one more than the largest depth of the parents, 1 without any:
    sorted by it, what a decision depends on comes first. `wall_ms` is the author's clock in Unix
    milliseconds, for people only. `payload` must not be changed.
    """

    id: DecisionId
    body: bytes
    signature: bytes

    @property
    def signed_bytes(self) -> bytes:
        """What the signature covers."""
        return DOMAIN + self.body


_FORM = Canonical(DecisionDraft, _check, max_bytes=MAX_EVENT_BYTES, depth=MAX_PAYLOAD_DEPTH)
_SEALS = Seals("decision", DOMAIN, _FORM, SignedDecision)
decode = _SEALS.decode


def seal(draft: DecisionDraft, sign: Sign) -> SignedDecision:
    """See `Seals.seal`; its parents are put in order."""
    return _SEALS.seal(replace(draft, parents=tuple(sorted(draft.parents))), sign)
