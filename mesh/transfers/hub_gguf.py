"""A GGUF file of the hub, fetched whole: its head is not proven by its tensors' hashes (see
docs/decisions/gguf-is-copied.md), so this machine alone has it then.

It is put where all programs that use the hub keep files, by their SHA-256, and is a model of this
machine from then on, as if they had fetched it.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

from mesh.errors import BadRequest, ModelNotFound
from mesh.models.gguf.container import SUFFIX, header_of_beginning
from mesh.models.gguf.contents import is_projector, model_name
from mesh.models.gguf.rotary import SIDE_TENSORS
from mesh.models.hub_cache import cache_folder
from mesh.models.partial_draft import SparseFile, create_sparse, refused_by_disk
from mesh.models.partial_writer import lock_directory
from mesh.transfers.hub import Hub, HubFile, Repository
from mesh.transfers.hub_download import HubDownload, make_directory
from mesh.transfers.hub_files import has_safetensors, headers_directory

_FIRST_BYTES = 1 << 20
"""Of a file's beginning at first: it has a vocabulary in it, of a few MB for most."""
_MAX_SETTING_BYTES = 1 << 20


def gguf_files(repository: Repository, wanted: str) -> list[HubFile]:
    """The files of the GGUF model that is meant: that of which `wanted` is a file, or the only one
    of a repository without safetensors; none where it has those, or no GGUF file.

    Raises ModelNotFound for a file that is not there, BadRequest where there are several models.
    """
    models: dict[str, list[HubFile]] = {}
    for name, file in sorted(repository.files.items()):
        if name.endswith(SUFFIX) and "/" not in name and not is_projector(name) and file.lfs:
            models.setdefault(model_name(Path(name)), []).append(file)
    if wanted:
        found = models.get(model_name(Path(wanted)), [])
        if wanted not in {file.rfilename for file in found}:
            raise ModelNotFound(
                f"{repository.id} has no {wanted}.", fix=f"It has {_listed(models)}.", param="model"
            )
        return found
    if has_safetensors(repository) or not models:
        return []
    if len(models) > 1:
        first = next(iter(models.values()))[0].rfilename
        raise BadRequest(
            f"{repository.id} has {len(models)} GGUF models: {_listed(models)}.",
            fix=f"Name one: `hearthnet pull {repository.id}/{first}`; Q8_0 is what int8 computes"
            " with as it is stored, Q4_0 what int4 does.",
            param="model",
        )
    return next(iter(models.values()))


async def fetch_gguf(
    hub: Hub, repository: Repository, files: list[HubFile], cache: Path, download: HubDownload
) -> Path:
    """The first of these files, once all are in the hub's `cache`.

    Raises as `HubDownload.fetch`, and Busy while another process of this user does it.
    """
    folder = cache / cache_folder(repository.id)
    blobs, snapshot = folder / "blobs", folder / "snapshots" / repository.sha
    for directory in (blobs, snapshot):
        await asyncio.to_thread(make_directory, directory)
    lock = await asyncio.to_thread(lock_directory, folder)
    try:
        named = {file.rfilename: file.lfs.sha256 for file in files if file.lfs is not None}
        await download.fetch({blobs / named[file.rfilename]: file for file in files})
        for name, sha256 in named.items():
            await asyncio.to_thread(_link, snapshot / name, sha256)
    finally:
        os.close(lock)
    return snapshot / files[0].rfilename


async def fetch_gguf_headers(
    hub: Hub, repository: Repository, files: list[HubFile], cache_dir: Path
) -> Path:
    """The first of these files as it looks without weights: its header, and tensors that are
    settings. Enough for a manifest that is not hashed, as `hub_files.fetch_headers`.

    Raises as that.
    """
    names = [file.rfilename for file in files]
    directory = headers_directory(repository, cache_dir) / model_name(Path(names[0]))
    if not (directory / names[0]).exists():
        heads = [await _head(hub, repository, file) for file in files]
        sparse = dict(zip(names, heads, strict=True))
        await asyncio.to_thread(create_sparse, directory, sparse, {}, names[0])
    return directory / names[0]


async def _head(hub: Hub, repository: Repository, file: HubFile) -> SparseFile:
    name, size = file.rfilename, file.length
    beginning, header = b"", None
    while header is None:
        stop = min(size, max(_FIRST_BYTES, 4 * len(beginning)))
        beginning += await hub.read(repository, name, len(beginning), stop)
        header = await asyncio.to_thread(header_of_beginning, Path(name), beginning, size)
    pieces = {
        each.offset: await hub.read(repository, name, each.offset, each.offset + each.nbytes)
        for each in header.tensors.values()
        if each.name in SIDE_TENSORS and each.nbytes <= _MAX_SETTING_BYTES
    }
    return SparseFile(beginning, size, pieces)


def _link(file: Path, sha256: str) -> None:
    try:
        with suppress(FileExistsError):
            file.symlink_to(Path("..", "..", "blobs", sha256))
    except OSError as error:
        raise refused_by_disk(file.parent, error) from error


def _listed(models: dict[str, list[HubFile]]) -> str:
    names = [files[0].rfilename for files in models.values()]
    return ", ".join(names[:24]) or "no GGUF file"
