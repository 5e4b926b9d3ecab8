"""Child processes of the daemon: started with a private channel, watched, never outliving it.

A child gets one end of a socket pair. Both sides exchange msgpack maps over it, each behind a
four-byte length. When the parent dies, in whatever way, the child's end reads end-of-file and a
watchdog thread ends the process, even while its event loop computes; on Linux the kernel is asked
for the same as well (PR_SET_PDEATHSIG). Knows nothing of what the messages mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgpack

from mesh.errors import InternalError, LinkLost
from mesh.logs import log_file

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct(">I")
MAX_MESSAGE_BYTES = 64 << 20
MAX_UNREAD_BYTES = 64 << 20
RESTART_DELAYS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_S = 60.0
_CHANNEL_FD = "HEARTHNET_CHANNEL_FD"
_LOG_FILE = "HEARTHNET_LOG_FILE"
_PR_SET_PDEATHSIG = 1

ChannelMessage = dict[str, Any]


class Channel(asyncio.Protocol):
    """One end of the pair: `on_message` gets each map in order, `on_closed` the end, once."""

    def __init__(
        self, on_message: Callable[[ChannelMessage], None], on_closed: Callable[[], None]
    ) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(
        cls,
        end: socket.socket,
        on_message: Callable[[ChannelMessage], None],
        on_closed: Callable[[], None],
    ) -> Channel:
        """Serve `end`, which the channel owns from now on."""
        loop = asyncio.get_running_loop()
        end.setblocking(False)
        _, channel = await loop.create_connection(lambda: cls(on_message, on_closed), sock=end)
        return channel

    def send(self, message: ChannelMessage) -> None:
        """Queue one map. Raises LinkLost when the other side is gone.

        One that has `MAX_UNREAD_BYTES` before it and reads none of them is cut off, and counts as
        gone.
        """
        if self._transport is None or self._transport.is_closing():
            raise LinkLost(
                "the process on the other end is gone", fix="It is restarted; try again."
            )
        body = msgpack.packb(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise InternalError(f"a message of {len(body)} bytes exceeds the channel", fix="")
        if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self._transport.abort()
            raise LinkLost(
                "the process on the other end reads nothing", fix="It is restarted; try again."
            )
        self._transport.write(_LENGTH.pack(len(body)) + body)

    def close(self) -> None:
        """Close this end; the other side reads end-of-file."""
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Split the stream into maps."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if length > MAX_MESSAGE_BYTES:
                logger.error("channel message of %d bytes refused", length)
                self.close()
                return
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            self._on_message(msgpack.unpackb(body, strict_map_key=False))

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end once."""
        self._transport = None
        self._on_closed()


class Child:
    """A running child process and the parent's end of its channel."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self.name = name
        self.channel = channel
        self._process = process

    @classmethod
    async def start(
        cls,
        module: str,
        *,
        name: str,
        on_message: Callable[[ChannelMessage], None],
        on_closed: Callable[[], None],
        environment: dict[str, str] | None = None,
    ) -> Child:
        """Run ``python -m module`` with a channel; stderr is inherited, the rest is null."""
        ours, theirs = socket.socketpair()
        env = {**os.environ, **(environment or {}), _CHANNEL_FD: str(theirs.fileno())}
        if (log := log_file()) is not None:
            env[_LOG_FILE] = str(log)
        try:
            process = await asyncio.to_thread(
                subprocess.Popen,
                [sys.executable, "-m", "mesh.child", module],
                env=env,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            channel = await Channel.open(ours, on_message, on_closed)
        except BaseException:
            ours.close()  # which ends the process, should there be one
            raise
        finally:
            theirs.close()
        return cls(name, process, channel)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def kill(self) -> None:
        """End it at once, whatever it does; for one that no longer answers."""
        self._process.kill()

    async def stop(self, timeout_s: float) -> int:
        """Close the channel, which ends the child; kill it after `timeout_s`. Returns its code."""
        self.channel.close()
        try:
            return await self.wait(timeout_s)
        except TimeoutError:
            logger.warning("child=%s pid=%d ignored the stop; killing it", self.name, self.pid)
            self._process.kill()
            return await self.wait(timeout_s)

    async def wait(self, timeout_s: float) -> int:
        """The exit status; TimeoutError when it still runs then."""
        try:
            return await asyncio.to_thread(self._process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name} still runs after {timeout_s} s") from None


async def run_again(
    run: Callable[[], Awaitable[None]], name: str, is_stopping: Callable[[], bool] = lambda: False
) -> None:
    """Await `run` over and over, later each time it ends soon, until `is_stopping` says so.

    That it raises (no descriptors, no memory for a process) is an end like any other, and logged.
    """
    loop = asyncio.get_running_loop()
    failures = 0
    while True:
        started = loop.time()
        try:
            await run()
        except Exception as error:  # giving up would leave nobody to try again
            logger.exception("%s failed", name, exc_info=error)
        if is_stopping():
            return
        if loop.time() - started > STEADY_S:
            failures = 0
        delay = RESTART_DELAYS_S[min(failures, len(RESTART_DELAYS_S) - 1)]
        failures += 1
        logger.error("%s ended; starting again in %g s", name, delay)
        await asyncio.sleep(delay)


async def attach_to_parent(on_message: Callable[[ChannelMessage], None]) -> Channel:
    """Child side: take the inherited channel, whose end is the end of this process.

    Call once, from the child's event loop. Raises InternalError when not started by `Child.start`.
    """
    text = os.environ.pop(_CHANNEL_FD, "")
    if not text.isdigit():
        raise InternalError(
            "this module is a part of the hearthnet daemon and is started by it",
            fix="Run `hearthnet up` instead.",
        )
    end = socket.socket(fileno=int(text))
    return await Channel.open(end, on_message, lambda: os._exit(0))


def log_file_of_parent() -> Path | None:
    """Child side: the file that the inherited standard error is, where the parent knows it."""
    text = os.environ.pop(_LOG_FILE, "")
    return Path(text) if text else None


def end_with_parent() -> None:
    """Child side, first of all: end this process when the parent is gone, whatever it is doing."""
    text = os.environ.get(_CHANNEL_FD, "")
    if not text.isdigit():
        return  # `attach_to_parent` says what is wrong
    parent = os.getppid()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    watched = os.dup(int(text))

    def watch() -> None:
        # The loop also sees end-of-file, but not while it computes; this thread does.
        poller = select.poll()
        poller.register(watched, select.POLLHUP | getattr(select, "POLLRDHUP", 0))
        while True:
            with contextlib.suppress(OSError):
                hung_up = poller.poll(1000)
                if hung_up or os.getppid() != parent:
                    os._exit(0)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
