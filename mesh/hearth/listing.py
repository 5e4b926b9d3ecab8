"""The signed log for people: its entries, newest first, filtered, in pages.

Decisions about members and facts are two orders that nothing compares, so a page has both, each
with the place where the next one goes on. What is listed was checked when it was taken in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mesh.clock import claimed
from mesh.errors import BadRequest
from mesh.events.decision import SignedDecision
from mesh.events.log import EventLog
from mesh.events.types import MAX_INT63, Event, Order
from mesh.types import NodeId, is_whole

MAX_ENTRIES = 200
MAX_READ = 2048
"""Events read for one page at most, however few of them the filter lets through."""

_CHUNK = 256
_SHOWN_BYTES = 16
_END: Order = (MAX_INT63, NodeId("~"), MAX_INT63)
"""After all events: ids of nodes are letters and digits."""

Named = Callable[[NodeId], str]


@dataclass(frozen=True, slots=True)
class LogFilter:
    """A filter: an author's id or name, a type or the beginning of one; at most so many entries of
    each kind; and what the page before said is next."""

    author: str | None = None
    kind: str | None = None
    limit: int = 50
    after: str | None = None


async def listing(log: EventLog, wanted: LogFilter, named: Named) -> dict[str, Any]:
    """``{"decisions": [...], "facts": [...], "next": text | None}``, newest first.

    A row is ``{"id", "kind": decision or fact, "author", "author_name", "at", "type", "place",
    "says"}``; `place` is the decision's depth, or generation and number in the author's chain.
    Times are those that the authors claim. Raises BadRequest.
    """
    limit = min(max(1, wanted.limit), MAX_ENTRIES)
    position, before = _places(wanted.after, len(log.docket.graph))
    decisions: list[dict[str, Any]] = []
    while position > 0 and len(decisions) < limit:
        position -= 1
        decision = log.docket.graph[position]
        if _is_wanted(decision, wanted, named):
            decisions.append(_row(decision, "decision", f"{decision.depth}", named))
    facts, before = await _facts(log, wanted, before, limit, named)
    more = position > 0 or before is not None
    following = f"{position}.{'.'.join(map(str, before or ()))}" if more else None
    return {"decisions": decisions, "facts": facts, "next": following}


async def _facts(
    log: EventLog, wanted: LogFilter, before: Order | None, limit: int, named: Named
) -> tuple[list[dict[str, Any]], Order | None]:
    """The rows, and the place before which there may be more; None at the end."""
    rows: list[dict[str, Any]] = []
    read = 0
    author = next((each for each in log.state.authors if each == wanted.author), None)
    while before is not None and read < MAX_READ:
        found = await log.newest(before, _CHUNK, author)
        read += len(found)
        for event in found:
            if len(rows) == limit:
                return rows, before
            before = event.order
            if _is_wanted(event, wanted, named):
                rows.append(_row(event, "fact", f"{event.generation}/{event.seq}", named))
        if len(found) < _CHUNK:
            before = None
    return rows, before


def _is_wanted(entry: Event | SignedDecision, wanted: LogFilter, named: Named) -> bool:
    if wanted.kind is not None and not entry.type.startswith(wanted.kind):
        return False
    author = wanted.author
    return author is None or entry.author.startswith(author) or named(entry.author) == author


def _row(entry: Event | SignedDecision, kind: str, place: str, named: Named) -> dict[str, Any]:
    return {
        "id": entry.id.hex(),
        "kind": kind,
        "author": entry.author,
        "author_name": named(entry.author),
        "at": claimed(entry.wall_ms).isoformat(),
        "type": entry.type,
        "place": place,
        "says": _shown(entry.payload),
    }


def _shown(said: Any) -> Any:
    """JSON-able: bytes as the beginning of their hexadecimal digits."""
    if isinstance(said, bytes):
        more = f"… ({len(said)} bytes)" if len(said) > _SHOWN_BYTES else ""
        return said[:_SHOWN_BYTES].hex() + more
    if isinstance(said, dict):
        return {str(key): _shown(value) for key, value in said.items()}
    if isinstance(said, list | tuple):
        return [_shown(value) for value in said]
    return said


def _places(after: str | None, decisions: int) -> tuple[int, Order | None]:
    """Where decisions and facts go on."""
    if after is None:
        return decisions, _END
    try:
        position, *place = after.split(".")
        if place == [""]:
            return min(next(_numbers(position)), decisions), None
        lamport, author, seq = place
        numbers = _numbers(position, lamport, seq)
        return min(next(numbers), decisions), (next(numbers), NodeId(author), next(numbers))
    except ValueError:
        raise BadRequest(
            "after= is no place in the log.", fix="Send the `next` of an answer.", param="after"
        ) from None


def _numbers(*texts: str) -> Iterator[int]:
    for text in texts:
        if not is_whole(text, 19):
            raise ValueError(text)
        yield int(text)
