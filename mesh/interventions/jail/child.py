"""A forked job from first to last: wall in, run the entry point, leave a result.

Its payload comes over its channel, before anything else: ``u64 length`` and the bytes. A job with a
hint may stand by, walled in, until there is a payload for it. Knows nothing of what the entry point
does. Nothing here runs in the daemon.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import mmap
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, cast

from mesh.interventions.jail import lockdown
from mesh.interventions.jail.limits import JobLimits, ToldError
from mesh.interventions.jail.result import MAX_TEXT_BYTES, write_result
from mesh.interventions.receiving import receive_exactly

_TAKEN_S = 5.0
"""By when somebody has looked at what a process of a known kind used, and killed it. One that ends
by itself says no more how much memory it had, and takes a while to be gone."""
PAYLOAD_LENGTH = struct.Struct("!Q")
_LEFT_OUT = b"\n... what was too long is left out here ...\n"


@dataclass(frozen=True)
class ZygoteOrder:
    """What the zygote was asked to run, with the descriptors that came along.

    `entry` is called with the payload and the channel. With a `hint` it is called with that and the
    channel before the payload is there; what it returns then is called with the payload.
    """

    entry: str
    hint: str | None
    limits: JobLimits
    result_fd: int
    channel_fd: int
    log_fd: int


def resolve(entry: str) -> Callable[..., object]:
    """The function an entry point ``module:function`` names."""
    module, _, name = entry.partition(":")
    found: Callable[..., object] = getattr(importlib.import_module(module), name)
    return found


def run(job: ZygoteOrder, readable: tuple[str, ...]) -> NoReturn:
    """Become the job. Never returns; the exit status says only whether a result was left."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        area = mmap.mmap(job.result_fd, 0)
        channel = socket.socket(fileno=job.channel_fd)
        _print_to(job.log_fd)
        try:
            lockdown.lock_down({0, 1, 2, job.channel_fd}, job.limits, readable)
        except OSError as error:
            finished, body = False, f"the walls could not be put up: {error}".encode()
        else:
            finished, body = _attempt(job, channel)
        write_result(area, finished=finished, body=body)
        status = 0
        with contextlib.suppress(OSError):  # the other end may be gone
            channel.shutdown(socket.SHUT_RDWR)  # from here on the result may be taken
        if job.hint is not None:
            time.sleep(_TAKEN_S)
    finally:
        # No clean-up runs: it would be the stranger's (`__del__`, atexit) and nothing needs it.
        os._exit(status)


def _print_to(fd: int) -> None:
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        os.dup2(fd, number)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _attempt(job: ZygoteOrder, channel: socket.socket) -> tuple[bool, bytes]:
    try:
        try:
            body = _begin(job, channel)(_receive_payload(channel))
        finally:
            sys.stdout.flush()
    except BaseException as raised:  # noqa: BLE001 - the text goes to whoever sent the job
        return False, _describe(raised)
    if not isinstance(body, bytes):
        return False, b"the entry point returned no bytes"
    return True, body


def _begin(job: ZygoteOrder, channel: socket.socket) -> Callable[[bytes], object]:
    entry = resolve(job.entry)
    if job.hint is None:
        return lambda payload: entry(payload, channel)
    return cast("Callable[[bytes], object]", entry(job.hint, channel))


def _receive_payload(channel: socket.socket) -> bytes:
    try:
        (length,) = PAYLOAD_LENGTH.unpack(receive_exactly(channel, PAYLOAD_LENGTH.size))
        return bytes(receive_exactly(channel, length))
    except ConnectionError:
        os._exit(1)  # nobody wants the job any more


def _describe(raised: BaseException) -> bytes:
    if isinstance(raised, ToldError):
        text = str(raised)
    else:
        text = "".join(traceback.format_exception(raised, limit=-30))
    return _cut(text.encode("utf-8", "replace"))


def _cut(text: bytes) -> bytes:
    """Its beginning, which has the author's line, and its end, where both have no room."""
    if len(text) <= MAX_TEXT_BYTES:
        return text
    half = (MAX_TEXT_BYTES - len(_LEFT_OUT)) // 2
    return text[:half] + _LEFT_OUT + text[-half:]
