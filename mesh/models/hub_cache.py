"""Names of the Hugging Face hub: repositories and their files, and where its cache has them.

A snapshot is ``models--<org>--<name>/snapshots/<commit>``, without ``<org>--`` for the oldest
models. Reads no file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mesh.models.gguf.container import SUFFIX
from mesh.models.gguf.contents import model_name
from mesh.types import ModelId

# The hub allows no "--" in a name.
_FOLDER = re.compile(r"models--(?:(?P<org>(?:(?!--).)+)--)?(?P<name>(?:(?!--).)+)")


_FILE_OF = re.compile(rf"(?P<repository>[^/]+/[^/]+)/(?:[^/]+/)*(?P<file>[^/]+{re.escape(SUFFIX)})")


def split_name(model: str) -> tuple[str, str]:
    """Repository and file of ``ORG/NAME/FILE.gguf``, in whatever folder of it that is said to lie;
    the file is '' where none is named."""
    named = _FILE_OF.fullmatch(model)
    return (named["repository"], named["file"]) if named else (model, "")


def plain_name(model: str) -> str:
    """The name without folders of the repository."""
    return "/".join(filter(None, split_name(model)))


def cache_folder(repository: str) -> str:
    """What the cache calls the folder of a repository."""
    return f"models--{repository.replace('/', '--')}"


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """The ``org/name`` of a repository, and the commit."""

    repo_id: str
    commit: str


def hub_snapshot(directory: Path) -> HubSnapshot | None:
    """Of which repository `directory` is a snapshot, links followed; None when of none."""
    real = directory.resolve()
    if real.parent.name != "snapshots":
        return None
    folder = _FOLDER.fullmatch(real.parent.parent.name)
    if folder is None:
        return None
    return HubSnapshot("/".join(filter(None, (folder["org"], folder["name"]))), real.name)


def checkpoint_name(directory: Path) -> ModelId:
    """What a checkpoint is called unless somebody says: by its repository, else by its folder; one
    that is a file by that."""
    if directory.suffix == SUFFIX:
        return ModelId(model_name(directory))
    snapshot = hub_snapshot(directory)
    return ModelId(directory.resolve().name if snapshot is None else snapshot.repo_id)
