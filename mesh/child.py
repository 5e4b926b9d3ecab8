"""How every child process of the daemon begins: ``python -m mesh.child MODULE``.

Ties its life to the daemon's first, logs where the daemon does, then becomes MODULE. Importing
torch takes seconds; a daemon that dies meanwhile must not leave the process behind.
"""

from __future__ import annotations

import runpy
import sys

from mesh.logs import log_to_stderr
from mesh.supervise import end_with_parent, log_file_of_parent

_COMPILING_NOTHING = frozenset({"mesh.shard.host", "mesh.pipeline.engine_process"})
"""Jobs are not among them: users' code may need the compiler, after the jail has closed."""


def main() -> None:
    """Watch the parent, then run the module named on the command line."""
    end_with_parent()
    log_to_stderr("info", log_file_of_parent())
    module = sys.argv[1]
    sys.argv[:] = [module]
    if module in _COMPILING_NOTHING:
        from mesh.models.lean import import_modelling

        import_modelling()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
