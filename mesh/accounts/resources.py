"""The resources that are counted, and the form of a limit. Plain data; `ledger` counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from math import inf

from mesh.types import Principal, PrincipalKind

_MINUTE_S = 60.0
_DAY_S = 86_400.0


class Resource(StrEnum):
    """A thing that is counted. Those `per` a time are rates, all others levels."""

    BYTES_BUFFERED = "bytes_buffered"
    """Bytes that wait in memory: received and not dealt with, or to be sent and not taken."""
    LINKS = "links"
    STREAMS = "streams"
    CACHE_POSITIONS = "cache_positions"
    TAP_SESSIONS = "tap_sessions"
    TAP_BYTES = "tap_bytes"
    """All that intervention sessions hold on a shard: messages, values, graphs, caches."""
    EDIT_BYTES = "edit_bytes"
    """Of steering edits that came before the session they are for was asked for."""
    PULLS = "pulls"
    """Gossip answers under way."""
    EVENTS_STORED = "events_stored"
    """Events of the log that the principal signed."""
    EVENT_BYTES_STORED = "event_bytes_stored"
    EVENT_BYTES_WAITING = "event_bytes_waiting"
    """Of events that the principal sent and that wait for what comes before them."""
    EVENTS_PER_MINUTE = "events_per_minute"
    EVENT_BYTES_PER_MINUTE = "event_bytes_per_minute"
    """Bytes of the event log sent in answer to gossip."""
    BAD_EVENTS_PER_MINUTE = "bad_events_per_minute"
    ADVERTISEMENTS_PER_MINUTE = "advertisements_per_minute"
    """Whatever they say, from one peer."""
    BAD_ADVERTISEMENTS_PER_MINUTE = "bad_advertisements_per_minute"
    OPEN_REQUESTS = "open_requests"
    """Requests to the API that have not ended; a stream of events or a socket is one."""
    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_DAY = "tokens_per_day"
    CPU_SECONDS_PER_MINUTE = "cpu_seconds_per_minute"

    @property
    def window_s(self) -> float | None:
        """The seconds that a rate is counted over; None for a level."""
        if self.endswith("_per_minute"):
            return _MINUTE_S
        return _DAY_S if self.endswith("_per_day") else None


@dataclass(frozen=True, slots=True)
class Limit:
    """The most of one resource: for `each` principal, those of a `kind` instead, and all together.

    Whoever uses up a rate with a cooldown is refused for so long, at least to the window's end.
    """

    each: float = inf
    total: float = inf
    kinds: Mapping[PrincipalKind, float] = field(default_factory=dict)
    cooldown_s: float = 0.0

    def of(self, principal: Principal) -> float:
        """What this principal may."""
        return self.kinds.get(principal.kind, self.each)


Limits = Mapping[Resource, Limit]
Personal = Callable[[Principal, Resource], float | None]
"""A limit of this one principal, like an API key's quota; None where its kind's holds. Asked for a
level when the principal first holds some, for a rate whenever it uses some."""


def window(resource: Resource) -> float:
    """The seconds that a rate is counted over. Raises ValueError for a level."""
    window_s = resource.window_s
    if window_s is None:
        raise ValueError(f"{resource} is held, not used")
    return window_s


def words(resource: Resource) -> str:
    """Its name for people."""
    return resource.value.replace("_", " ")


@lru_cache(1024)
def of_peer(node_id: str) -> Principal:
    """The principal that another node is."""
    return Principal(PrincipalKind.PEER, node_id)
