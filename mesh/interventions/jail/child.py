"""A forked job from first to last: wall in, run the entry point, leave a result.

Knows nothing of what the entry point does. Nothing here runs in the daemon.
"""

from __future__ import annotations

import importlib
import io
import mmap
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from mesh.interventions.jail import lockdown
from mesh.interventions.jail.limits import JobLimits, ToldError
from mesh.interventions.jail.result import MAX_TEXT_BYTES, read_payload, write_result

EntryPoint = Callable[[bytes, socket.socket], bytes]


@dataclass(frozen=True)
class Job:
    """What the zygote was asked to run, with the descriptors that came along."""

    entry: str
    limits: JobLimits
    payload_fd: int
    result_fd: int
    channel_fd: int
    log_fd: int


def resolve(entry: str) -> Callable[..., object]:
    """The function an entry point ``module:function`` names."""
    module, _, name = entry.partition(":")
    found: Callable[..., object] = getattr(importlib.import_module(module), name)
    return found


def run(job: Job, readable: tuple[str, ...]) -> NoReturn:
    """Become the job. Never returns; the exit status says only whether a result was left."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        area = mmap.mmap(job.result_fd, 0)
        payload = read_payload(job.payload_fd)
        channel = socket.socket(fileno=job.channel_fd)
        _print_to(job.log_fd)
        try:
            lockdown.lock_down({0, 1, 2, job.channel_fd}, job.limits, readable)
        except OSError as error:
            finished, body = False, f"the walls could not be put up: {error}".encode()
        else:
            finished, body = _attempt(job.entry, payload, channel)
        write_result(area, finished=finished, body=body)
        status = 0
    finally:
        # No clean-up runs: it would be the stranger's (`__del__`, atexit) and nothing needs it.
        os._exit(status)


def _print_to(fd: int) -> None:
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        os.dup2(fd, number)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _attempt(entry: str, payload: bytes, channel: socket.socket) -> tuple[bool, bytes]:
    try:
        try:
            body = resolve(entry)(payload, channel)
        finally:
            sys.stdout.flush()
    except BaseException as raised:  # noqa: BLE001 - the text goes to whoever sent the job
        return False, _describe(raised)
    if not isinstance(body, bytes):
        return False, b"the entry point returned no bytes"
    return True, body


def _describe(raised: BaseException) -> bytes:
    if isinstance(raised, ToldError):
        text = str(raised)
    else:
        text = "".join(traceback.format_exception(raised, limit=-30))
    return text.encode("utf-8", "replace")[-MAX_TEXT_BYTES:]
