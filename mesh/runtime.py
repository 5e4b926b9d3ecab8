"""What a running daemon leaves in its state directory: a lock, and a file by which others find it.

The file names the process and its API. One whose process is gone counts as absent: process ids are
reused, so the process' start time is compared as well. Knows nothing of what the daemon does.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from mesh import codec
from mesh.codec import Fault
from mesh.errors import AlreadyRunning, FileRefused, NotRunning
from mesh.paths import StatePaths
from mesh.private_files import write_private

# psutil derives the start time from clock ticks; two readings differ by rounding only.
_START_TOLERANCE_S = 1.0

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class DaemonRecord:
    """A running daemon: its process and where it answers.

    `create_time` is when the process started: in seconds since the `boot` of that id where the
    system names its boots, so that a clock that is set changes nothing; else by the wall clock.

    `api_key` is its owner's, with every scope; `keyless`: without a key, callers on this machine
    may chat. `drain_s`: how long running answers get when it is stopped. `certificate` is that of
    its API in PEM where it speaks TLS, `certificate_file` where it lies, `public_url` where other
    machines reach the API; empty where they do not. `log` is the file of ours that it prints to,
    if it does. `holds_none`: it was told to hold no layers.
    """

    pid: int
    create_time: float
    api_url: str
    api_port: int
    port: int
    api_key: str | None = None
    keyless: bool = True
    drain_s: float = 0.0
    certificate: str | None = None
    certificate_file: str = ""
    public_url: str = ""
    boot: str = ""
    log: str = ""
    holds_none: bool = False

    @classmethod
    def for_this_process(
        cls, *, api_url: str, api_port: int, port: int, api_key: str | None, **more: Any
    ) -> DaemonRecord:
        """The record of the calling process; `more` are the fields that have defaults."""
        process, boot = psutil.Process(), _boot_id()
        started = _started(process, boot)
        return cls(process.pid, started, api_url, api_port, port, api_key, boot=boot, **more)

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs."""
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            if self.boot and self.boot != _boot_id():
                return False
            return abs(_started(process, self.boot) - self.create_time) < _START_TOLERANCE_S
        except psutil.NoSuchProcess:
            return False

    def renewed(self) -> str | None:
        """What its API's certificate is by now, as far as its file tells. Blocks."""
        try:
            return first_certificate(Path(self.certificate_file).read_text("ascii"))
        except (OSError, ValueError):
            return None

    def write(self, file: Path) -> None:
        """Put the record in place in one step, readable by its owner only. Raises OSError."""
        write_private(file, json.dumps(asdict(self), indent=1).encode())


def first_certificate(chain: str) -> str:
    """A server's own certificate: in PEM, those that vouch for it may follow. Raises ValueError."""
    end = "-----END CERTIFICATE-----"
    _, mark, rest = chain.partition("-----BEGIN CERTIFICATE-----")
    if not mark or end not in rest:
        raise ValueError("there is no certificate in it")
    return mark + rest.partition(end)[0] + end


def read_daemon(file: Path) -> DaemonRecord | None:
    """The daemon that runs now; None when there is none or the file is not readable as one."""
    try:
        record = codec.read_file(file, DaemonRecord)
    except (OSError, Fault):
        return None
    return record if record.is_alive else None


def required_daemon(paths: StatePaths, fix: str) -> DaemonRecord:
    """The daemon that runs now. Raises NotRunning, with what is to be done then; FileRefused where
    this user may not see whether there is one."""
    record = read_daemon(paths.runtime_file)
    if record is not None:
        return record
    try:
        paths.runtime_file.open("rb").close()
    except PermissionError:
        raise FileRefused(
            f"Whether a daemon runs with {paths.root} is not for this user to see.",
            fix="See whose the directory is: what `sudo` made belongs to root, and a daemon that"
            " was started with it is stopped with it.",
        ) from None
    except OSError:
        pass
    raise NotRunning(f"No hearthnet daemon runs with the state directory {paths.root}.", fix=fix)


@contextmanager
def sole_use(paths: StatePaths) -> Iterator[None]:
    """The state directory for this process alone: two with one key and one log would fork the log.

    Raises AlreadyRunning when another process has it. Ends with the process, however that ends.
    """
    with _locked(paths.lock, paths):
        yield


@contextmanager
def sole_start(paths: StatePaths) -> Iterator[None]:
    """To start a daemon there for this command alone: of two, each would show what the other's
    logs. Raises AlreadyRunning, also when one runs."""
    with _locked(paths.start_lock, paths):
        with sole_use(paths):
            pass
        yield


@contextmanager
def _locked(file: Path, paths: StatePaths) -> Iterator[None]:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise _in_use(paths) from None
        yield
    finally:
        os.close(descriptor)


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _started(process: psutil.Process, boot: str) -> float:
    # Linux counts from the boot; psutil adds when that was, which moves as the wall clock is set.
    created = float(process.create_time())
    return created - float(psutil.boot_time()) if boot else created


def _in_use(paths: StatePaths) -> AlreadyRunning:
    other = read_daemon(paths.runtime_file)
    if other is None:
        return AlreadyRunning(
            f"another hearthnet process is just starting, joining or stopping on {paths.root}.",
            fix="Try again in a moment, or give this one its own --state-dir.",
        )
    return AlreadyRunning(
        f"a daemon already runs on {paths.root} (process {other.pid}).",
        fix="Use it, stop it with `hearthnet down`, or give this one its own --state-dir.",
    )
