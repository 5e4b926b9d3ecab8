"""A GGUF file of the hub, fetched whole: its head is not proven by its tensors' hashes (see
docs/decisions/gguf-is-copied.md), so this machine alone has it then.

It is put where all programs that use the hub keep files, by their SHA-256, and is a model of this
machine from then on, as if they had fetched it.
"""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import suppress
from pathlib import Path

from mesh.errors import BadRequest, ModelNotFound
from mesh.models.gguf.container import SUFFIX
from mesh.models.gguf.contents import is_projector, model_name
from mesh.models.partial_draft import refused_by_disk
from mesh.models.partial_writer import lock_directory
from mesh.transfers.hub import Hub, HubFile, Repository
from mesh.transfers.hub_download import HubDownload, make_directory
from mesh.transfers.hub_files import has_safetensors

_NAMED = re.compile(rf"(?P<repository>[^/]+/[^/]+)/(?P<file>[^/]+{re.escape(SUFFIX)})")


def split_name(model: str) -> tuple[str, str]:
    """Repository and file of ``ORG/NAME/FILE.gguf``; the file is '' where none is named."""
    named = _NAMED.fullmatch(model)
    return (named["repository"], named["file"]) if named else (model, "")


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
    folder = cache / f"models--{repository.id.replace('/', '--')}"
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


def _link(file: Path, sha256: str) -> None:
    try:
        with suppress(FileExistsError):
            file.symlink_to(Path("..", "..", "blobs", sha256))
    except OSError as error:
        raise refused_by_disk(file.parent, error) from error


def _listed(models: dict[str, list[HubFile]]) -> str:
    names = [files[0].rfilename for files in models.values()]
    return ", ".join(names[:24]) or "no GGUF file"
