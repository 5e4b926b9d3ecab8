"""What all processes of a node may take of one memory together, and what they have taken of it.

A claim is a file that its process holds locked: a process that ends, however that is, gives back
what it claimed. Claims are added up and made in one turn, so that together they never exceed the
limit. Blocks for a moment; measures nothing, and knows no models.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mesh.errors import NotEnoughMemory
from mesh.processes.headroom import ram
from mesh.units import memory_limit_mb

SECTION = "research.distributed_inference.host"
_TURN = "turn"
_TURN_S = 5.0
_AGAIN_S = 0.002
_CARD = "cuda"


class TakenMemory:
    """So much of a memory is this process' until it is released."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def release(self) -> None:
        """Give it back; what was given back stays so."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)  # whoever adds up next removes the file, as nobody holds it


@dataclass(frozen=True, slots=True)
class CappedMemory:
    """Of one memory: what may be taken altogether, what is claimed, and by which setting."""

    limit_mb: int
    taken_mb: int
    setting: str

    @property
    def left_mb(self) -> int:
        """What may still be claimed."""
        return max(0, self.limit_mb - self.taken_mb)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """One memory's: `limit_mb` by what `setting` says, the claims in `directory`."""

    directory: Path
    limit_mb: int
    setting: str

    def take(self, mb: int) -> TakenMemory | None:
        """So much more for this process; None where it does not fit beside what others have.

        Raises NotEnoughMemory when it cannot be written down.
        """
        try:
            with self._turn():
                if self._taken_mb() + mb > self.limit_mb:
                    return None
                return self._written(mb)
        except OSError as error:
            raise NotEnoughMemory(
                f"what is taken of {self.setting} cannot be written to {self.directory}:"
                f" {error.strerror or error}.",
                fix="See to the disk of the state directory.",
            ) from error

    def standing(self) -> CappedMemory:
        """What is claimed now. Raises OSError, TimeoutError included."""
        with self._turn():
            return CappedMemory(self.limit_mb, self._taken_mb(), self.setting)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Nobody else claims or adds up meanwhile. Raises OSError."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.directory / _TURN, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            until = time.monotonic() + _TURN_S
            while not _locked(fd):
                if time.monotonic() > until:
                    raise TimeoutError("another process of this node does not let go of it")
                time.sleep(_AGAIN_S)
            yield
        finally:
            os.close(fd)

    def _taken_mb(self) -> int:
        taken = 0
        for file in self.directory.iterdir():
            if file.name == _TURN:
                continue
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _locked(fd):  # whose it was has released it, or is gone
                    file.unlink()
                else:
                    taken += int(os.read(fd, 32))
            finally:
                os.close(fd)
        return taken

    def _written(self, mb: int) -> TakenMemory:
        file = self.directory / f"{os.getpid()}-{uuid.uuid4().hex}"
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, str(mb).encode())
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                file.unlink()
            raise
        return TakenMemory(fd)


@dataclass(frozen=True, slots=True)
class MemoryCaps:
    """What a node may take of the machine's memory and of a card's, as the settings say it: empty
    where there is no limit. `directory` has the claims, a folder for each memory."""

    directory: Path
    main: str = ""
    card: str = ""

    def budget(self, device: str, total_mb: int) -> MemoryBudget | None:
        """Of the memory that is used there (``cpu``, ``cuda:0``, ``mps``), of which a card has
        `total_mb`; None where nothing limits it."""
        is_card = device.startswith(_CARD)
        text = self.card if is_card else self.main
        limit_mb = memory_limit_mb(text, total_mb if is_card else ram().total_mb)
        if limit_mb is None:
            return None
        folder = device.replace(":", "-") if is_card else "main"
        setting = f"{SECTION}.{'max_card_memory' if is_card else 'max_memory'}"
        return MemoryBudget(self.directory / folder, limit_mb, setting)


def over_cap(needs: str, cap: CappedMemory) -> NotEnoughMemory:
    """The refusal of what the owner of this machine has not given; `needs` says who needs what."""
    return NotEnoughMemory(
        f"{needs}; {cap.left_mb} MiB are left of the {cap.limit_mb} MiB that this node may give to"
        f" models and caches ({cap.setting}).",
        fix=f"Unload another model here, hold fewer layers, or raise {cap.setting}.",
    )


def _locked(fd: int) -> bool:
    """Whether nobody else held it; then this process does."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
