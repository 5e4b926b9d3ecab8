"""A partial checkpoint: a directory that looks like the whole one, and a record of what is there.

It has the config, the tokenizer, the index and every safetensors file of the checkpoint, or its
GGUF files, at their full size and with their true headers; the bytes of tensors that are not there
are holes. The record (`RECORD`, written once) says the SHA-256 of every tensor, so that
`weights_sha256` is known without the bytes; the journal (`JOURNAL`, only ever appended to) says
which are there. Tensors that are read with the config are there from the beginning.

One line of the journal is one fact: ``c I`` tensor I is complete, its bytes were verified and have
reached the disk; ``p I N`` piece N of tensor I was written, which is worth no more than not asking
for it again; ``x I`` its pieces are void; ``d I`` it was dropped, as it had changed on the disk. I
counts the tensors' names in ascending order. A last line without its end was cut off by a
crash, and says nothing.

Reading only: `partial_writer` writes. Knows nothing of where bytes come from.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from mesh import codec
from mesh.codec import Fault, Sha256
from mesh.errors import BadCheckpoint, WeightsMissing
from mesh.models.hashing import weights_sha256
from mesh.models.header import TensorEntry
from mesh.types import ModelId

RECORD = "hearthnet-partial.json"
JOURNAL = "hearthnet-partial.log"
PIECE_BYTES = 4 << 20
"""Larger tensors are written, and asked for, piece by piece."""

_MAX_RECORD_BYTES = 64 << 20
"""Half a million tensors."""
_MAX_JOURNAL_BYTES = 64 << 20
_FACT = re.compile(rb"(?P<what>[cpxd]) (?P<tensor>\d{1,9})(?: (?P<piece>\d{1,9}))?")
_UNSAFE = re.compile(r"[^\w.-]+")
_FETCH_AGAIN = "Remove it with `hearthnet rm`, then fetch it again."


@dataclass(frozen=True, slots=True)
class PartialRecord:
    """What never changes of a partial checkpoint.

    `origin` is the repository and commit that it came from (``org/name@commit``), '' if that is
    not known; `is_read` where this machine has read all of it there, others have only said so.
    `tensors` are the hex SHA-256 of all, also of those that are not there.
    """

    version: Literal[1]
    model_id: Annotated[str, Meta(min_length=1, max_length=512)]
    weights_sha256: Sha256
    origin: Annotated[str, Meta(max_length=512)]
    tensors: dict[str, Sha256]
    is_read: bool = False


@dataclass(slots=True)
class Present:
    """What the journal says is there: complete tensors, and pieces of others; `dropped` ones were,
    and are not again."""

    complete: set[str]
    pieces: dict[str, set[int]]
    dropped: set[str]


@dataclass(frozen=True, slots=True)
class Partial:
    """A partial checkpoint as it was when it was read."""

    directory: Path
    record: PartialRecord
    complete: frozenset[str]
    dropped: frozenset[str]

    def mark(self, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """The entries of the files' headers with their recorded `sha256`, and `present` or not.

        Raises BadCheckpoint when files and record are not of the same checkpoint.
        """
        if tensors.keys() != self.record.tensors.keys():
            raise BadCheckpoint(
                f"{self.directory / RECORD} names other tensors than the files' headers.",
                fix=_FETCH_AGAIN,
            )
        marked = {
            name: replace(entry, sha256=self.record.tensors[name], present=name in self.complete)
            for name, entry in tensors.items()
        }
        if weights_sha256(marked.values()) != self.record.weights_sha256:
            raise BadCheckpoint(
                f"{self.directory / RECORD} and the files' headers are not of the checkpoint"
                f" {self.record.weights_sha256[:12]}.",
                fix=_FETCH_AGAIN,
            )
        return marked


def read_partial(directory: Path) -> Partial | None:
    """The partial checkpoint in `directory`; None when what is there is not a partial one.

    Raises BadCheckpoint when its record or journal is damaged.
    """
    try:
        record = read_record(directory)
    except FileNotFoundError:
        return None
    present = read_journal(directory, sorted(record.tensors))
    return Partial(directory, record, frozenset(present.complete), frozenset(present.dropped))


def read_record(directory: Path) -> PartialRecord:
    """The record. Raises BadCheckpoint, and FileNotFoundError where there is none."""
    file = directory / RECORD
    try:
        return codec.read_file(file, PartialRecord, _MAX_RECORD_BYTES)
    except FileNotFoundError:
        raise
    except (Fault, OSError) as error:
        raise BadCheckpoint(f"{file} cannot be used: {error}.", fix=_FETCH_AGAIN) from error


def read_journal(directory: Path, names: list[str]) -> Present:
    """What the journal says; `names` are the tensors' in ascending order.

    Raises BadCheckpoint for a line that is no fact, other than an unfinished last one.
    """
    file = directory / JOURNAL
    try:
        with file.open("rb") as stream:
            text = stream.read(_MAX_JOURNAL_BYTES + 1)
    except FileNotFoundError:
        text = b""
    except OSError as error:
        raise BadCheckpoint(f"{file} cannot be read: {error}.", fix=_FETCH_AGAIN) from error
    present = Present(set(), {}, set())
    whole, _, _ = text.rpartition(b"\n")
    for line in whole.split(b"\n") if whole else ():
        fact = _FACT.fullmatch(line)
        if fact is None or int(fact["tensor"]) >= len(names):
            raise BadCheckpoint(f"{file} is damaged: {line[:40]!r}.", fix=_FETCH_AGAIN)
        _learn(present, fact["what"], names[int(fact["tensor"])], int(fact["piece"] or 0))
    return present


def journal_of(names: Collection[str], complete: Collection[str]) -> bytes:
    """A new journal: of tensors of these `names`, the `complete` ones are there."""
    indexed = enumerate(sorted(names))
    return b"".join(b"c %d\n" % index for index, name in indexed if name in complete)


def require_present(entries: Iterable[TensorEntry]) -> None:
    """Raise WeightsMissing when the bytes of one of these are not in the checkpoint's files."""
    missing = [entry for entry in entries if not entry.present]
    if missing:
        first = min(entry.name for entry in missing)
        size_mb = sum(entry.nbytes for entry in missing) / 1e6
        raise WeightsMissing(
            f"{missing[0].file.parent} is a partial checkpoint and lacks {len(missing)} of the"
            f" tensors that are wanted ({size_mb:.1f} MB), {first} among them.",
            fix="Fetch them with `hearthnet pull`, then try again.",
        )


def partial_directory(models_dir: Path, model_id: ModelId, sha256: str) -> Path:
    """Where the partial checkpoint of these weights is kept."""
    return models_dir / f"{_UNSAFE.sub('--', model_id)[:100]}@{sha256[:12]}"


def _learn(present: Present, what: bytes, name: str, piece: int) -> None:
    if what == b"p":
        if name not in present.complete:
            present.pieces.setdefault(name, set()).add(piece)
        return
    present.pieces.pop(name, None)
    if what == b"c":
        present.complete.add(name)
        present.dropped.discard(name)
    elif what == b"d" and name in present.complete:
        present.complete.discard(name)
        present.dropped.add(name)
