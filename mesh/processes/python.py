"""How another process of this package is begun."""

from __future__ import annotations

import sys


def running(module: str, *arguments: str) -> list[str]:
    """The command line of ``python -m module arguments``, whatever lies where it is started:
    without ``-P`` a file `random.py` there would be imported for Python's."""
    return [sys.executable, "-P", "-m", module, *arguments]
