"""What a node's processes leave for others: no image of their memory, nothing to write to."""

from __future__ import annotations

import contextlib
import os
import resource

_OTHERS_WRITE = 0o002


def leave_nothing() -> None:
    """For this process and those that it starts. What is left of one that crashes would have keys,
    prompts and activations in it, wherever the system puts that and for as long as it keeps it; and
    under a umask of 0 whoever is on this machine could change checkpoints and what is known of
    them. Whoever wants a core asks for one: ``prlimit --core=unlimited --pid PID``."""
    os.umask(os.umask(0o077) | _OTHERS_WRITE)
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
