"""Writes the snapshots again: ``python -m tests.tui.snapshots``."""

from __future__ import annotations

import asyncio
import os
import time

from tests.tui.conftest import Daemon
from tests.tui.test_screens import KEPT, SIZES, tour


async def main() -> None:
    """All screens at all sizes."""
    for size in SIZES:
        daemon = Daemon()
        await daemon.start()
        for screen, text in (await tour(daemon, size)).items():
            (KEPT / f"{screen}-{size[0]}x{size[1]}.txt").write_text(text, "utf-8")


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"
    time.tzset()
    asyncio.run(main())
