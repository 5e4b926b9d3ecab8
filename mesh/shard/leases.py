"""How long a session may be open without a step: told by the host in its hello, read by askers.

Who lets a session rest for longer parks it meanwhile. Knows neither links nor sessions.
"""

from __future__ import annotations

from dataclasses import replace

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
