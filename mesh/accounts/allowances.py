"""The limits of each process's ledger: for one principal, and for all together.

Numbers only, with the reason where one is a guess; what is counted where is the business of those
who count. `docs/explanation/limits.md` shows them all.
"""

from __future__ import annotations

from math import inf

from mesh.accounts.ledger import Limit, Limits, Resource
from mesh.types import PrincipalKind

_MIB = 1 << 20

MUTED_S = 300.0
"""How long nobody listens to a peer that sent too much that is bad."""

LOG: Limits = {
    # An honest peer sends none; versions that differ a little may send a few.
    Resource.BAD_EVENTS_PER_MINUTE: Limit(50, cooldown_s=MUTED_S),
    Resource.BAD_ADVERTISEMENTS_PER_MINUTE: Limit(50, cooldown_s=MUTED_S),
    # An honest peer sends six, and one for each change, seldom more than some a second. The next
    # one says all that a dropped one did. Of 64 shards each takes two milliseconds.
    Resource.ADVERTISEMENTS_PER_MINUTE: Limit(600),
    # Per author. A household's node signs some ten a day; whoever joins late fetches years of them
    # at once. Every node refuses the same events: these two are no settings.
    Resource.EVENTS_STORED: Limit(100_000),
    Resource.EVENT_BYTES_STORED: Limit(64 * _MIB),
    # Checking one takes a fifth of a millisecond: a tenth of a core.
    Resource.EVENTS_PER_MINUTE: Limit(30_000),
    # Events that wait for what comes before them, by who sent them.
    Resource.EVENT_BYTES_WAITING: Limit(2 * _MIB, total=8 * _MIB),
    # One page at a time; a log of 100,000 events is 30 MiB.
    Resource.PULLS: Limit(1),
    Resource.EVENT_BYTES_PER_MINUTE: Limit(256 * _MIB),
}
"""The event log and what is gossiped of it."""

LINKS: Limits = {
    # Each costs a descriptor, of which a process usually gets 1024. An asker per model and the jobs
    # of each model have one link to a shard.
    Resource.LINKS: Limit(32, total=256),
    # One link at its own limits may hold 145 MiB: 64 of incomplete tensors, 64 of steps that wait,
    # a window of 16, and what is on its way out.
    Resource.BYTES_BUFFERED: Limit(512 * _MIB, total=1024 * _MIB),
}
"""Whoever listens for tensors."""

SHARDS: Limits = {
    **LINKS,
    # Of four sessions with as many edits as one may have.
    Resource.EDIT_BYTES: Limit(16 * _MIB),
}
"""The shard process; streams, cache positions and tap sessions are counted per shard."""

_HOSTS: Limits = {
    # A link's own limits come first; this is for several to one host.
    Resource.BYTES_BUFFERED: Limit(512 * _MIB),
}

ASKER: Limits = {
    **_HOSTS,
    # What tokenising and rendering takes: of a megabyte some two seconds.
    Resource.CPU_SECONDS_PER_MINUTE: Limit(20, kinds={PrincipalKind.NODE: inf}),
}
"""An asker's process."""

JOBS: Limits = _HOSTS
"""The process of the jobs."""

CONTROL_LINKS: Limits = {
    # One is in use; others are duplicates for a moment, or what is left of a crash.
    Resource.LINKS: Limit(8, total=256),
    Resource.BYTES_BUFFERED: Limit(16 * _MIB, total=128 * _MIB),
}
"""Links between daemons."""

API: Limits = {
    # Of the connections that the API takes (`ApiSettings.max_connections`) a quarter each; an
    # eighth is left to the owner, whose requests nobody counts, and to whoever has yet to ask.
    Resource.OPEN_REQUESTS: Limit(128, total=448),
}
"""The HTTP API; what a key may use of it besides is its quota."""

DAEMON: Limits = {**LOG, **CONTROL_LINKS, **API}
