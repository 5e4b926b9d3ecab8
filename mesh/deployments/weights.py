"""Where a deployment's weights come from: a checkpoint on this disk, found by its name and hash.

`WeightsSource` is all that the rest needs to know; `LocalWeights` looks on this machine only, where
checkpoints lie anyway: what is held already, a directory that is named, the folders of models, the
hub's cache. Reading a manifest blocks (the first time by every byte), so that happens in threads.
"""

from __future__ import annotations

import asyncio
import errno
import glob
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mesh.errors import BadCheckpoint, MeshError, ModelNotFound
from mesh.models.builtin import checkpoint_dir
from mesh.models.gguf.container import SUFFIX
from mesh.models.hashing import are_known, read_cached
from mesh.models.hub_cache import cache_folder, checkpoint_name, plain_name, split_name
from mesh.models.local import BUILTIN, LocalModel
from mesh.models.manifest import Manifest, looks_like_checkpoint, read_manifest
from mesh.paths import expanded
from mesh.private_files import write_private
from mesh.types import LayerRange, ModelId

logger = logging.getLogger(__name__)

_PATHS = ("/", "~", "./", "../")
"""How a path begins that can be no name."""
_MAX_NAMED = 256

OnProgress = Callable[[int, int, float, str], None]
"""Is told the bytes that are here, how many there will be, how many come in a second, and what is
waited for where none do."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that can be deployed; its `weights_sha256` is '' until somebody has read it."""

    model_id: ModelId
    weights_sha256: str
    total_layers: int
    layers_mb: int
    """All layers as they are stored."""


class WeightsSource(Protocol):
    """Finds checkpoints and brings what is needed of them to this machine."""

    async def find(self, model: str) -> Checkpoint:
        """What somebody means by a name or a directory, without fetching weights. Raises
        ModelNotFound, BadCheckpoint, and UnsupportedFamily."""

    async def read(
        self, model: str, layers: Sequence[LayerRange], on_progress: OnProgress
    ) -> Checkpoint:
        """The same with its hash, for which all of it is read where nobody knows it, and these
        layers kept at least. Raises MeshError; `on_progress` never lies."""

    async def ensure(
        self,
        model_id: ModelId,
        weights_sha256: str,
        layers: Sequence[LayerRange],
        on_progress: OnProgress,
        *,
        runs_ends: bool,
    ) -> Path:
        """The directory that has config, tokenizer and these layers of a checkpoint, fetched first
        where that is possible; and its ends, unless this node leaves them to others.

        `runs_ends`: it holds the first or the last layers, and so runs the ends for who does that.
        Raises MeshError; `on_progress` never lies.
        """


_NO_PLACES = {errno.ENAMETOOLONG, errno.EACCES}
"""What is answered to names that no file can have, and of places that this user may not see."""


class LocalWeights:
    """What lies on this machine's disks, for a `WeightsSource`."""

    def __init__(
        self,
        held: Mapping[ModelId, LocalModel],
        folders: Sequence[Path],
        cache_dir: Path | None,
        named: Path | None = None,
    ) -> None:
        """`folders` hold checkpoint directories and GGUF files, each called like its model, with
        ``/`` as ``--``; or are the hub's cache. What lies elsewhere and was named by its path is
        remembered in the file `named`."""
        self._named_file = named
        self._named: dict[str, str] | None = None
        self._is_kept = True
        """Whether the file says so by now."""
        self._held = held
        self._folders = tuple(folders)
        self._cache_dir = cache_dir

    async def find(self, model: str) -> Checkpoint:
        return checkpoint(await self.manifest(model))

    async def manifest(self, model: str) -> Manifest:
        """Of the checkpoint that `find` finds. Raises as that."""
        held = self._held.get(ModelId(model))
        if held is None:
            return await asyncio.to_thread(self._manifest, model)
        return await asyncio.to_thread(self._read, Path(held.directory), held.model_id)

    async def ensure(
        self,
        model_id: ModelId,
        weights_sha256: str,
        layers: Sequence[LayerRange],
        on_progress: OnProgress,
    ) -> Path:
        """See `WeightsSource`; the whole checkpoint is here, or at least its files are."""
        held = self._held.get(model_id)
        if held is not None and held.weights_sha256 == weights_sha256:
            return Path(held.directory)
        return await asyncio.to_thread(self._locate, model_id, weights_sha256, on_progress)

    async def kept(self, model_id: ModelId, weights_sha256: str) -> Path | None:
        """Where a checkpoint of this hash lies, as far as that is known without reading all of it;
        None for what was fetched, which the fetcher knows by itself."""
        return await asyncio.to_thread(self._kept, model_id, weights_sha256)

    # Private: these block.

    def _kept(self, model_id: ModelId, weights_sha256: str) -> Path | None:
        if self._cache_dir is None or model_id == BUILTIN:
            return None
        for directory in self._candidates(model_id):
            try:
                headers = read_manifest(directory, model_id=model_id, is_hashed=False)
                if not are_known(headers.tensors, self._cache_dir):
                    continue
                if self._read(directory, model_id).weights_sha256 == weights_sha256:
                    return directory
            except (MeshError, OSError) as error:
                logger.info("%s is not offered: %s", directory, error)
        return None

    def _manifest(self, model: str) -> Manifest:
        if "\0" in model:  # which no path has
            raise self._missing(model)
        try:
            return self._meant(model)
        except OSError as error:
            if error.errno not in _NO_PLACES:
                raise
            said = f"{model.partition('=')[0][:80]!r} cannot be looked for: {error.strerror}."
            raise ModelNotFound(said, fix="Check the name or path.", param="model") from error

    def _meant(self, model: str) -> Manifest:
        path, _, name = model.partition("=")
        directory = expanded(path)
        if looks_like_checkpoint(directory):
            model_id = ModelId(name) if name else checkpoint_name(directory)
            manifest = self._read(directory, model_id)
            self._remember(model_id, directory.absolute())
            return manifest
        model_id = ModelId(plain_name(model))
        for found in self._candidates(model_id):
            return self._read(found, model_id)
        if path.startswith(_PATHS):
            if not directory.exists():
                raise ModelNotFound(f"{path} is not there.", fix="Check the path.", param="model")
            return self._read(directory, checkpoint_name(directory))  # which says what is wrong
        raise self._missing(model)

    def _locate(self, model_id: ModelId, weights_sha256: str, on_progress: OnProgress) -> Path:
        others: list[str] = []
        for directory in self._candidates(model_id):
            try:
                manifest = self._read(directory, model_id)
            except MeshError as error:
                others.append(f"{directory}: {error.message}")
                continue
            if manifest.weights_sha256 == weights_sha256:
                size = sum(entry.nbytes for entry in manifest.tensors.values())
                on_progress(size, size, 0.0, "")
                return directory
            others.append(f"{directory} has other weights")
        raise self._missing(model_id, others)

    def _candidates(self, model_id: ModelId) -> Iterator[Path]:
        if model_id == BUILTIN:
            yield checkpoint_dir()
        named = Path(self._paths().get(model_id, ""))
        yield from _there([named] if named.is_absolute() else [])
        for folder in self._folders:
            yield from _there(_places(folder, model_id))

    def _remember(self, model_id: ModelId, path: Path) -> None:
        """So that it is found when the deployment is brought up, also after a restart."""
        known = self._paths()
        if known.get(model_id) == str(path) and self._is_kept:
            return
        others = [(name, each) for name, each in known.items() if name != model_id]
        self._named = dict([*others, (str(model_id), str(path))][-_MAX_NAMED:])
        if self._named_file is None:
            return
        try:
            write_private(self._named_file, json.dumps(self._named).encode())
            self._is_kept = True
        except OSError as error:
            self._is_kept = False
            logger.warning("after a restart %s is to be named by its path again: %s", path, error)

    def _paths(self) -> dict[str, str]:
        """What was named, by model."""
        if self._named is None:
            file = self._named_file
            self._named = (read_cached(file, dict[str, str]) if file is not None else None) or {}
        return self._named

    def _read(self, directory: Path, model_id: ModelId) -> Manifest:
        return read_manifest(directory, model_id=model_id, cache_dir=self._cache_dir)

    def _missing(self, model: str, others: Sequence[str] = ()) -> ModelNotFound | BadCheckpoint:
        looked = ", ".join(map(str, self._folders)) or "nowhere"
        seen = f" ({'; '.join(others)})" if others else ""
        return ModelNotFound(
            f"the files of {model[:200]!r} are not on this machine{seen}; looked in {looked}.",
            fix="Name one that `hearthnet list` shows, one of the hub as ORG/NAME, or a directory "
            "with a checkpoint.",
            param="model",
        )


def _there(places: Iterable[Path]) -> Iterator[Path]:
    """Those of these places where there is something, as far as they can be looked at: not by a
    name that no file can have, where this user may not see, or on a disk that fails."""
    try:
        for place in places:
            if looks_like_checkpoint(place):
                yield place
    except OSError as error:
        logger.info("not all is looked at: %s", error)


def _places(folder: Path, model_id: ModelId) -> Iterator[Path]:
    """Where in a folder a model may lie."""
    plain = str(model_id).replace("/", "--")
    yield folder / plain
    yield folder / f"{plain}{SUFFIX}"
    repository, file = split_name(model_id)
    for snapshot in _snapshots(folder / cache_folder(repository)):
        yield from _files(snapshot, file)


def _snapshots(repository: Path) -> list[Path]:
    """What the hub's cache has of one, its main revision first: other programs take that."""
    try:
        main = (repository / "refs" / "main").read_text(errors="replace").strip()
    except OSError:
        main = ""
    return sorted((repository / "snapshots").glob("*"), key=lambda each: each.name != main)


def _files(snapshot: Path, file: str) -> list[Path]:
    """Where this file of a snapshot may lie, or the snapshot."""
    return [snapshot / file, *snapshot.glob(f"*/{glob.escape(file)}")] if file else [snapshot]


def checkpoint(manifest: Manifest) -> Checkpoint:
    """What there is to know of a checkpoint before it is deployed."""
    return Checkpoint(
        manifest.model_id,
        manifest.weights_sha256,
        manifest.total_layers,
        sum(manifest.layer_bytes) >> 20,
    )


def local_model(
    directory: Path, model_id: ModelId, weights_sha256: str, cache_dir: Path | None
) -> LocalModel:
    """A checkpoint that is here now, as a model to ask; blocks. Raises BadCheckpoint."""
    manifest = read_manifest(directory, model_id=model_id, cache_dir=cache_dir)
    if manifest.weights_sha256 != weights_sha256:
        raise BadCheckpoint(
            f"{directory} has other weights than {model_id} was deployed with.",
            fix="Deploy it again, or put the weights back.",
        )
    return LocalModel.of(manifest, directory)
