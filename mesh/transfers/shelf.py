"""What this node has of checkpoints, on disk: whole ones and partial ones, by their hash.

Reads bytes for whoever may have them, and says what is there. Any thread may ask; everything that
reads files blocks.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from mesh.errors import BadRequest, ModelNotFound, WeightsMissing
from mesh.models.hashing import fingerprint
from mesh.models.manifest import Manifest
from mesh.transfers import documents
from mesh.types import LayerRange, ModelId
from mesh.wire.messages import Part

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint in one place; `complete` names the tensors of a partial one, None: all.
    `is_read`: this machine has read it at its `origin` itself. `seen` has the fingerprints of files
    that nobody here writes to: one that is another now has other weights. `damaged` are tensors
    whose bytes are others without that."""

    manifest: Manifest
    origin: str
    complete: frozenset[str] | None
    is_read: bool = False
    seen: Mapping[Path, list[Any]] = field(default_factory=dict)
    damaged: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """The tensors that are here."""
        here = frozenset(self.manifest.tensors) if self.complete is None else self.complete
        return here - self.damaged if self.damaged else here

    @property
    def place(self) -> Path:
        """Its directory, which others may share with a whole GGUF file: the file then."""
        return self.manifest.path if self.complete is None else self.manifest.directory


@dataclass(frozen=True, slots=True)
class StoredPart:
    """What somebody asks for, `size` bytes. A document is that of one moment, whatever comes in the
    meantime."""

    size: int
    read: Callable[[int, int], bytes]
    """Bytes [start, stop) of it. Blocks. Raises as `Shelf.part`, OSError."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A checkpoint of which something is here: which layers are complete, and whether the ends are.

    `directory` is the place of its fullest copy, `is_partial` whether that may be added to;
    `here_bytes` of its `total_bytes` of tensors are here. Of what is being fetched from the hub
    (`origin`) the `weights_sha256` is ''. `files_sha256` is that of its config and tokenizer, see
    `documents`. `dtype` is that of most of its weights as stored, as in `Manifest`.
    """

    model_id: ModelId
    weights_sha256: str
    total_layers: int
    layers: tuple[LayerRange, ...]
    ends: bool
    origin: str
    directory: Path
    is_partial: bool
    here_bytes: int
    total_bytes: int
    files_sha256: str = ""
    dtype: str = ""


class Shelf:
    """The checkpoints of this node by their places."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._kept: dict[Path, StoredCheckpoint] = {}
        self._documents: dict[str, bytes] = {}
        self._claims: dict[str, Holding] = {}
        self._files: dict[Path, tuple[object, str]] = {}
        self._outdated: list[StoredCheckpoint] = []
        self.version = 0
        """Grows with every change."""

    def put(self, kept: StoredCheckpoint) -> None:
        """Have it found from now on, instead of what was in its place before."""
        with self._guard:
            self.version += 1
            self._kept[kept.place] = kept
            self._documents.pop(kept.manifest.weights_sha256, None)

    def remove(self, place: Path) -> None:
        """It is here no longer."""
        with self._guard:
            self.version += 1
            gone = self._kept.pop(place, None)
            if gone is not None:
                self._documents.pop(gone.manifest.weights_sha256, None)

    def lose(self, place: Path, name: str, *, is_noted: bool) -> None:
        """A tensor has changed there: it is here no longer. `is_noted`: nor by the journal."""
        with self._guard:
            self.version += 1
            kept = self._kept.get(place)
            if kept is None:
                return
            if is_noted and kept.complete is not None:
                fewer = replace(kept, complete=kept.complete - {name})
            else:
                fewer = replace(kept, damaged=kept.damaged | {name})
            self._kept[place] = fewer
            self._documents.pop(kept.manifest.weights_sha256, None)

    def claim(self, origin: str, model_id: ModelId, directory: Path) -> None:
        """Have others know that this node fetches a repository from the hub, so that they wait."""
        with self._guard:
            self.version += 1
            self._claims[origin] = Holding(
                model_id, "", 0, (), False, origin, directory, True, 0, 0
            )  # fmt: skip

    def unclaim(self, origin: str) -> None:
        """It does so no longer."""
        with self._guard:
            self.version += 1
            self._claims.pop(origin, None)

    def of(self, sha256: str, called: str = "") -> list[StoredCheckpoint]:
        """The copies of this checkpoint: those that are `called` so first, whose config and
        tokenizer may be others, and of these the one with most tensors."""
        with self._guard:
            found = [k for k in self._kept.values() if k.manifest.weights_sha256 == sha256]
        return sorted(found, key=lambda k: (k.manifest.model_id != called, -len(k.names)))

    def own(self, sha256: str, called: str) -> Path | None:
        """The directory of a partial copy, to which tensors may be added; see `of`."""
        found = [kept for kept in self.of(sha256, called) if kept.complete is not None]
        return found[0].manifest.directory if found else None

    def at(self, place: Path) -> StoredCheckpoint | None:
        """What is in this place."""
        with self._guard:
            return self._kept.get(place)

    def still(self, place: Path, name: str) -> StoredCheckpoint | None:
        """What is in this place, if it has this tensor and was not replaced. Blocks."""
        kept = self.at(place)
        if kept is None or name not in kept.names or not self._is_as_read(kept, name):
            return None
        return kept

    def all(self) -> list[StoredCheckpoint]:
        """Everything that is here."""
        with self._guard:
            return list(self._kept.values())

    def look(self) -> None:
        """Find out what was deleted by hand, or by another node of this machine. Blocks."""
        for kept in self.all():
            if not os.path.exists(kept.place):  # noqa: PTH110 - a disk that fails has nothing either
                self.remove(kept.place)

    def outdated(self) -> list[StoredCheckpoint]:
        """Those that were removed since the last call because their files are others now."""
        with self._guard:
            gone, self._outdated = self._outdated, []
        return gone

    def holdings(self) -> list[Holding]:
        """One entry for each name of a checkpoint, of its fullest copy, and one for each claim."""
        fullest: dict[tuple[ModelId, str], StoredCheckpoint] = {}
        for kept in sorted(self.all(), key=lambda kept: len(kept.names)):
            fullest[kept.manifest.model_id, kept.manifest.weights_sha256] = kept
        held = []
        for kept in fullest.values():
            try:
                held.append(_holding(kept, self._files_sha256(kept)))
            except OSError as error:
                logger.warning("%s is not offered any more: %s", kept.place, error)
                self.remove(kept.place)
        with self._guard:
            return [*held, *self._claims.values()]

    # For others

    def having(self, sha256: str, name: str) -> StoredCheckpoint:
        """A copy of the checkpoint that has this tensor. Blocks. Raises as `part`."""
        self._require(sha256)
        for kept in self.of(sha256):
            if name in kept.names and self._is_as_read(kept, name):
                return kept
        raise WeightsMissing(
            f"This node does not have tensor {name[:128]} of checkpoint {sha256[:12]}.",
            fix="Ask another node.",
        )

    def part(self, sha256: str, part: Part, name: str) -> StoredPart:
        """A part of a checkpoint. Blocks. Raises ModelNotFound, WeightsMissing, BadRequest."""
        if part is Part.DOCUMENT:
            text = self._document(sha256)
            return StoredPart(len(text), lambda start, stop: text[start:stop])
        if part is Part.TENSOR:
            size = self.having(sha256, name).manifest.tensors[name].nbytes
            return StoredPart(size, partial(self._of_tensor, sha256, name))
        manifest = self._require(sha256).manifest
        file = _file(manifest, part, name)
        is_small = part is Part.FILE
        size = file.stat().st_size if is_small else documents.header_end(manifest, file)
        return StoredPart(size, partial(_read, file))

    def _of_tensor(self, sha256: str, name: str, start: int, stop: int) -> bytes:
        """Of whichever copy has it by now."""
        entry = self.having(sha256, name).manifest.tensors[name]
        return _read(entry.file, entry.offset + start, entry.offset + stop)

    def _files_sha256(self, kept: StoredCheckpoint) -> str:
        """Read again only when one of the files is another one."""
        manifest = kept.manifest
        names = documents.small_names(manifest) or {file.name for file in manifest.heads}
        manifest.directory.stat()  # raises where all of it is gone
        files = {name: manifest.directory / name for name in sorted(names)}
        now = [
            (name, stat.st_mtime_ns, stat.st_size)
            for name, file in files.items()
            if file.exists() and (stat := file.stat())
        ]
        known, found = self._files.get(kept.place, (None, ""))
        if known != now:
            found = documents.files_sha256(manifest)
            self._files[kept.place] = (now, found)
        return found

    def _document(self, sha256: str) -> bytes:
        with self._guard:
            text, version = self._documents.get(sha256), self.version
        if text is None:
            kept = self._require(sha256)
            document = documents.document_of(kept.manifest, kept.origin, kept.names)
            text = documents.encode(document)
            with self._guard:
                if version == self.version:  # else more may have come meanwhile
                    self._documents[sha256] = text
        return text

    def _require(self, sha256: str) -> StoredCheckpoint:
        found = self.of(sha256)
        if not found:
            raise ModelNotFound(
                f"This node has nothing of checkpoint {sha256[:12]}.", fix="Ask another node."
            )
        return found[0]

    def _is_as_read(self, kept: StoredCheckpoint, name: str) -> bool:
        """Whether the tensor's file is still the one that was hashed; else none of it is given."""
        file = kept.manifest.tensors[name].file
        if file not in kept.seen or fingerprint(file) == kept.seen[file]:
            return True
        logger.warning("%s has changed since it was read: it is read anew", kept.place)
        self.remove(kept.place)
        with self._guard:
            self._outdated.append(kept)
        return False


def _holding(kept: StoredCheckpoint, files_sha256: str) -> Holding:
    manifest = kept.manifest
    layers, ends = documents.complete_layers(manifest, kept.names)
    tensors, names = manifest.tensors, kept.names
    return Holding(
        manifest.model_id, manifest.weights_sha256, manifest.total_layers, layers, ends,
        kept.origin, kept.place, kept.complete is not None,
        sum(tensors[name].nbytes for name in names), sum(e.nbytes for e in tensors.values()),
        files_sha256, manifest.dtype,
    )  # fmt: skip


def _file(manifest: Manifest, part: Part, name: str) -> Path:
    """The small file, or the one of weights. Raises BadRequest for what is neither."""
    if part is Part.FILE and name in documents.small_names(manifest):
        return manifest.directory / name
    if part is Part.HEADER:
        for file in documents.weights_files(manifest):
            if file.name == name:
                return file
    raise BadRequest(f"{name[:64]!r} is no file of this checkpoint.", fix="Ask for others.")


def _read(file: Path, start: int, stop: int) -> bytes:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        read = os.pread(fd, stop - start, start)
    finally:
        os.close(fd)
    if len(read) < stop - start:  # whoever asks would wait for the rest
        raise WeightsMissing(f"{file.name} has become shorter here.", fix="Ask another node.")
    return read
