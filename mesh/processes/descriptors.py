"""How many files and connections this process may have open at once."""

from __future__ import annotations

import contextlib
import resource

_ENOUGH = 4096


def allow_enough() -> None:
    """For this process and those that it starts: as many as the links of a house's nodes, its
    clients and the files of weights take. macOS gives 256 to whoever does not ask, Linux 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(_ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # a system that has yet another limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
