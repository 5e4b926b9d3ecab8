"""Identity of weights: hashes over a checkpoint's tensors, and the file that remembers them.

`weights_sha256` depends on tensor names, dtypes, shapes and bytes only, not on how the tensors are
spread over files, so that a node holding only some of them can prove each one it holds. Its input
is one line per tensor, in ascending order of the name's code points::

    ["<name>","<dtype>",[<shape>],"<hex sha256 of the bytes>"]\\n

each a JSON array without spaces, all but ASCII escaped. JSON's quoting leaves no ambiguity.
This module knows nothing of layers or torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mesh import codec
from mesh.codec import Fault, Sha256
from mesh.errors import BadCheckpoint, WeightsDamaged
from mesh.models.header import TensorEntry

_BUFFER_BYTES = 1024 * 1024
_CACHE_VERSION = 2
_LONG_BYTES = 1 << 30
"""So many take seconds, or minutes on a slow disk: it is said."""

_MAX_CACHED_BYTES = 64 << 20
"""Half a million tensors."""
_TOLD_EVERY_S = 5.0
_REST_S = 0.2

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Digests:
    version: int
    file: list[str | int]
    tensors: dict[str, Sha256]


def weights_sha256(entries: Iterable[TensorEntry]) -> str:
    """The hash of a checkpoint whose tensors have all been hashed, in hex."""
    total = hashlib.sha256()
    for entry in sorted(entries, key=lambda entry: entry.name):
        fields = [entry.name, entry.dtype, list(entry.shape), entry.sha256]
        total.update(json.dumps(fields, separators=(",", ":")).encode("ascii") + b"\n")
    return total.hexdigest()


def hash_tensors(
    tensors: Mapping[str, TensorEntry], *, cache_dir: Path | None
) -> tuple[dict[str, TensorEntry], int]:
    """The same entries with their `sha256` filled in, and how many bytes were hashed for it.

    With a `cache_dir`, the digests of each file are kept there as soon as it is done, and are used
    again while its path, size, modification time and inode stay as they were. Raises BadCheckpoint
    if a file shrinks meanwhile.
    """
    names_by_file: dict[Path, list[str]] = {}
    for name, entry in tensors.items():
        names_by_file.setdefault(entry.file, []).append(name)
    fingerprints = {file: fingerprint(file) for file in sorted(names_by_file)}
    digests: dict[str, str] = {}
    left: dict[Path, list[str]] = {}
    for file, seen in fingerprints.items():
        names = names_by_file[file]
        known = _recall(cache_dir, seen) if cache_dir else None
        if known is not None and known.keys() == set(names):
            digests |= known
        else:
            left[file] = names
    hashed = sum(tensors[name].nbytes for names in left.values() for name in names)
    if hashed >= _LONG_BYTES:
        where = next(iter(left)).parent
        logger.info("hashing %.1f GB of %s, once; this takes a while", hashed / 1e9, where)
    # sha256 releases the GIL: a few threads hash on as many cores.
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="hash") as pool:
        done, told_at = 0, time.monotonic()
        for file, names in left.items():
            fresh = {}
            for name, digest in zip(names, pool.map(_digest, map(tensors.get, names)), strict=True):
                fresh[name] = digest
                done += tensors[name].nbytes
                if time.monotonic() - told_at >= _TOLD_EVERY_S:
                    logger.info("hashed %.1f of %.1f GB", done / 1e9, hashed / 1e9)
                    told_at = time.monotonic()
            if cache_dir:
                _remember(cache_dir, fingerprints[file], fresh)
            digests |= fresh
    return {name: replace(entry, sha256=digests[name]) for name, entry in tensors.items()}, hashed


def are_known(tensors: Mapping[str, TensorEntry], cache_dir: Path) -> bool:
    """Whether `hash_tensors` would read none of them. Raises OSError."""
    names_by_file: dict[Path, set[str]] = {}
    for name, entry in tensors.items():
        names_by_file.setdefault(entry.file, set()).add(name)
    known = ((_recall(cache_dir, fingerprint(f)), names) for f, names in names_by_file.items())
    return all(digests is not None and digests.keys() == names for digests, names in known)


def has_changed(entry: TensorEntry, share: float = 1.0) -> bool:
    """Whether the bytes of a hashed tensor are others by now, or its disk gives none of them.

    Blocks; with so small a `share` of the time, of a core's as of the disk's. Raises OSError where
    its file cannot be read for another reason.
    """
    try:
        return _digest(entry, share) != entry.sha256
    except BadCheckpoint:
        return True
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return True


def require_unchanged(entries: Iterable[TensorEntry]) -> None:
    """Raise WeightsDamaged where one of these `has_changed`. Blocks: reads all of them."""
    for entry in entries:
        if has_changed(entry):
            raise damaged(entry)


def damaged(entry: TensorEntry) -> WeightsDamaged:
    """What is said of one that has changed."""
    return WeightsDamaged(
        f"{entry.name} in {entry.file} is not what it was: the disk or another program has changed"
        " it.",
        fix="What hearthnet has fetched it fetches again by itself, from whoever has it; copy or"
        " download other files again. Test the disk if this repeats.",
    )


def fingerprint(file: Path) -> list[Any]:
    """What is another as soon as the file is: JSON-able. Raises OSError."""
    status = file.stat()
    return [os.path.realpath(file), status.st_size, status.st_mtime_ns, status.st_ino]


def write_json_atomically(target: Path, content: Any) -> None:
    """Replace `target` by `content` as JSON; readers see the old or the new file, never a part.

    For caches: one that cannot be written is logged, and costs the next start its time.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".part")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(content, stream)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be kept, and is computed again next time: %s", target, error)


def read_cached(source: Path, form: type[T], max_bytes: int = _MAX_CACHED_BYTES) -> T | None:
    """What was kept in `source`; None when nothing was, or it is damaged or another version's."""
    try:
        return codec.read_file(source, form, max_bytes)
    except FileNotFoundError:
        return None
    except (OSError, Fault) as error:
        logger.info("%s is of no use, and is computed again: %s", source, error)
        return None


def _digest(entry: TensorEntry, share: float = 1.0) -> str:
    digest, rest = hashlib.sha256(), _Rest(share)
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, max(entry.nbytes, 1))))
    remaining = entry.nbytes
    with entry.file.open("rb", buffering=0) as stream:
        stream.seek(entry.offset)
        while remaining:
            count = stream.readinto(buffer[: min(len(buffer), remaining)])
            if not count:
                raise BadCheckpoint(
                    f"{entry.file} ended {remaining} bytes early, in tensor {entry.name}.",
                    fix="Leave the checkpoint alone while it is read, then start again.",
                )
            digest.update(buffer[:count])
            remaining -= count
            rest.take(is_last=not remaining)
    return digest.hexdigest()


class _Rest:
    """As long as leaves what was done since its beginning that share of the time."""

    def __init__(self, share: float) -> None:
        self._times = 1 / share - 1
        self._began, self._owed_s = time.perf_counter(), 0.0

    def take(self, *, is_last: bool) -> None:
        """Rest, unless that can be put off: waking up often costs more."""
        now = time.perf_counter()
        self._owed_s += (now - self._began) * self._times
        if self._owed_s and (is_last or self._owed_s >= _REST_S):
            time.sleep(self._owed_s)
            now, self._owed_s = time.perf_counter(), 0.0
        self._began = now


def _cache_file(cache_dir: Path, fingerprint: list[Any]) -> Path:
    path = os.fsencode(fingerprint[0])
    return cache_dir / f"weights-{hashlib.sha256(path).hexdigest()[:32]}.json"


def _recall(cache_dir: Path, fingerprint: list[Any]) -> dict[str, str] | None:
    kept = read_cached(_cache_file(cache_dir, fingerprint), _Digests)
    if kept is None or (kept.version, kept.file) != (_CACHE_VERSION, fingerprint):
        return None
    return kept.tensors


def _remember(cache_dir: Path, fingerprint: list[Any], digests: dict[str, str]) -> None:
    content = {"version": _CACHE_VERSION, "file": fingerprint, "tensors": digests}
    write_json_atomically(_cache_file(cache_dir, fingerprint), content)
