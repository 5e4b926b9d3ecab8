"""How much memory this process can still take before something is killed or held up for it.

The machine's own word, and the limit of every control group that the process is in, from its own up
to the root (cgroup v1 and v2; containers and service managers set them). Reads small files of the
kernel's, so it blocks for a moment. Knows nothing of devices with memory of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

_SELF = Path("/proc/self")
_UNLIMITED = 1 << 60
"""cgroup v1 has no word for no limit, but a number that no machine reaches."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """`free_mb` can still be taken, `total_mb` could if nobody had anything; `bound` is what says
    so of the first, in words."""

    free_mb: int
    total_mb: int
    bound: str


def ram(process: Path = _SELF) -> Headroom:
    """Of main memory, for the process whose directory in /proc this is.

    What only caches files counts as free, as it is given back before anything is killed; not what
    is mapped, like weights that are used where they lie in their file.
    """
    machine = psutil.virtual_memory()
    found = [Headroom(machine.available >> 20, machine.total >> 20, "memory of this machine")]
    for directory, version in control_groups(process):
        group = _of_group(directory, version)
        if group is not None:
            found.append(group)
    # The machine may be nearly full where a group has room, and still the group is smaller.
    tightest = min(found, key=lambda each: each.free_mb)
    return replace(tightest, total_mb=min(each.total_mb for each in found))


def oom_kills(process: Path = _SELF) -> int | None:
    """How many processes the kernel has killed for lack of memory: in this process' control group
    and below it, or on the whole machine where that is not told. None where neither is."""
    for directory, version in control_groups(process):
        counts = _numbers(directory / ("memory.events" if version == 2 else "memory.oom_control"))
        if "oom_kill" in counts:
            return counts["oom_kill"]
    return _numbers(process.parent / "vmstat").get("oom_kill")


def control_groups(process: Path = _SELF) -> Iterator[tuple[Path, int]]:
    """The directories of the memory control groups of a process, its own first, with the version.

    None on systems without.
    """
    paths = _paths(process)
    for root, mount, version in _mounts(process):
        path = paths.get(version)
        if path is None:
            continue
        # In a container the mount may show only a part of the tree, and that as its root.
        inside = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
        directory = mount / inside
        while True:
            yield directory, version
            if directory == mount:
                break
            directory = directory.parent


def _paths(process: Path) -> dict[int, str]:
    """The process' path in the hierarchy of each version: ``0::PATH`` or ``4:memory:PATH``."""
    found = {}
    for line in _lines(process / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found[2] = path
        elif "memory" in controllers.split(","):
            found[1] = path
    return found


def _mounts(process: Path) -> Iterator[tuple[str, Path, int]]:
    """(what of the tree is its root, where it is, version) of each; see proc_pid_mountinfo(5)."""
    for line in _lines(process / "mountinfo"):
        mount, _, rest = line.partition(" - ")
        fields, kind = mount.split(" "), rest.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield fields[3], Path(fields[4]), 2
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield fields[3], Path(fields[4]), 1


def _of_group(directory: Path, version: int) -> Headroom | None:
    """What a group leaves; None when it sets no limit, or is none of memory."""
    # Above memory.high nothing is killed, but all that the group does is made to wait.
    limits, usage = (("memory.max", "memory.high"), "memory.current") if version == 2 else (
        ("memory.limit_in_bytes",), "memory.usage_in_bytes",
    )  # fmt: skip
    told = (_number(directory / name) for name in limits)
    limit = min((each for each in told if each is not None), default=_UNLIMITED)
    if limit >= _UNLIMITED:
        return None
    used = _number(directory / usage)
    if used is None:
        return None
    stat = _numbers(directory / "memory.stat")
    prefix = "" if version == 2 else "total_"
    cached = sum(stat.get(f"{prefix}{name}", 0) for name in ("active_file", "inactive_file"))
    mapped = stat.get("file_mapped" if version == 2 else "total_mapped_file", 0)
    free = limit - used + max(0, cached - mapped)
    return Headroom(max(0, free) >> 20, limit >> 20, f"the limit of control group {directory}")


def _number(file: Path) -> int | None:
    text = "".join(_lines(file))
    return int(text) if text.isdigit() else None


def _numbers(file: Path) -> Mapping[str, int]:
    pairs = (line.split() for line in _lines(file))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8", "replace").splitlines()
    except OSError:  # another system, another kernel, or the group is gone
        return []
