"""What two replicas of a log say to each other, as plain data and as maps for a control message.

Whoever wants something asks, the other answers with the same `number`; `Heads` with number 0 is
news nobody asked for. Knows nothing of links, and of what the events say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NoReturn

from mesh.errors import BadFrame
from mesh.events.decision import DecisionId
from mesh.events.docket import Signed
from mesh.events.intake import Received
from mesh.events.store import MAX_PAGE_EVENTS, Range
from mesh.events.types import MAX_EVENT_BYTES, MAX_INT63, SIGNATURE_BYTES, Place
from mesh.types import NodeId

MAX_AUTHORS = 256
MAX_PROBES = 32
MAX_TIPS = 64
ID_BYTES = 32
HASH_BYTES = 8
"""How much of an event's id is compared; the event itself is what proves anything."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Which heads do you have?"""

    number: int


@dataclass(frozen=True, slots=True)
class Heads:
    """What a replica has.

    `heads` gives per author the last event that counts: generation, sequence number, first bytes of
    its id. `forks` gives for each author with a fork proof the place that it is about. `tips` are
    the decisions that nothing there comes after.
    """

    number: int
    heads: dict[NodeId, tuple[int, int, bytes]] = field(default_factory=dict)
    forks: dict[NodeId, Place] = field(default_factory=dict)
    tips: tuple[DecisionId, ...] = ()


@dataclass(frozen=True, slots=True)
class Pull:
    """Send me these events (author, generation, first, last), fork proofs and decisions.

    At most one range and one proof per author, in the order of their names. Of decisions, `want`
    and all before them that is not `have` or before it.
    """

    number: int
    ranges: tuple[Range, ...] = ()
    proofs: tuple[NodeId, ...] = ()
    want: tuple[DecisionId, ...] = ()
    have: tuple[DecisionId, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """The first of what was pulled, as much as fits: decisions parents first, then events in
    canonical order."""

    number: int
    received: Received


@dataclass(frozen=True, slots=True)
class Probe:
    """Which ids has the author's chain at these sequence numbers, each greater than the last?"""

    number: int
    author: NodeId
    generation: int
    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Probed:
    """The first bytes of the ids asked for, as far as they are there."""

    number: int
    author: NodeId
    hashes: dict[int, bytes]


Message = Ask | Heads | Pull | Page | Probe | Probed


def to_dict(message: Message) -> dict[str, Any]:
    """The wire form: a map of msgpack values, at most about 240 KiB."""
    match message:
        case Ask(number):
            return {"kind": "ask", "number": number}
        case Heads(number, heads, forks, tips):
            rows = [[author, *head] for author, head in heads.items()]
            split = [[author, *place] for author, place in forks.items()]
            return {
                "kind": "heads", "number": number, "heads": rows, "forks": split,
                "tips": list(tips),
            }  # fmt: skip
        case Pull(number, ranges, proofs, want, have):
            return {
                "kind": "pull", "number": number, "ranges": [list(r) for r in ranges],
                "proofs": list(proofs), "want": list(want), "have": list(have),
            }  # fmt: skip
        case Page(number, received):
            return {
                "kind": "page", "number": number, "events": [list(e) for e in received.events],
                "proofs": [[*first, *second] for first, second in received.proofs],
                "decisions": [list(d) for d in received.decisions],
            }  # fmt: skip
        case Probe(number, author, generation, seqs):
            return {
                "kind": "probe", "number": number, "author": author, "generation": generation,
                "seqs": list(seqs),
            }  # fmt: skip
        case Probed(number, author, hashes):
            found = [list(row) for row in hashes.items()]
            return {"kind": "probed", "number": number, "author": author, "hashes": found}


def from_dict(fields: object) -> Message:
    """Read a wire form, strictly. Raises BadFrame."""
    if not isinstance(fields, dict):
        _refuse("it is no map")
    kind = fields.get("kind")
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        _refuse("its kind is unknown")
    try:
        message = read({name: value for name, value in fields.items() if name != "kind"})
    except (KeyError, TypeError, ValueError) as error:
        _refuse(f"a field is missing or of the wrong form ({error})")
    if to_dict(message) != fields:
        _refuse("it has a field too many, or something twice")
    return message


def _heads(fields: dict[str, Any]) -> Heads:
    heads = {
        _author(author): (_seq(generation), _seq(seq), _bytes(short, HASH_BYTES, exact=True))
        for author, generation, seq, short in _rows(fields["heads"], MAX_AUTHORS)
    }
    forks = {
        _author(author): (_seq(generation), _seq(seq))
        for author, generation, seq in _rows(fields["forks"], MAX_AUTHORS)
    }
    return Heads(_number(fields), heads, forks, _ids(fields["tips"]))


def _pull(fields: dict[str, Any]) -> Pull:
    ranges = tuple(
        (_author(author), _seq(generation), _seq(first), _seq(last))
        for author, generation, first, last in _rows(fields["ranges"], MAX_AUTHORS)
    )
    # What is asked for twice would be fetched twice: a small message must not cost a large answer.
    _ascending([author for author, *_ in ranges], "ranges")
    if any(first > last for *_, first, last in ranges):
        raise ValueError("a range ends before it begins")
    proofs = tuple(_author(author) for author in _rows(fields["proofs"], MAX_AUTHORS))
    _ascending(proofs, "proofs")
    return Pull(_number(fields), ranges, proofs, _ids(fields["want"]), _ids(fields["have"]))


def _page(fields: dict[str, Any]) -> Page:
    events = tuple(_signed(*row) for row in _rows(fields["events"], MAX_PAGE_EVENTS))
    proofs = tuple(
        (_signed(a, b), _signed(c, d)) for a, b, c, d in _rows(fields["proofs"], MAX_AUTHORS)
    )
    decisions = tuple(_signed(*row) for row in _rows(fields["decisions"], MAX_PAGE_EVENTS))
    return Page(_number(fields), Received(events, proofs, decisions))


def _probe(fields: dict[str, Any]) -> Probe:
    seqs = tuple(_seq(seq) for seq in _rows(fields["seqs"], MAX_PROBES))
    _ascending(seqs, "seqs")
    author, generation = _author(fields["author"]), _seq(fields["generation"])
    return Probe(_number(fields), author, generation, seqs)


def _probed(fields: dict[str, Any]) -> Probed:
    hashes = {
        _seq(seq): _bytes(short, HASH_BYTES, exact=True)
        for seq, short in _rows(fields["hashes"], MAX_PROBES)
    }
    return Probed(_number(fields), _author(fields["author"]), hashes)


_READERS: dict[str, Callable[[dict[str, Any]], Message]] = {
    "ask": lambda fields: Ask(_number(fields)),
    "heads": _heads,
    "pull": _pull,
    "page": _page,
    "probe": _probe,
    "probed": _probed,
}


def _number(fields: dict[str, Any]) -> int:
    number = fields["number"]
    if type(number) is not int or not 0 <= number <= MAX_INT63:
        raise ValueError("number")
    return number


def _seq(value: Any) -> int:
    if type(value) is not int or not 0 < value <= MAX_INT63:
        raise ValueError("seq")
    return value


def _author(value: Any) -> NodeId:
    if type(value) is not str or not 0 < len(value) <= 64:
        raise ValueError("author")
    return NodeId(value)


def _ids(value: Any) -> tuple[DecisionId, ...]:
    found = tuple(DecisionId(_bytes(one, ID_BYTES, exact=True)) for one in _rows(value, MAX_TIPS))
    if len(set(found)) != len(found):
        raise ValueError("ids are not distinct")
    return found


def _signed(body: Any, signature: Any) -> Signed:
    return _bytes(body, MAX_EVENT_BYTES), _bytes(signature, SIGNATURE_BYTES)


def _bytes(value: Any, limit: int, *, exact: bool = False) -> bytes:
    if type(value) is not bytes or len(value) > limit or (exact and len(value) != limit):
        raise ValueError("bytes")
    return value


def _ascending(values: Sequence[Any], what: str) -> None:
    if any(before >= after for before, after in pairwise(values)):
        raise ValueError(f"{what} are not distinct and in order")


def _rows(value: Any, limit: int) -> list[Any]:
    if type(value) is not list or len(value) > limit:
        raise ValueError("rows")
    return value


def _refuse(why: str) -> NoReturn:
    raise BadFrame(
        f"A message about the event log is unusable: {why}.",
        fix="Run the same hearthnet version on both machines.",
    )
