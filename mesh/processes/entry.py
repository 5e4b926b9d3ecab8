"""How every child process of the daemon begins: forked by the warm parent (`nursery`), or, where
that cannot be, as ``python -m mesh.processes.entry MODULE``.

Ties its life to the daemon's first, logs where the daemon does, then becomes MODULE. Importing
torch takes seconds; a daemon that dies meanwhile must not leave the process behind.
"""

from __future__ import annotations

import runpy
import sys

from mesh.logs import log_to_stderr
from mesh.processes.child import end_with_parent, log_file_of_parent

_COMPILING_NOTHING = frozenset({"mesh.shard.process", "mesh.pipeline.process"})
"""Jobs do without transformers: the jail has its own."""


def become(module: str) -> None:
    """Run `module` as ``python -m`` does."""
    log_to_stderr("info", log_file_of_parent())
    sys.argv[:] = [module]
    sys.modules.pop(module, None)  # the warm parent has imported it, to be run it is made anew
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    """Be the module named on the command line."""
    module = sys.argv[1]
    end_with_parent()
    if module in _COMPILING_NOTHING:
        from mesh.processes.lean import import_modelling

        import_modelling()
    become(module)


if __name__ == "__main__":
    main()
