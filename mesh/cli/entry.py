"""What the installed command runs: the command line, whose imports Ctrl-C may interrupt as well."""

from __future__ import annotations

import sys
from typing import NoReturn

INTERRUPTED = 130
"""As in `mesh.cli.output`, which is among what is imported."""


def main() -> NoReturn:
    """The installed command's entry point."""
    try:
        from mesh.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
