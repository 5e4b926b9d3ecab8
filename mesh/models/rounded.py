"""Which checkpoints it is that something was rounded of, so that this goes when they have gone.

Whoever rounds weights says where they lie; whoever sweeps up looks whether they still do. Knows
nothing of what was rounded, but where it is kept. Blocks.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from mesh.models.hashing import read_cached, write_json_atomically
from mesh.paths import quantised_dir

logger = logging.getLogger(__name__)

_PLACES = "places.json"
_MAX_PLACES = 16
"""Of copies of one checkpoint; the newest are remembered."""


def note_place(cache_dir: Path | None, weights_sha256: str, place: Path) -> None:
    """What is rounded of these weights is of use while the checkpoint in this place is there."""
    if cache_dir is None:
        return
    file = quantised_dir(cache_dir, weights_sha256) / _PLACES
    known, new = read_cached(file, list[str]) or [], str(place.absolute())
    if new not in known:
        write_json_atomically(file, [*known, new][-_MAX_PLACES:])


def sweep_rounded(cache_dir: Path) -> None:
    """Delete what was rounded of checkpoints that are in no place any more."""
    for directory in quantised_dir(cache_dir, "").glob("*"):
        places = read_cached(directory / _PLACES, list[str])
        if places and not any(map(os.path.exists, places)):
            logger.info("%s goes, as %s is gone", directory, places[-1])
            shutil.rmtree(directory, ignore_errors=True)
