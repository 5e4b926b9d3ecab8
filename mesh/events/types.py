"""One signed fact: its exact bytes, and what they say.

The body is a msgpack array in a fixed order, signed behind a domain prefix, named by its SHA-256.
Received bytes are kept, hashed and verified as they came; nothing is ever encoded again. Knows
nothing of chains, members or storage. What is decided about members is no fact but a
`mesh.events.decision.SignedDecision`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated, Any, Generic, NewType, TypeVar

from msgspec import Meta
from msgspec.structs import astuple

from mesh.codec import Canonical, Fault, Int63, SignedForm
from mesh.errors import BadEvent
from mesh.types import NodeId

EventId = NewType("EventId", bytes)
"""The SHA-256 of an event's body."""

VERSION = 2
DOMAIN = b"hearthnet/event/v2\0"
GENESIS = EventId(bytes(32))
"""What the first event of a chain names as its predecessor."""

MAX_EVENT_BYTES = 16 << 10
MAX_INT63 = (1 << 63) - 1
MAX_DEPTH = 8
SIGNATURE_BYTES = 64

SHARD_ADVERTISED = "experimental.shard.advertised"
MODEL_PUBLISHED = "model.published"
STEERING_PUBLISHED = "steering.published"
PLACEMENT_WISHED = "placement.wished"
PLACEMENT_PLANNED = "placement.planned"
NODE_NAMED = "node.named"
TOKEN_REVOKED = "token.revoked"  # noqa: S105  (an event type, not a secret)

Order = tuple[int, NodeId, int]
"""The canonical order of events: lamport, author, seq."""

Place = tuple[int, int]
"""A generation and a sequence number in it."""

Payload = dict[str, Any] | list[Any]
"""What an event says: a map of text, or an array of fixed order, of plain msgpack values."""

D = TypeVar("D", bound=SignedForm)
S = TypeVar("S")

Sign = Callable[[bytes], bytes]
"""The 64-byte signature of some bytes by this node's key."""


HearthName = Annotated[str, Meta(min_length=1, max_length=128)]
Author = Annotated[NodeId, Meta(pattern=r"\A[a-z0-9]{1,64}\Z")]
Count = Annotated[int, Meta(ge=1, le=MAX_INT63)]
Kind = Annotated[str, Meta(pattern=r"\A[a-z0-9_.]{1,64}\Z")]


class Draft(SignedForm, frozen=True, tag=VERSION):
    """An event before it is signed: the fields of its body in their order."""

    hearth_id: HearthName
    author: Author
    generation: Count
    seq: Count
    prev: Annotated[EventId, Meta(min_length=32, max_length=32)]
    lamport: Count
    wall_ms: Int63
    type: Kind
    payload: Payload


def _check(draft: Draft) -> None:
    if (draft.seq == 1) != (draft.prev == GENESIS):
        raise Fault("is that of a first event, or the number is, but not both", "prev")


class Event(Draft, frozen=True, tag=VERSION):
    """A well-formed event; whether its signature and chain hold is another question.

    An author has one chain of events, and may begin it anew: a chain of a higher `generation`
    replaces those before it. `seq` counts from 1 in each, `prev` is the id of the event before it,
    `wall_ms` is the author's clock in Unix milliseconds, for people only. `payload` must not be
    changed.
    """

    id: EventId
    body: bytes
    signature: bytes

    @property
    def order(self) -> Order:
        """Where it stands among all events, whenever it arrived."""
        return self.lamport, self.author, self.seq

    @property
    def place(self) -> Place:
        """Where it stands in its author's chain."""
        return self.generation, self.seq

    @property
    def signed_bytes(self) -> bytes:
        """What the signature covers."""
        return DOMAIN + self.body


class Seals(Generic[D, S]):
    """What is signed of one kind, which people call `what`: a draft, sealed, is an `S` of its
    fields, the SHA-256 of its body, that body and the signature."""

    def __init__(
        self, what: str, domain: bytes, form: Canonical[D], sealed: Callable[..., S]
    ) -> None:
        self._what, self._domain, self._form, self._sealed = what, domain, form, sealed

    def seal(self, draft: D, sign: Sign) -> S:
        """Encode and sign. Raises BadEvent for a draft that other nodes would refuse to read."""
        try:
            body = self._form.pack(draft)
        except Fault as fault:
            raise unusable(self._what, fault) from fault
        return self.decode(body, sign(self._domain + body))

    def decode(self, body: bytes, signature: bytes) -> S:
        """Read its bytes, as strictly as `mesh.codec.Canonical` does. Raises BadEvent."""
        if len(signature) != SIGNATURE_BYTES:
            wrong = f"must have {SIGNATURE_BYTES} bytes, got {len(signature)}"
            raise unusable(self._what, Fault(wrong, "signature"))
        try:
            draft = self._form.unpack(body)
        except Fault as fault:
            raise unusable(self._what, fault) from fault
        return self._sealed(*astuple(draft), hashlib.sha256(body).digest(), body, signature)


_FORM = Canonical(Draft, _check, max_bytes=MAX_EVENT_BYTES, depth=MAX_DEPTH)
_SEALS = Seals("event", DOMAIN, _FORM, Event)
seal, decode = _SEALS.seal, _SEALS.decode


def unusable(what: str, fault: Fault) -> BadEvent:
    """The error of something signed that is not what this version knows."""
    where = f" {fault.field}" if fault.field else ""
    return BadEvent(
        f"The {what} cannot be used:{where} {fault.why}.",
        fix="Run the same hearthnet version on all machines of the hearth.",
        param=fault.field or None,
    )
