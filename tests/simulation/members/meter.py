"""How much work the event loop of a simulated node does: counted by what is done, not by a clock.

Rates are those of a slow machine of a household (a mini PC or a Raspberry Pi 5), rounded up from
what was measured; what they are for is that work that grows shows as time that grows. Work that the
real code hands to a thread is counted apart: it keeps nobody waiting.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any
from unittest import mock

from mesh.events import apply as applying
from mesh.events import chains, docket, gossip, intake, log, opening, store
from mesh.events.graph import Graph
from mesh.identity.keys import NodeKey
from mesh.identity.membership import rules
from mesh.identity.membership.rules import Judge

STALL_US = 50_000.0
"""No turn of an honest node's loop takes longer: nobody else is served meanwhile."""

BUSY_US_PER_S = 500_000.0
"""Nor are all turns within a second longer together: half of the loop is for others."""

# Microseconds.
VERIFY_US = 200.0
"""An Ed25519 signature through OpenSSL, its key unpacked first: 0.1 ms here, twice that there."""
SIGN_US = 80.0
DECODE_US = 40.0
"""One record: msgpack, looking at every field, packing it again to compare."""
BYTE_US = 0.02
"""Per byte of what is hashed, copied, packed or unpacked: 50 MB/s, as msgpack in Python gives."""
FRAME_US = 20.0
"""A frame through `TensorSession`, its handler and the task that it wakes."""
PAST_US = 1.0
"""Per decision here, whenever a past is read off the graph: masks of as many bits."""
DERIVE_US = 40.0
"""Per decision here when the roster is made: a thousand take some tens of milliseconds."""
ROW_US = 8.0
"""A row that goes to SQLite or comes from it, and its digest."""
FOLD_US = 5.0
"""An event into the state."""
AUTHOR_US = 3.0
"""An author's head, packed or compared."""

NODE: ContextVar[str] = ContextVar("node", default="")
"""Whose code runs."""


class Meter:
    """What each node's loop has done. `now` reads the virtual clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.stalls: list[tuple[str, float, str]] = []
        """Node, microseconds, and what most of them were for: turns that were too long."""
        self.longest: Counter[str] = Counter()
        """The longest turn of each node in whole microseconds."""
        self.threaded: Counter[str] = Counter()
        self._now = now
        self._threads = 0
        self._turn: Counter[str] = Counter()
        self._second = 0
        self._in_second: Counter[str] = Counter()

    def charge(self, what: str, us: float) -> None:
        """So much was done just now."""
        if self._threads:
            self.threaded[NODE.get()] += round(us)
        else:
            self._turn[what] += round(us)

    @contextlib.contextmanager
    def thread(self) -> Iterator[None]:
        """What is done meanwhile is done on a thread."""
        self._threads += 1
        try:
            yield
        finally:
            self._threads -= 1

    def turn(self) -> None:
        """The loop's turn is at its end, and the next one begins."""
        if not self._turn:
            return
        node, us = NODE.get(), sum(self._turn.values())
        self.longest[node] = max(self.longest[node], us)
        if us > STALL_US:
            self.stalls.append((node, us, str(self._turn.most_common(3))))
        if int(self._now()) != self._second:
            self._second = int(self._now())
            self._in_second.clear()
        before = self._in_second[node]
        self._in_second[node] += us
        if before <= BUSY_US_PER_S < self._in_second[node]:
            self.stalls.append((node, self._in_second[node], "within a second"))
        self._turn.clear()


def seams(meter: Meter) -> contextlib.AbstractContextManager[None]:
    """Where the real code does what costs: each call goes on as ever, and is charged."""
    return _patched(
        [
            *((module, "decode", _record(meter)) for module in (docket, intake, store)),
            (docket, "_is_signed", _flat(meter, "verify", VERIFY_US)),
            (rules, "signed_by", _flat(meter, "verify", VERIFY_US)),
            (NodeKey, "sign", _flat(meter, "sign", SIGN_US)),
            (Judge, "permits", _by_graph(meter, "permits", PAST_US)),
            (Judge, "rewrites", _by_graph(meter, "rewrites", PAST_US)),
            (Judge, "membership", _by_graph(meter, "derive", DERIVE_US)),
            (Judge, "acknowledged", _by_graph(meter, "acknowledged", PAST_US)),
            (docket.Docket, "unheard", _by_docket(meter, "unheard", PAST_US)),
            (docket.Docket, "parents", _by_docket(meter, "parents", PAST_US)),
            (Graph, "between", _by_answer(meter, "between", PAST_US)),
            (opening, "event_row", _flat(meter, "row", ROW_US)),
            (opening, "decision_row", _flat(meter, "row", ROW_US)),
            (gossip, "heads_of", _by_heads(meter, "heads")),
            (gossip, "wants_something", _by_heads(meter, "heads")),
            (applying, "apply", _by_events(meter)),
            (applying, "refold", _by_chain(meter)),
            (chains.Chains, "_has_room", _flat(meter, "room", 1.0)),
            (log.EventLog, "muted", _flat(meter, "muted", 1.0)),
        ]
    )


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def _patched(places: list[tuple[Any, str, Wrap]]) -> Iterator[None]:
    with ExitStack() as stack:
        for where, name, wrap in places:
            stack.enter_context(mock.patch.object(where, name, wrap(getattr(where, name))))
        yield


def _charged(meter: Meter, what: str, cost: Callable[..., float]) -> Wrap:
    """`cost` of the arguments, in microseconds."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            meter.charge(what, cost(*arguments))
            return real(*arguments, **named)

        return call

    return wrap


def _flat(meter: Meter, what: str, us: float) -> Wrap:
    return _charged(meter, what, lambda *_: us)


def _record(meter: Meter) -> Wrap:
    return _charged(meter, "decode", lambda body, _: DECODE_US + BYTE_US * len(body))


def _by_graph(meter: Meter, what: str, us: float) -> Wrap:
    return _charged(meter, what, lambda judge, *_: us * len(judge._graph))


def _by_docket(meter: Meter, what: str, us: float) -> Wrap:
    return _charged(meter, what, lambda docket, *_: us * len(docket.graph))


def _by_answer(meter: Meter, what: str, us: float) -> Wrap:
    return _charged(meter, what, lambda graph, *_: us * len(graph))


def _by_heads(meter: Meter, what: str) -> Wrap:
    def cost(replica: Any, said: Any) -> float:
        told = len(getattr(said, "heads", ())) + len(getattr(said, "tips", ()))
        return AUTHOR_US * (len(replica.chains.state.authors) + told)

    return _charged(meter, what, cost)


def _by_events(meter: Meter) -> Wrap:
    return _charged(meter, "fold", lambda state, events: FOLD_US * len(events))


def _by_chain(meter: Meter) -> Wrap:
    return _charged(meter, "fold", lambda state, author, chain: FOLD_US * len(chain))
