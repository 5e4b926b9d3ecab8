"""The command line for as long as whoever started it lives: ``python -m mesh.cli.tethered up ...``.

Its standard input is the tether: at its end, which comes however the starter ends, so does this
process. For daemons that belong to a demo or a test. Knows nothing of the verbs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from mesh.cli.main import main

GRACE_S = 5.0
"""For a goodbye to the peers; then the process ends whatever it is doing."""


def _watch() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_watch, name="tether", daemon=True).start()
    main()
