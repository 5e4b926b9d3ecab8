"""One signed fact: its exact bytes, and what they say.

The body is a msgpack array in a fixed order, signed behind a domain prefix, named by its SHA-256.
Received bytes are kept, hashed and verified as they came; nothing is ever encoded again. Knows
nothing of chains, members or storage. What is decided about members is no fact but a
`mesh.events.decision.SignedDecision`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NewType, cast

import msgpack

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
# Each nested array may make msgpack reserve this many slots before it sees that the input ends.
_MAX_ELEMENTS = 1024
SIGNATURE_BYTES = 64

SHARD_ADVERTISED = "experimental.shard.advertised"
MODEL_PUBLISHED = "model.published"
STEERING_PUBLISHED = "steering.published"
PLACEMENT_WISHED = "placement.wished"
TOKEN_REVOKED = "token.revoked"  # noqa: S105  (an event type, not a secret)

_TYPE = re.compile(r"[a-z0-9_.]{1,64}")
_AUTHOR = re.compile(r"[a-z0-9]{1,64}")
_FIX = "Run the same hearthnet version on all machines of the hearth."

Order = tuple[int, NodeId, int]
"""The canonical order of events: lamport, author, seq."""

Place = tuple[int, int]
"""A generation and a sequence number in it."""

Payload = dict[str, Any] | list[Any]
"""What an event says: a map of text, or an array of fixed order, of plain msgpack values."""

Sign = Callable[[bytes], bytes]
"""The 64-byte signature of some bytes by this node's key."""


@dataclass(frozen=True, slots=True)
class Draft:
    """An event before it is signed."""

    hearth_id: str
    author: NodeId
    generation: int
    seq: int
    prev: EventId
    lamport: int
    wall_ms: int
    type: str
    payload: Payload


@dataclass(frozen=True, slots=True)
class Event:
    """A well-formed event; whether its signature and chain hold is another question.

    An author has one chain of events, and may begin it anew: a chain of a higher `generation`
    replaces those before it. `seq` counts from 1 in each, `prev` is the id of the event before it,
    `wall_ms` is the author's clock in Unix milliseconds, for people only. `payload` must not be
    changed.
    """

    hearth_id: str
    author: NodeId
    generation: int
    seq: int
    prev: EventId
    lamport: int
    wall_ms: int
    type: str
    payload: Payload
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


def seal(draft: Draft, sign: Sign) -> Event:
    """Encode and sign. Raises BadEvent for a draft that other nodes would refuse to read."""
    try:
        body = msgpack.packb(
            [
                VERSION, draft.hearth_id, draft.author, draft.generation, draft.seq, draft.prev,
                draft.lamport, draft.wall_ms, draft.type, draft.payload,
            ]
        )  # fmt: skip
    except (TypeError, ValueError, OverflowError) as error:
        raise BadEvent(
            f"The event cannot be written: {error}.", fix="Use plain values only."
        ) from error
    return decode(body, sign(DOMAIN + body))


def decode(body: bytes, signature: bytes) -> Event:
    """Read an event's bytes, strictly. Raises BadEvent.

    Refused: more than 16 KiB, anything that is not the one canonical encoding of its content,
    extension types, NaN and infinities, map keys that are not text, more than 8 levels.
    """
    if len(body) > MAX_EVENT_BYTES or len(signature) != SIGNATURE_BYTES:
        raise BadEvent(f"An event of {len(body)} bytes is too large, or unsigned.", fix=_FIX)
    fields = unpack(body, "event")
    if type(fields) is not list or len(fields) != 10 or not is_plain(fields[-1], MAX_DEPTH):
        raise BadEvent("The event has another shape than this version knows.", fix=_FIX)
    if not _fields_hold(fields) or msgpack.packb(fields) != body:
        raise BadEvent("The event has a field of the wrong form.", fix=_FIX)
    _, hearth_id, author, generation, seq, prev, lamport, wall_ms, kind, payload = fields
    event_id = EventId(hashlib.sha256(body).digest())
    return Event(
        hearth_id, NodeId(author), generation, seq, EventId(prev), lamport, wall_ms, kind, payload,
        event_id, body, signature,
    )  # fmt: skip


def unpack(body: bytes, what: str) -> Any:
    """The msgpack value of a signed body, bounded in its elements. Raises BadEvent."""
    try:
        return msgpack.unpackb(body, max_array_len=_MAX_ELEMENTS, max_map_len=_MAX_ELEMENTS)
    # msgpack raises whatever the input provokes: all of it means that this is not what it says.
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException) as error:
        raise BadEvent(f"The {what} is not msgpack: {error}.", fix=_FIX) from error


def is_plain(value: object, depth: int = MAX_DEPTH + 1) -> bool:
    """Whether a decoded value is made of msgpack's plain types only, not deeper than `depth`."""
    kind = type(value)
    if kind is str or kind is int or kind is bytes or kind is bool or value is None:
        return True
    if kind is float:
        return math.isfinite(cast("float", value))
    if depth == 0:
        return False
    if kind is list:
        return all(is_plain(item, depth - 1) for item in cast("list[object]", value))
    if kind is dict:
        items = cast("dict[object, object]", value).items()
        return all(type(key) is str and is_plain(item, depth - 1) for key, item in items)
    return False


def is_hearth_id(value: object) -> bool:
    """Whether a decoded value can name a hearth."""
    return type(value) is str and 0 < len(value) <= 128


def is_author(value: object) -> bool:
    """Whether a decoded value can name a node."""
    return type(value) is str and _AUTHOR.fullmatch(value) is not None


def is_type(value: object) -> bool:
    """Whether a decoded value can name a kind of event or decision."""
    return type(value) is str and _TYPE.fullmatch(value) is not None


def _fields_hold(fields: list[Any]) -> bool:
    version, hearth_id, author, generation, seq, prev, lamport, wall_ms, kind, payload = fields
    return (
        type(version) is int and version == VERSION
        and is_hearth_id(hearth_id) and is_author(author) and is_type(kind)
        and _counts(generation) and _counts(seq) and _counts(lamport)
        and type(wall_ms) is int and 0 <= wall_ms <= MAX_INT63
        and type(prev) is bytes and len(prev) == 32 and (seq == 1) == (prev == GENESIS)
        and type(payload) in (dict, list)
    )  # fmt: skip


def _counts(value: object) -> bool:
    return type(value) is int and 0 < value <= MAX_INT63
