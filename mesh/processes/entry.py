"""How every child process of the daemon begins: forked by the warm parent (`nursery`), or, where
that cannot be, as ``python -m mesh.processes.entry MODULE``.

Ties its life to the daemon's first, logs where the daemon does, then becomes MODULE. Importing
torch takes seconds; a daemon that dies meanwhile must not leave the process behind.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys

from mesh.logs import log_to_stderr
from mesh.processes.child import end_with_parent, log_file_of_parent
from mesh.processes.nursery import LOG_LEVEL

logger = logging.getLogger(__name__)

_COMPILING_NOTHING = frozenset({"mesh.shard.process", "mesh.pipeline.process"})
"""Jobs do without transformers: the jail has its own."""
_PLAINLY = "plainly"


def become(module: str) -> None:
    """Call `main` of `module`: what the warm parent has imported of it is not made anew."""
    log_to_stderr(LOG_LEVEL, log_file_of_parent())
    sys.argv[:] = [module]
    importlib.import_module(module).main()


def main() -> None:
    """Be the module named on the command line."""
    module, *rest = sys.argv[1:]
    end_with_parent()
    if module in _COMPILING_NOTHING and rest != [_PLAINLY]:
        _import_modelling(module)
    become(module)


def _import_modelling(module: str) -> None:
    from mesh.processes.lean import import_modelling

    try:
        import_modelling()
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        # Another version of torch or transformers. What is half imported stays so: begin again.
        log_to_stderr(LOG_LEVEL)
        logger.warning("%s imports torch and transformers plainly: %s", module, error)
        arguments = [sys.executable, "-m", "mesh.processes.entry", module, _PLAINLY]
        os.execv(sys.executable, arguments)  # noqa: S606 - without a shell, as it should be


if __name__ == "__main__":
    main()
