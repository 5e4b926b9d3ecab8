"""What the installed command runs: the command line, whose imports Ctrl-C may interrupt as well."""

from __future__ import annotations

import sys
from typing import NoReturn

INTERRUPTED = 130
"""The exit code of Ctrl-C, as shells have it. It is here as all else has to be imported first."""


def main() -> NoReturn:
    """The installed command's entry point."""
    if sys.platform == "win32":  # before the imports, of which some are not to be had there
        sys.exit("hearthnet runs on Linux and macOS; on Windows, run it inside WSL 2.")
    try:
        from mesh.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
