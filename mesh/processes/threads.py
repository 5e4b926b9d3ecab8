"""Which threads a process has beside the one that asks: a fork would lose them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path


def other_threads() -> list[str]:
    """Their names, of Python's and of libraries' own; Python's alone where no kernel tells."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        threads = threading.enumerate()
        return sorted(each.name for each in threads if each is not threading.current_thread())
    own = Path("/proc/thread-self").readlink().name  # in a namespace of pids /proc has others
    names = []
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):  # one that ends meanwhile
            if task.name != own:
                names.append((task / "comm").read_text().strip())
    return sorted(names)
