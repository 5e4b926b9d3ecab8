"""Which files of a repository of the hub are a GGUF model, and what plans need to know of one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from mesh.errors import BadCheckpoint, BadRequest, ModelNotFound
from mesh.models.gguf.container import SUFFIX, header_of_beginning
from mesh.models.gguf.contents import is_projector, model_name, parts_of, settings_of
from mesh.models.partial_draft import SparseFile, create_sparse
from mesh.transfers.hub import Hub, HubFile, Repository
from mesh.transfers.hub_files import has_safetensors, headers_directory

_FIRST_BYTES = 1 << 20
"""Of a file's beginning at first: it has a vocabulary in it, of a few MB for most."""

_Models = dict[tuple[Path, str], list[HubFile]]
"""The files of each, by the folder that it lies in and its name."""


def gguf_files(repository: Repository, wanted: str) -> Sequence[HubFile]:
    """The files of the GGUF model that is meant: that of which `wanted` is a file, in whatever
    folder, or the only one of a repository without safetensors; none where it has those, or no GGUF
    file.

    Raises ModelNotFound for a file that is not there, BadRequest where there are several models,
    BadCheckpoint for one of which a part is missing.
    """
    models: _Models = {}
    for name, file in sorted(repository.files.items()):
        if name.endswith(SUFFIX) and not is_projector(file.name) and file.lfs:
            path = Path(name)
            models.setdefault((path.parent, model_name(path)), []).append(file)
    if wanted:
        return _all_of(repository, _called(repository, models, wanted))
    if has_safetensors(repository) or not models:
        return []
    if len(models) > 1:
        first = next(iter(models.values()))[0].rfilename
        raise BadRequest(
            f"{repository.id} has {len(models)} GGUF models: {_listed(models)}.",
            fix=f"Name one, as {repository.id}/{first}; Q8_0 is what int8 computes with as it is"
            " stored, Q4_0 what int4 does.",
            param="model",
        )
    return _all_of(repository, next(iter(models.values())))


def _called(repository: Repository, models: _Models, wanted: str) -> Sequence[HubFile]:
    found = [files for files in models.values() if wanted in {file.name for file in files}]
    if not found:
        raise ModelNotFound(
            f"{repository.id} has no {wanted}.", fix=f"It has {_listed(models)}.", param="model"
        )
    if len(found) > 1:
        folders = [Path(files[0].rfilename).parent.as_posix() for files in found]
        raise BadRequest(
            f"{repository.id} has a {wanted} in several folders: {', '.join(folders[:24])}.",
            fix=f"`hf download {repository.id} --include '{max(folders)}/*' --local-dir DIR`, then"
            " name the path of its first file.",
            param="model",
        )
    return found[0]


def _all_of(repository: Repository, found: Sequence[HubFile]) -> Sequence[HubFile]:
    """The files of a model. Raises BadCheckpoint unless all its parts are there."""
    parts = [Path(file.rfilename) for file in found]
    if lacking := sorted(path.name for path in {*parts_of(parts[0])} - {*parts}):
        raise BadCheckpoint(
            f"{repository.id} has no {lacking[0]}, which belongs to {parts[0]}.",
            fix="Try again later, as it may still be uploaded; or use another revision.",
        )
    return found


async def fetch_gguf_headers(
    hub: Hub, repository: Repository, files: Sequence[HubFile], cache_dir: Path
) -> Path:
    """The first of these files as it looks without weights: its header, and tensors that are
    settings. Enough for a manifest that is not hashed, as `hub_files.fetch_headers`.

    Raises as that.
    """
    names = [file.name for file in files]
    directory = headers_directory(repository, cache_dir) / model_name(Path(names[0]))
    if not (directory / names[0]).exists():
        sparse = await gguf_headers(hub, repository, files)
        await asyncio.to_thread(create_sparse, directory, sparse, {}, names[0])
    return directory / names[0]


async def gguf_headers(
    hub: Hub, repository: Repository, files: Sequence[HubFile]
) -> dict[str, SparseFile]:
    """Each of these files without its tensors, but for those that are settings. Raises
    BadCheckpoint, and what the hub raises."""
    return {file.name: await _header(hub, repository, file) for file in files}


async def _header(hub: Hub, repository: Repository, file: HubFile) -> SparseFile:
    name, size = file.rfilename, file.length
    beginning, header = b"", None
    while header is None:
        stop = min(size, max(_FIRST_BYTES, 4 * len(beginning)))
        beginning += await hub.read(repository, name, len(beginning), stop)
        header = await asyncio.to_thread(header_of_beginning, Path(name), beginning, size)
    pieces = {
        each.offset: await hub.read(repository, name, each.offset, each.offset + each.nbytes)
        for each in settings_of(header)
    }
    return SparseFile(beginning, size, pieces)


def _listed(models: _Models) -> str:
    names = [files[0].rfilename for files in models.values()]
    return ", ".join(names[:24]) or "no GGUF file"
