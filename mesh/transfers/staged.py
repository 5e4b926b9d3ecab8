"""What came of models of the hub that are not all here yet: it stays for the next pull of them.

Each lies in a directory of its own until it becomes a checkpoint. Knows no hub; everything blocks.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mesh.models.partial_draft import discard
from mesh.models.partial_writer import lock_directory
from mesh.types import ModelId

_STAGING = ".hub"
_BLOCK_BYTES = 512


def staging_of(models_dir: Path, model_id: ModelId, commit: str) -> Path:
    """Where the files of a model lie until all of them are there."""
    return models_dir / _STAGING / f"{model_id.replace('/', '--')}@{commit[:12]}"


def staged_bytes(models_dir: Path) -> dict[str, int]:
    """What came of each of them takes on the disk."""
    sizes = Counter[str]()
    for model_id, directory in _staged(models_dir):
        try:
            sizes[model_id] += sum(_BLOCK_BYTES * f.stat().st_blocks for f in directory.iterdir())
        except OSError:
            continue  # it became a checkpoint, or was deleted, meanwhile
    return {model_id: size for model_id, size in sizes.items() if size}


def remove_staged(models_dir: Path, model: str) -> int:
    """Delete what came of one; how many bytes of the disk that gave back. Raises Busy while it is
    being fetched, OSError."""
    size = staged_bytes(models_dir).get(model, 0)
    for model_id, directory in list(_staged(models_dir)):
        if model_id == model:
            lock = lock_directory(directory)
            try:
                discard(directory)
            finally:
                os.close(lock)
    return size


def _staged(models_dir: Path) -> Iterator[tuple[str, Path]]:
    for directory in (models_dir / _STAGING).glob("[!.]*@*"):
        # The hub allows no "--" in a name.
        yield directory.name.rpartition("@")[0].replace("--", "/"), directory
