"""What one malicious member may cost any other node, in a world a hundred times too small.

The limits have the form of `mesh.accounts.allowances` and smaller numbers, so that a run of a
minute reaches them; every bound follows from them. What counts is what is there, not what was
accounted for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

from mesh.accounts import allowances
from mesh.accounts.ledger import Limit, Limits, Resource
from mesh.events import docket
from mesh.events.types import MAX_EVENT_BYTES
from mesh.wire.limits import CONTROL_LIMITS, DEFAULT_LIMITS, KIB

# What one author may have kept.
DECISIONS = 32
SECOND_HISTORIES = docket.MAX_SECOND_HISTORIES
EVENTS = 200
EVENT_BYTES = 128 * KIB

# What may wait.
WAITING_BYTES = 64 * KIB
PENDING_BYTES = 64 * KIB
TENSOR_BYTES = 256 * KIB

DAEMON: Limits = {
    **allowances.DAEMON,
    Resource.EVENTS_STORED: Limit(EVENTS),
    Resource.EVENT_BYTES_STORED: Limit(EVENT_BYTES),
    Resource.EVENT_BYTES_WAITING: Limit(PENDING_BYTES, total=2 * PENDING_BYTES),
    Resource.EVENTS_PER_MINUTE: Limit(1200),
    Resource.BYTES_BUFFERED: Limit(1024 * KIB, total=4096 * KIB),
}
SHARDS: Limits = {
    **allowances.SHARDS,
    Resource.LINKS: Limit(8, total=32),
    Resource.BYTES_BUFFERED: Limit(TENSOR_BYTES, total=4 * TENSOR_BYTES),
}
TENSOR_LINKS = replace(
    DEFAULT_LIMITS, chunk_bytes=16 * KIB, tensor_bytes=128 * KIB, reassembly_bytes=128 * KIB,
    unanswered_bytes=128 * KIB, high_water_bytes=128 * KIB, queued_bytes=256 * KIB,
)  # fmt: skip
CONTROL_LINKS = replace(CONTROL_LIMITS, window=1, high_water_bytes=256 * KIB)

MEMORY_BYTES = {
    "decisions that wait": WAITING_BYTES,
    "events that wait": PENDING_BYTES,
    # What waits on a control link for one who does not read: she is not read then, either, but what
    # she had asked for before that comes on top, and news of some seconds.
    "control links": CONTROL_LINKS.unread_bytes + 3 * CONTROL_LINKS.control_bytes,
    # A frame is here before it is refused.
    "tensor links": TENSOR_BYTES + TENSOR_LINKS.message_bytes,
}
"""What any node holds in buffers and waiting rooms: for or of one malicious member, and for all the
honest ones, who together never come near, as they read what they ask for."""

ANCHORS = 2
DISK_DECISIONS = DECISIONS * (1 + ANCHORS) + SECOND_HISTORIES
"""Decisions of one author that any node keeps: the history that it saw first, and what the honest
anchors came to rely on, each of whom she may have told another one."""

DISK_BYTES = (
    # A lawful decision has names, a certificate and parents, each bounded by its form.
    DISK_DECISIONS * 2560
    + EVENT_BYTES + EVENTS * 128  # the one chain that counts
    + 2 * (MAX_EVENT_BYTES + 128)  # and the proof that it forked
)  # fmt: skip
"""What any node keeps of one author."""

DISK_FACTS = DISK_BYTES - DISK_DECISIONS * 2560
"""And of that what is no decision."""

SESSIONS = 4
"""Streams of the shard."""


@contextlib.contextmanager
def small_world() -> Iterator[None]:
    """The limits of the docket that are no settings, as small as the others."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(docket, "MAX_PER_AUTHOR", DECISIONS))
        stack.enter_context(mock.patch.object(docket, "MAX_WAITING_BYTES", WAITING_BYTES))
        yield
