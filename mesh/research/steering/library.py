"""The files of steering edits that are on this node, each named by its SHA-256.

Blocks: called from threads. Knows nothing of names, models or other nodes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from pathlib import Path

from mesh.models.edits import MAX_EDIT_BYTES

_SUFFIX = ".safetensors"


class Library:
    """Files below one directory, which is made when it is first needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, sha256: str) -> bytes | None:
        """The file of that hash; None when it is not here, or is not what its name says."""
        path = self.path(sha256)
        try:
            if path.stat().st_size > MAX_EDIT_BYTES:
                return None
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        return data if hashlib.sha256(data).hexdigest() == sha256 else None

    def keep(self, data: bytes) -> str:
        """Put a file in; its hash. When this returns it is on the disk, or OSError was raised."""
        sha256 = hashlib.sha256(data).hexdigest()
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self._directory / f"{sha256}.{os.getpid()}.tmp"
        with draft.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(self.path(sha256))
        return sha256

    def prune(self, wanted: Collection[str]) -> None:
        """Delete what is none of the `wanted` hashes."""
        for path in self._directory.glob(f"*{_SUFFIX}"):
            if path.stem not in wanted:
                path.unlink(missing_ok=True)

    def path(self, sha256: str) -> Path:
        """Where the file of this hash lies, if it is here."""
        return self._directory / f"{sha256}{_SUFFIX}"
