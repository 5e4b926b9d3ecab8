"""What two replicas of a log say to each other, as plain data and as maps for a control message.

Whoever wants something asks, the other answers with the same `number`; `Heads` with number 0 is
news nobody asked for. A new message is one class: its name in lower case is its `kind`, its fields
in their order are the keys of the map, in which a dict is an array of rows ``[key, *value]``. Knows
nothing of links, and of what the events say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any

from msgspec import Meta

from mesh import codec
from mesh.codec import Fault, Int63
from mesh.errors import SAME_VERSION, BadFrame
from mesh.events.decision import DecisionId
from mesh.events.docket import Signed
from mesh.events.intake import Received
from mesh.events.store import MAX_PAGE_EVENTS, Range
from mesh.events.types import MAX_EVENT_BYTES, MAX_INT63, SIGNATURE_BYTES
from mesh.types import NodeId

MAX_AUTHORS = 256
MAX_PROBES = 32
MAX_TIPS = 64
HASH_BYTES = 8
"""How much of an event's id is compared; the event itself is what proves anything."""


def _distinct(values: Sequence[Any]) -> None:
    if len(set(values)) != len(values):
        raise ValueError("names something twice")


def _ascending(values: Sequence[Any]) -> None:
    if any(before >= after for before, after in pairwise(values)):
        raise ValueError("is not distinct and in order")


def _one_each(ranges: Sequence[Range]) -> None:
    # What is asked for twice would be fetched twice: a small message must not cost a large answer.
    _ascending([author for author, *_ in ranges])
    if any(first > last for *_, first, last in ranges):
        raise ValueError("ends before it begins")


Seq = Annotated[int, Meta(ge=1, le=MAX_INT63)]
Author = Annotated[NodeId, Meta(min_length=1, max_length=64)]
Hash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Tip = Annotated[DecisionId, Meta(min_length=32, max_length=32)]
Tips = Annotated[tuple[Tip, ...], Meta(max_length=MAX_TIPS), _distinct]
Body = Annotated[bytes, Meta(max_length=MAX_EVENT_BYTES)]
Signature = Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]
Bodies = Annotated[tuple[tuple[Body, Signature], ...], Meta(max_length=MAX_PAGE_EVENTS)]


@dataclass(frozen=True, slots=True)
class LogMessage:
    """Root of what is said about the log; an answer has the number of what it answers."""

    number: Int63

    def __init_subclass__(cls) -> None:
        _KINDS[cls.__name__.lower()] = cls


_KINDS: dict[str, type[LogMessage]] = {}


@dataclass(frozen=True, slots=True)
class Ask(LogMessage):
    """Which heads do you have?"""


@dataclass(frozen=True, slots=True)
class Heads(LogMessage):
    """What a replica has.

    `heads` gives per author the last event that counts: generation, sequence number, first bytes of
    its id. `forks` gives for each author with a fork proof the place that it is about. `tips` are
    the decisions that nothing there comes after.
    """

    heads: Annotated[dict[Author, tuple[Seq, Seq, Hash]], Meta(max_length=MAX_AUTHORS)] = field(
        default_factory=dict
    )
    forks: Annotated[dict[Author, tuple[Seq, Seq]], Meta(max_length=MAX_AUTHORS)] = field(
        default_factory=dict
    )
    tips: Tips = ()


@dataclass(frozen=True, slots=True)
class Pull(LogMessage):
    """Send me these events (author, generation, first, last), fork proofs and decisions.

    At most one range and one proof per author, in the order of their names. Of decisions, `want`
    and all before them that is not `have` or before it.
    """

    ranges: Annotated[
        tuple[tuple[Author, Seq, Seq, Seq], ...], Meta(max_length=MAX_AUTHORS), _one_each
    ] = ()
    proofs: Annotated[tuple[Author, ...], Meta(max_length=MAX_AUTHORS), _ascending] = ()
    want: Tips = ()
    have: Tips = ()


@dataclass(frozen=True, slots=True)
class Page(LogMessage):
    """The first of what was pulled, as much as fits: decisions parents first, then events in
    canonical order. A proof is two events: body and signature of each."""

    events: Bodies = ()
    proofs: Annotated[
        tuple[tuple[Body, Signature, Body, Signature], ...], Meta(max_length=MAX_AUTHORS)
    ] = ()
    decisions: Bodies = ()

    @classmethod
    def of(cls, number: int, received: Received) -> Page:
        """The page that carries these."""
        proofs = tuple((*first, *second) for first, second in received.proofs)
        return cls(number, tuple(received.events), proofs, tuple(received.decisions))

    @property
    def received(self) -> Received:
        """What it carries."""
        proofs: list[tuple[Signed, Signed]] = [((a, b), (c, d)) for a, b, c, d in self.proofs]
        return Received(self.events, tuple(proofs), self.decisions)


@dataclass(frozen=True, slots=True)
class Probe(LogMessage):
    """Which ids has the author's chain at these sequence numbers, each greater than the last?"""

    author: Author
    generation: Seq
    seqs: Annotated[tuple[Seq, ...], Meta(max_length=MAX_PROBES), _ascending]


@dataclass(frozen=True, slots=True)
class Probed(LogMessage):
    """The first bytes of the ids asked for, as far as they are there."""

    author: Author
    hashes: Annotated[dict[Seq, Hash], Meta(max_length=MAX_PROBES)]


_KEYED = {"heads", "forks", "hashes"}
"""The fields that are dicts here and rows in the map."""


def to_dict(message: LogMessage) -> dict[str, Any]:
    """The wire form: a map of msgpack values, at most about 240 KiB."""
    form = type(message)
    values = {name: _rows(getattr(message, name)) for name in codec.field_names(form)}
    return {"kind": form.__name__.lower(), **values}


def from_dict(fields: object) -> LogMessage:
    """Read a wire form, strictly. Raises BadFrame."""
    try:
        if not isinstance(fields, dict):
            raise Fault("it is no map")  # noqa: TRY301 - one translation for all of it
        kind = fields.get("kind")
        form = _KINDS.get(kind) if isinstance(kind, str) else None
        if form is None:
            raise Fault("it is of no kind known here", "kind")  # noqa: TRY301
        values = {
            name: _by_key(name, value) if name in _KEYED else value
            for name, value in fields.items()
            if name != "kind"
        }
        return codec.convert(values, form, complete=True, closed=True)
    except Fault as fault:
        where = f"{fault.field}: " if fault.field else ""
        raise BadFrame(
            f"A message about the event log is unusable: {where}{fault.why}.",
            fix=SAME_VERSION,
            param=fault.field or None,
        ) from fault


def _rows(value: Any) -> Any:
    if isinstance(value, dict):
        return [[key, *(of if isinstance(of, tuple) else (of,))] for key, of in value.items()]
    return [_rows(one) for one in value] if isinstance(value, tuple) else value


def _by_key(name: str, rows: object) -> dict[Any, Any]:
    """Rows ``[key, *value]``, or ``[key, value]``, as a dict. Raises Fault."""
    if type(rows) is not list or not all(type(row) is list and len(row) > 1 for row in rows):
        raise Fault("expected rows of a key and a value", name)
    try:
        found = {row[0]: row[1] if len(row) == 2 else row[1:] for row in rows}
    except TypeError as error:
        raise Fault("has a key that cannot be one", name) from error
    if len(found) != len(rows):
        raise Fault("names something twice", name)
    return found
