"""The small files of a repository of the hub, and which of its files are the weights.

Whatever speaks against a repository is found here, before a byte of its weights is asked for.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mesh import codec
from mesh.codec import Fault
from mesh.errors import BadCheckpoint
from mesh.models.coded.scheme import scheme_of
from mesh.models.hashing import write_json_atomically
from mesh.models.header import MAX_HEADER_BYTES
from mesh.models.hub_cache import cache_folder
from mesh.models.manifest import INDEX, SINGLE
from mesh.models.partial import JOURNAL, RECORD, PartialRecord, journal_of, read_record
from mesh.models.partial_draft import SparseFile, create_sparse, refused_by_disk, take_place
from mesh.transfers.documents import small_among
from mesh.transfers.hub import Hub, HubFile, Repository, origin_of
from mesh.types import ModelId

_CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
_FOR_PLANS = frozenset({_CONFIG, "generation_config.json", INDEX})
_AT_ONCE = 8
"""Headers that are asked for at the same time."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Index:
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of a repository; `gguf` are the files of a GGUF model, and none of others."""

    repository: Repository
    model_id: ModelId
    gguf: Sequence[HubFile]

    @property
    def origin(self) -> str:
        """See `origin_of`."""
        first = self.gguf[0].name if self.gguf else ""
        return origin_of(self.repository.id, self.repository.sha, first)


async def read_small(
    hub: Hub, repository: Repository, names: Collection[str] | None = None
) -> dict[str, bytes]:
    """Those of the small files of these names, or all, that there are, config first.

    Raises BadCheckpoint for a repository without a config, UnsupportedFamily for weights in a
    quantised format that is not read, TransferFailed for bytes that are not the file's, and what
    the hub raises.
    """
    files = repository.files
    if _CONFIG not in files:
        raise _adapter(repository) or BadCheckpoint(
            f"{repository.id} has no {_CONFIG}, and so no model that transformers reads.",
            fix="Use another repository.",
        )
    found: dict[str, bytes] = {}
    wanted = small_among(files) if names is None else names & files.keys()
    for name in sorted(wanted, key=lambda name: (name != _CONFIG, name)):
        content = found[name] = await hub.read(repository, name, 0, files[name].length)
        files[name].check(content)
        if name == _CONFIG:
            scheme_of(_parsed(name, content, dict[str, Any]), repository.id)
    return found


def weights_files(repository: Repository, small: dict[str, bytes]) -> list[HubFile]:
    """The files that hold the weights. Raises BadCheckpoint for those that are not safetensors, or
    not all there."""
    files = repository.files
    is_sharded = INDEX in small and SINGLE not in files
    if is_sharded:
        index = _parsed(INDEX, small[INDEX], _Index)
        names = sorted(set(index.weight_map.values()))
    else:
        names = [SINGLE]
    lacking = [
        name
        for name in names
        if name not in files or files[name].lfs is None or Path(name).name != name
    ]
    if lacking and is_sharded:
        raise BadCheckpoint(
            f"{repository.id} has no {lacking[0]}, which its {INDEX} names.",
            fix="Try again later, as it may still be uploaded; or use another revision.",
        )
    if lacking:
        raise _adapter(repository) or BadCheckpoint(
            f"{repository.id} has no {lacking[0]}: its weights are not safetensors.",
            fix="Use a repository that has them; pickles run code when they are loaded.",
        )
    return [files[name] for name in names]


def _adapter(repository: Repository) -> BadCheckpoint | None:
    """The error for one that has no model, but what changes one."""
    if _ADAPTER not in repository.files:
        return None
    return BadCheckpoint(
        f"{repository.id} is an adapter, which changes another model: adapters are not served.",
        fix="Use a repository with the model that it was merged into.",
    )


def has_safetensors(repository: Repository) -> bool:
    """Whether its weights are there as safetensors."""
    return bool({INDEX, SINGLE} & repository.files.keys())


def headers_directory(repository: Repository, cache_dir: Path) -> Path:
    """Where what is kept for plans of a repository lies, in the form of a snapshot of the hub."""
    return cache_dir / "hub-headers" / cache_folder(repository.id) / "snapshots" / repository.sha


async def fetch_headers(hub: Hub, repository: Repository, cache_dir: Path) -> Path:
    """A directory with config, index and the headers of the weights' files, and no weights.

    Enough for a manifest that is not hashed, and so for a plan. Its path is that of a snapshot of
    the hub, which tells the model's name; a commit never changes, so it is kept. Raises as
    `read_small` and `weights_files`, DiskFull, and BadCheckpoint for what is no header.
    """
    directory = headers_directory(repository, cache_dir)
    if (directory / _CONFIG).exists():
        return directory
    small = await read_small(hub, repository, _FOR_PLANS)
    sparse = await safetensors_headers(hub, repository, weights_files(repository, small))
    await asyncio.to_thread(create_sparse, directory, sparse, small, _CONFIG)
    return directory


async def safetensors_headers(
    hub: Hub, repository: Repository, files: Sequence[HubFile]
) -> dict[str, SparseFile]:
    """Each of these files without its tensors. Raises BadCheckpoint, and what the hub raises."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def header(file: HubFile) -> SparseFile:
        async with room:
            return await _header(hub, repository, file)

    headers = await asyncio.gather(*map(header, files))
    return {file.rfilename: head for file, head in zip(files, headers, strict=True)}


async def _header(hub: Hub, repository: Repository, file: HubFile) -> SparseFile:
    name, size = file.rfilename, file.length
    length = await hub.read(repository, name, 0, min(8, size))
    end = 8 + int.from_bytes(length, "little")
    if end > min(size, 8 + MAX_HEADER_BYTES):
        raise BadCheckpoint(
            f"{name} of {repository.id} does not begin as a safetensors file does.",
            fix="Use another repository.",
        )
    return SparseFile(length + await hub.read(repository, name, 8, end), size)


def write_small(directory: Path, small: dict[str, bytes]) -> None:
    """Put them there, safely on the disk. Blocks. Raises DiskFull."""
    try:
        for name, content in small.items():
            (directory / name).parent.mkdir(exist_ok=True)
            with (directory / name).open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
    except OSError as error:
        raise refused_by_disk(directory, error) from error


def become_checkpoint(
    staging: Path, directory: Path, record: PartialRecord, complete: Collection[str]
) -> None:
    """Make a directory of files a partial checkpoint, of which these tensors are there, in its
    place. Blocks. Raises DiskFull, and BadCheckpoint where something else is in that."""
    write_small(staging, {JOURNAL: journal_of(record.tensors, complete)})
    write_small(staging, {RECORD: json.dumps(asdict(record)).encode()})
    try:
        take_place(staging, directory)
    except OSError as error:
        raise refused_by_disk(directory, error) from error


def note_read(directory: Path, record: PartialRecord) -> None:
    """Have the checkpoint that is there say that this machine has read it, where that is all that
    its record lacks. Blocks."""
    if read_record(directory) == replace(record, is_read=False):
        write_json_atomically(directory / RECORD, asdict(record))


def _parsed(name: str, content: bytes, form: type[T]) -> T:
    try:
        return codec.convert(codec.parse_json(content), form)
    except Fault as fault:
        raise BadCheckpoint(f"{name} is unusable: {fault.why}.", fix="Use another.") from fault
