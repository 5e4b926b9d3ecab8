"""The index of a harvest's files: a directory that grows batch by batch, whatever interrupts it.

``harvest.json`` says what is harvested, ``batches/NNNNNN.json`` what one batch gave, and
``index.json``, written when all are there, joins them. Each is put in place whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType

from mesh import codec
from mesh.codec import Fault
from mesh.errors import BadRequest, DiskFull

VERSION = 1
_MAX_BYTES = 1 << 30
_HEAD = "harvest.json"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HarvestPlan:
    """All that decides about what a harvest gives, but for the weights."""

    model: str
    module: str
    dataset_sha256: str
    max_tokens: int
    batch_size: int

    @property
    def run(self) -> str:
        """The name of the run on the nodes that write it: the same for the same plan."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Head(HarvestPlan):
    version: int
    run: str


@dataclass(frozen=True, slots=True)
class _Prompt:
    line: int
    ids: list[int]
    cut: bool | UnsetType = UNSET
    """Whether it was longer than what was run of it; earlier versions did not say."""


@dataclass(frozen=True, slots=True)
class _Batch:
    batch: int
    weights_sha256: str
    prompts: list[_Prompt]
    files: list[dict[str, Any]]


class HarvestIndex:
    """The directory of one harvest, on the machine of whoever asked."""

    def __init__(self, directory: Path, plan: HarvestPlan) -> None:
        """Make the directory, or go on with it; from the first batch on it is this harvest's.
        Raises BadRequest when it is of another one or cannot be read, DiskFull when it cannot be
        written."""
        self.plan = plan
        self._directory = directory
        self._batches = directory / "batches"
        self._adding = Lock()  # batches that run at a time may come back at the same moment
        try:
            self._batches.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self._batches, error) from error
        self._claim()
        self._weights = {
            read.weights_sha256 for n in self.done() if (read := self._batch(n)) is not None
        }

    def done(self) -> set[int]:
        """The batches that are there."""
        names = (path.stem for path in self._batches.glob("*.json"))
        return {int(name) for name in names if name.isdecimal()}

    def add(self, result: dict[str, Any]) -> None:
        """Keep what a batch gave. Raises BadRequest when the model is not what it was, or the
        directory became another harvest's, DiskFull."""
        with self._adding:
            if not self._claim():
                _write(self._directory / _HEAD, self._head)
            self._weights.add(result["weights_sha256"])
            if len(self._weights) > 1:
                raise BadRequest(
                    f"The weights of {self.plan.model} are not those of the earlier batches.",
                    fix="Harvest into another directory.",
                    param="model",
                )
            _write(self._batches / f"{result['batch']:06d}.json", result)

    def finish(self, count: int) -> Path:
        """Join `count` batches to ``index.json``; its path. Raises BadRequest, DiskFull."""
        read = [one for number in range(count) if (one := self._batch(number)) is not None]
        prompts = [codec.plain(prompt) for one in read for prompt in one.prompts]
        files = [
            {"batch": one.batch, **file} | {"batch": one.batch}
            for one in read
            for file in one.files
        ]
        index = {
            "version": VERSION,
            "run": self.plan.run,
            **asdict(self.plan),
            "weights_sha256": next(iter(self._weights), None),
            "batches": count,
            "prompts": prompts,
            "files": files,
        }
        path = self._directory / "index.json"
        _write(path, index)
        return path

    @property
    def _head(self) -> dict[str, Any]:
        return {"version": VERSION, "run": self.plan.run, **asdict(self.plan)}

    def _claim(self) -> bool:
        """Whether the directory is this harvest's; else it is nobody's yet. Raises BadRequest."""
        known, head = _read(self._directory / _HEAD, _Head), self._head
        if known is None:
            return False
        if other := sorted(name for name in head if getattr(known, name) != head[name]):
            raise BadRequest(
                f"{self._directory} holds another harvest: {', '.join(other)} differ.",
                fix="Choose another --out, or give the same options again.",
                param="out",
            )
        return True

    def _batch(self, number: int) -> _Batch | None:
        return _read(self._batches / f"{number:06d}.json", _Batch)


def _read(path: Path, form: type[T]) -> T | None:
    try:
        return codec.read_file(path, form, _MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadRequest(
            f"{path} cannot be read: {error.strerror}.",
            fix="Make it readable for this user, or choose another --out.",
            param="out",
        ) from error
    except Fault as fault:
        said = f"{fault.field} {fault.why}".strip()
        raise BadRequest(f"{path} is damaged: {said}.", fix="Delete it.", param="out") from fault


def _write(path: Path, fields: dict[str, Any]) -> None:
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="utf-8") as stream:
            json.dump(fields, stream)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):  # it may be what does not fit
            draft.unlink(missing_ok=True)
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> DiskFull:
    return DiskFull(
        f"{path} cannot be written: {error.strerror}.",
        fix="Free some space there, or choose another --out; the same command then goes on.",
        param="out",
    )
