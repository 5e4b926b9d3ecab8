"""Child processes of the daemon: started with a private channel, never outliving it.

A child gets one end of a socket pair (`channel`). When the parent dies, in whatever way, the
child's end reads end-of-file and a watchdog thread ends the process, even while its event loop
computes; on Linux the kernel is asked for the same as well (PR_SET_PDEATHSIG). How a process comes
to be is `warm_parent`'s, who watches one and starts another in its place `supervisor`'s.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from mesh.errors import InternalError, LinkLost, MeshError
from mesh.logs import log_file
from mesh.processes.channel import Channel
from mesh.processes.messages import LastWords, ProcessMessage
from mesh.processes.nursery import CHANNEL_FD, LISTENER_FD, ForkOrder
from mesh.processes.warm_parent import ChildProcess, child_environment, start_process

logger = logging.getLogger(__name__)

_LOG_FILE = "HEARTHNET_LOG_FILE"
_PR_SET_PDEATHSIG = 1
_PAUSE_S = 0.1


class Child:
    """A running child process and the parent's end of its channel."""

    def __init__(self, name: str, process: ChildProcess, channel: Channel) -> None:
        self.name = name
        self.channel = channel
        self._process = process

    @classmethod
    async def start(
        cls,
        module: str,
        *,
        name: str,
        on_message: Callable[[bytes], None],
        on_closed: Callable[[], None],
        listener: socket.socket | None = None,
    ) -> Child:
        """Run `module` with a channel, and with a `listener` that it shares with this process;
        stderr is inherited, the rest is null."""
        ours, theirs = socket.socketpair()
        environment = child_environment()
        if (log := log_file()) is not None:
            environment[_LOG_FILE] = str(log)
        try:
            process = await start_process(ForkOrder(module, environment), theirs, listener)
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

    @property
    def why_alone(self) -> str | None:
        """Why it was not forked from the warm parent; None when it was."""
        return self._process.why_alone

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
        return await self._process.wait(timeout_s)


async def attach_to_parent(on_message: Callable[[bytes], None]) -> Channel:
    """Child side: take the inherited channel, whose end is the end of this process, and say over
    it from now on that the event loop turns.

    Call once, from the child's event loop. Raises InternalError when not started by `Child.start`.
    """
    text = os.environ.pop(CHANNEL_FD, "")
    if not text.isdigit():
        raise InternalError(
            "this module is a part of the hearthnet daemon and is started by it.",
            fix="Run `hearthnet up` instead.",
        )
    end = socket.socket(fileno=int(text))
    channel = await Channel.open(end, on_message, lambda: os._exit(0))
    channel.beat()
    return channel


def listener_of_parent() -> socket.socket | None:
    """Child side: the listening socket that this process was given; once."""
    text = os.environ.pop(LISTENER_FD, "")
    return socket.socket(fileno=int(text)) if text.isdigit() else None


def end_failed(send: Callable[[ProcessMessage], None], error: MeshError) -> NoReturn:
    """Child side: `send` why this process can do nothing any more, and end it at once.

    Not by an exception: a thread that the device holds on to would be waited for.
    """
    logger.error("this process ends itself: %s", error)
    with contextlib.suppress(LinkLost):
        send(LastWords(error))
    os._exit(1)


def log_file_of_parent() -> Path | None:
    """Child side: the file that the inherited standard error is, where the parent knows it."""
    text = os.environ.pop(_LOG_FILE, "")
    return Path(text) if text else None


def end_with_parent() -> None:
    """Child side, first of all: end this process when the parent is gone, whatever it is doing."""
    text = os.environ.get(CHANNEL_FD, "")
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
            if sys.platform == "darwin":
                time.sleep(_PAUSE_S)  # there it may return at once while anything is to be read

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
