"""How every child process of the daemon begins: forked by the warm parent (`nursery`), or, where
that cannot be, as ``python -m mesh.processes.entry MODULE ...``.

Ties its life to the daemon's first, logs where the daemon does, then becomes MODULE. Importing
torch takes seconds; a daemon that dies meanwhile must not leave the process behind.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys

from mesh.logs import log_to_stderr
from mesh.processes.child import end_with_parent, log_file_of_parent
from mesh.processes.nursery import LOG_LEVEL

_COMPILING_NOTHING = frozenset(
    {"mesh.shard.process", "mesh.pipeline.process", "mesh.shard.canaries"}
)
"""They load models. Jobs do without transformers: the jail has its own."""


def become(module: str, *arguments: str) -> None:
    """Call `main` of `module`: what the warm parent has imported of it is not made anew."""
    log_to_stderr(LOG_LEVEL, log_file_of_parent())
    sys.argv[:] = [module, *arguments]
    importlib.import_module(module).main()
    # Threads are waited for; to take torch apart after that costs 0.3 s, and helps nobody.
    atexit.register(os._exit, 0)


def main() -> None:
    """Be the module named on the command line."""
    _, module, *arguments = sys.argv
    end_with_parent()
    if module in _COMPILING_NOTHING:
        from mesh.processes.lean import import_modelling_or_begin_again

        import_modelling_or_begin_again()
    become(module, *arguments)


if __name__ == "__main__":
    main()
