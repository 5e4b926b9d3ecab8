"""What a machine needs before any node runs on it: versions, a clock that is right, room on disks.

Looks, and makes nothing. Blocks for a moment.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import mesh
from mesh.errors import MeshError
from mesh.health.checkup.findings import Finding, failed, fine, note, wrong
from mesh.identity.keys import read_key, short_id
from mesh.models.disk_room import free_bytes
from mesh.paths import StatePaths
from mesh.units import data_size

_SHOWN = ("torch", "transformers", "nnsight")
_LITTLE_BYTES = 100_000_000
"""A log and what is kept of jobs need no more; below it they are about to fail."""
_FEW_BYTES = 2_000_000_000
"""Fewer, and hardly a model fits."""
_BACK_S = 120.0
"""A file may be dated by another machine's clock, such as a server's."""


def versions() -> Iterator[Finding]:
    """Whether Python and the packages are those that hearthnet is made for."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        told = metadata.metadata("hearthnet")
        wanted = [Requirement(text) for text in metadata.requires("hearthnet") or ()]
    except metadata.PackageNotFoundError:
        yield note(
            "versions",
            "hearthnet is run without being installed: which versions it needs is not known.",
        )
        return
    python, needed = platform.python_version(), told["Requires-Python"] or ""
    found = {"Python": python}
    if not SpecifierSet(needed).contains(python, prereleases=True):
        yield wrong(
            "versions", f"Python {python} runs, and {needed} is needed.",
            "Install hearthnet anew with that Python.",
        )  # fmt: skip
    for each in wanted:
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(each.name)
        except metadata.PackageNotFoundError:
            yield wrong("versions", f"{each.name} is not installed.", f"`pip install '{each}'`")
            continue
        if each.name in _SHOWN:
            found[each.name] = version
        if not each.specifier.contains(version, prereleases=True):
            said = f"{each.name} {version} is installed, and {each.specifier} is needed."
            yield wrong("versions", said, f"`pip install '{each}'`")
    said = ", ".join(f"{name} {version}" for name, version in found.items())
    yield fine("versions", f"hearthnet {mesh.__version__}, {said}")


def clock(now: datetime, paths: StatePaths) -> Iterator[Finding]:
    """Whether the wall clock can be right: it is not before what was written here."""
    dated = [(_written_at(path), path) for path in (Path(mesh.__file__), *_files(paths))]
    latest_s, path = max(dated, key=lambda each: each[0])
    behind_s = latest_s - now.timestamp()
    if behind_s > _BACK_S:
        then = datetime.fromtimestamp(latest_s, UTC)
        yield wrong(
            "clock",
            f"The clock says {now:%Y-%m-%d %H:%M}, but {path} was written at"
            f" {then:%Y-%m-%d %H:%M}: it is behind.",
            "Set it; `timedatectl set-ntp true` has Linux keep it right.",
        )
    else:
        yield fine("clock", f"{now:%Y-%m-%d %H:%M} UTC, after all that was written here")


def disks(paths: StatePaths, models: Path) -> Iterator[Finding]:
    """Whether what a node keeps and fetches has room, and may be written."""
    for what, directory in (("state", paths.root), ("models", models)):
        there = _nearest(directory)
        if not os.access(there, os.W_OK | os.X_OK):
            yield wrong(
                "disk", f"{there}, where the {what} would be kept, may not be written to.",
                "Name another: state_dir, models_dir.",
            )  # fmt: skip
            continue
        try:
            free = free_bytes(directory)
        except OSError as error:
            why = error.strerror or str(error)
            yield wrong("disk", f"{directory} cannot be read: {why}.", "Mount it, or name another.")
            continue
        said = f"{data_size(free)} free for the {what} in {directory}"
        if free < _LITTLE_BYTES:
            yield wrong("disk", f"Only {said}.", "Free some room, or name another directory.")
        elif what == "models" and free < _FEW_BYTES:
            yield note("disk", f"Only {said}: hardly a model fits.", "`hearthnet rm` frees room.")
        else:
            yield fine("disk", said)


def identity(paths: StatePaths) -> Iterator[Finding]:
    """Whether a node can start with the key that it has; one that has none makes one."""
    if not paths.identity_key.exists():
        return
    try:
        key = read_key(paths.identity_key)
    except MeshError as error:
        yield failed("identity", error)
    else:
        yield fine("identity", f"the key of node {short_id(key.node_id)} is there")


def _files(paths: StatePaths) -> Iterable[Path]:
    return (paths.hearth, paths.epoch, paths.events_dir, paths.identity_key, paths.daemon_log)


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _nearest(directory: Path) -> Path:
    """The directory, or the one above in which it would be made."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory
