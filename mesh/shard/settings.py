"""What a shard may be told: plain numbers, validated once. Reads no file and no environment.

The lease, how long a session may be open without a step, is told by the host in its hello and read
by askers; who lets a session rest for longer parks it meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mesh.wire.messages import Hello

_FIELD = "session_lease_s"
_SHORTEST_S = 0.1
_LONGEST_S = 86_400.0


def leased(hello: Hello, lease_s: float) -> Hello:
    """A host's hello that tells its lease."""
    return replace(hello, fields={**hello.fields, _FIELD: lease_s})


def lease_of(host: Hello) -> float | None:
    """The lease that a host's hello tells; None when it tells none that can be."""
    told = host.fields.get(_FIELD)
    if type(told) is not float or not _SHORTEST_S <= told <= _LONGEST_S:
        return None
    return told


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """The limits of one shard. Raises ValueError when one makes no sense.

    `kv_tokens` is the sum of `max_tokens` over all sessions, parked ones included. A session that
    is open without a step for `session_lease_s` is closed, as one that was parked for
    `park_lease_s`; one that was silent for `silent_s` may be closed when another node wants its
    share. A chunk longer than `prefill_rows` is computed in pieces of that length, always,
    so that how it is cut never depends on what else runs. A step predicted to take less than
    `inline_ms` is computed on the event loop, which answers nobody meanwhile: the way to the
    compute thread and back would add a quarter of a millisecond to each token. With
    `batch_invariant`, every row is computed alone: a step's result then does not depend on its
    neighbours.
    """

    max_concurrent_streams: int = 4
    kv_tokens: int = 32768
    eviction_idle_s: float = 600.0
    session_lease_s: float = 60.0
    silent_s: float = 5.0
    park_lease_s: float = 600.0
    prefill_rows: int = 256
    inline_ms: float = 100.0
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name in ("max_concurrent_streams", "kv_tokens", "prefill_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("eviction_idle_s", "park_lease_s", "inline_ms"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if self.session_lease_s <= 0:
            raise ValueError("session_lease_s must be positive")
