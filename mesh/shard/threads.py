"""How many threads a node's processes compute with: measured once per machine, then kept.

What was measured while others wanted the cores holds for an hour: for the processes that start
with this one, and not for good.

Torch splits a sum by threads, so their number decides the last bits of a result. One number holds
for all checkpoints: a process computes all that it serves with one, and what is measured depends on
none of them. Knows nothing of models or processes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from msgspec import Meta

from mesh.codec import MAX_FILE_BYTES
from mesh.models.hashing import read_cached
from mesh.private_files import write_once, write_private
from mesh.processes.processor import cpu_model
from mesh.shard.device import Choice, choose_threads, usable_cores

logger = logging.getLogger(__name__)

PASSING_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Kept:
    machine: str
    threads: Annotated[int, Meta(ge=1, le=4096)]
    is_passing: bool = False


@dataclass(frozen=True, slots=True)
class Processor:
    """What a measured number of threads holds for: the processor and how much of it is ours."""

    cpu: str
    cores: int

    def named(self) -> str:
        """As it is written down."""
        capability = torch.backends.cpu.get_cpu_capability()
        return f"{platform.machine()}/{self.cpu}/{capability}/{self.cores} cores"


Choose = Callable[[int, torch.device, int], Choice[int]]
"""As `choose_threads`, of so many cores."""


def kept_threads(
    requested: int,
    device: torch.device,
    directory: Path | None,
    *,
    processor: Processor | None = None,
    choose: Choose = choose_threads,
) -> Choice[int]:
    """As `choose_threads`, but what `directory` holds for this machine counts, and is kept there.

    Of processes that measure at the same time, the first one's number holds for all. Without a
    directory, or one that cannot be written, it is measured at every call. `processor` is this one
    unless given.
    """
    processor = processor or Processor(cpu_model(), usable_cores())
    if requested > 0 or device.type != "cpu" or directory is None or processor.cores == 1:
        return choose(requested, device, processor.cores)
    said = processor.named()
    path = directory / f"{hashlib.sha256(said.encode()).hexdigest()[:16]}.json"
    found = _read(path, said)
    if found is None:
        measured = choose(0, device, processor.cores)
        try:
            found = _keep(path, said, measured)
        except OSError as error:
            logger.warning("the number of threads is not kept in %s: %s", path, error)
            return measured
        if found == measured.value:
            return Choice(found, f"{measured.reason}; kept in {path}")
    return Choice(found, f"threads {found}: as kept in {path}")


def _read(path: Path, machine: str) -> int | None:
    kept = read_cached(path, _Kept, MAX_FILE_BYTES)
    if kept is None or kept.machine != machine or (kept.is_passing and _has_passed(path)):
        return None
    return kept.threads


def _has_passed(path: Path) -> bool:
    try:
        return abs(time.time() - path.stat().st_mtime) > PASSING_S
    except OSError:
        return True


def _keep(path: Path, machine: str, measured: Choice[int]) -> int:
    """Write it unless another process has; returns what is there then. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    said = {"machine": machine, "threads": measured.value}
    if measured.is_passing:
        said["is_passing"] = True
    data = f"{json.dumps(said)}\n".encode()
    if not write_once(path, data):
        if (found := _read(path, machine)) is not None:
            return found
        write_private(path, data)
    return measured.value
