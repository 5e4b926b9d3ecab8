"""The index of a harvest's files: a directory that grows batch by batch, whatever interrupts it.

``harvest.json`` says what is harvested, ``batches/NNNNNN.json`` what one batch gave, and
``index.json``, written when all are there, joins them. Each is put in place whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mesh.errors import BadRequest

VERSION = 1


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


class HarvestIndex:
    """The directory of one harvest, on the machine of whoever asked."""

    def __init__(self, directory: Path, plan: HarvestPlan) -> None:
        """Make the directory, or go on with it. Raises BadRequest when it is of another harvest."""
        self.plan = plan
        self._directory = directory
        self._batches = directory / "batches"
        self._batches.mkdir(parents=True, exist_ok=True)
        head = {"version": VERSION, "run": plan.run, **asdict(plan)}
        known = _read(directory / "harvest.json")
        if known is None:
            _write(directory / "harvest.json", head)
        elif known != head:
            other = sorted(name for name in head if known.get(name) != head[name])
            raise BadRequest(
                f"{directory} holds another harvest: {', '.join(other)} differ.",
                fix="Choose another --out, or give the same options again.",
                param="out",
            )
        self._weights = {
            read["weights_sha256"] for n in self.done() if (read := self._batch(n)) is not None
        }

    def done(self) -> set[int]:
        """The batches that are there."""
        names = (path.stem for path in self._batches.glob("*.json"))
        return {int(name) for name in names if name.isdecimal()}

    def add(self, result: dict[str, Any]) -> None:
        """Keep what a batch gave. Raises BadRequest when the model is not what it was."""
        self._weights.add(result["weights_sha256"])
        if len(self._weights) > 1:
            raise BadRequest(
                f"The weights of {self.plan.model} are not those of the earlier batches.",
                fix="Harvest into another directory.",
                param="model",
            )
        _write(self._batches / f"{result['batch']:06d}.json", result)

    def finish(self, count: int) -> Path:
        """Join `count` batches to ``index.json``; its path."""
        read = [self._batch(number) for number in range(count)]
        prompts = [prompt for one in read if one for prompt in one["prompts"]]
        files = [{"batch": one["batch"], **f} for one in read if one for f in one["files"]]
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

    def _batch(self, number: int) -> dict[str, Any] | None:
        return _read(self._batches / f"{number:06d}.json")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise BadRequest(f"{path} is damaged: {error}.", fix="Delete it.", param="out") from error
    return fields if isinstance(fields, dict) else None


def _write(path: Path, fields: dict[str, Any]) -> None:
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    with draft.open("w", encoding="utf-8") as stream:
        json.dump(fields, stream)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(path)
