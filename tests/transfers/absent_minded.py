"""A fetcher that takes its time to find out what is here, while a file beside that says so."""

from __future__ import annotations

import time
from pathlib import Path

from mesh.models.partial import RECORD
from mesh.transfers import process
from mesh.transfers.shelf import Holding, Shelf

HOLD_UP, LOOKING, OFF = "hold-up", "looking", "off"
"""The file, the one that is there once a look was held up, and the one that is there once something
was off the shelf before its files were gone."""


class SlowShelf(Shelf):
    """Has looked once the file is gone."""

    _beside = Path()

    def holdings(self) -> list[Holding]:
        """See `Shelf`."""
        held = super().holdings()
        if held:
            self._beside = held[0].directory.parent
        while (self._beside / HOLD_UP).exists():
            (self._beside / LOOKING).touch()
            time.sleep(0.01)
        return held

    def remove(self, place: Path) -> None:
        """See `Shelf`."""
        super().remove(place)
        if (place / RECORD).exists():
            (place.parent / OFF).touch()


def main() -> None:
    """Be the process."""
    process.main(shelf=SlowShelf)
