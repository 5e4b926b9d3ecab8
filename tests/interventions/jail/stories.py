"""Jobs with which the daemon's side is tested. Each is an entry point."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable

touched = 0


def warm(argument: str) -> None:
    """Nothing to do; the argument says how to fail."""
    if argument == "raise":
        raise ValueError("the model is not there")
    if argument == "no landlock":
        from mesh.interventions.jail import kernel

        def refused(*_: object) -> None:
            raise OSError("the kernel says no")

        kernel.landlock = refused
    if argument.startswith("/"):
        sys.path.insert(0, argument)
        import mdurl  # nothing else here imports it

        if not mdurl.__file__.startswith(argument):
            raise ValueError(f"it lies at {mdurl.__file__}")
    if argument == "thread":
        import threading

        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def reading_source(payload: bytes, channel: socket.socket) -> bytes:
    """The source of a function of what `warm` has imported."""
    import inspect

    import mdurl

    return inspect.getsource(mdurl.encode.__code__).encode()  # as nnsight asks for it


def echo(payload: bytes, channel: socket.socket) -> bytes:
    """Answer the payload backwards, and the channel's first message twice."""
    message = channel.recv(64)
    channel.sendall(message * 2)
    return payload[::-1]


def printing(payload: bytes, channel: socket.socket) -> bytes:
    """Print the payload as it is, and something from below Python."""
    sys.stdout.write(payload.decode())
    sys.stdout.flush()
    os.write(2, b"from the library\n")
    return b""


def flood(payload: bytes, channel: socket.socket) -> bytes:
    """Print without end."""
    while True:
        print("x" * 100)


def spilling(payload: bytes, channel: socket.socket) -> bytes:
    """Print as many lines of 100 characters as the payload says."""
    for _ in range(int(payload)):
        print("x" * 99)
    return b"done"


def breaking_lines(payload: bytes, channel: socket.socket) -> bytes:
    """Print empty lines, a million at once."""
    print("\n" * 1_000_000)
    return b""


def dripping(payload: bytes, channel: socket.socket) -> bytes:
    """Print so many lines, one after the other."""
    for number in range(int(payload)):
        print(number)
        time.sleep(0.001)
    return b""


def raising(payload: bytes, channel: socket.socket) -> bytes:
    """An ordinary error."""
    raise LookupError(f"no such \x1b[31mlayer\x1b[0m {payload.decode()}")


def leaving(payload: bytes, channel: socket.socket) -> bytes:
    """Gone without a word."""
    os._exit(int(payload))


def crashing(payload: bytes, channel: socket.socket) -> bytes:
    """A segmentation fault."""
    import ctypes

    return ctypes.string_at(8)


def spinning(payload: bytes, channel: socket.socket) -> bytes:
    """Compute without end."""
    channel.sendall(b"spinning")
    while True:
        pass


def waiting(payload: bytes, channel: socket.socket) -> bytes:
    """Wait for the channel to close."""
    print("I am waiting")
    channel.sendall(b"waiting")
    while channel.recv(64):
        pass
    return b"closed"


def touching(payload: bytes, channel: socket.socket) -> bytes:
    """Change what every job shares; say how often that has happened."""
    global touched  # noqa: PLW0603
    touched += 1
    return str(touched).encode()


def exits(payload: bytes, channel: socket.socket) -> bytes:
    """`sys.exit` is no way out."""
    sys.exit(0)


def wrong_type(payload: bytes, channel: socket.socket) -> bytes:
    """Returns something else than bytes."""
    return "text"  # type: ignore[return-value]


def forging(payload: bytes, channel: socket.socket) -> bytes:
    """Write a header that promises more than the file holds, then die before the real one."""
    import gc
    import mmap
    import struct

    (area,) = [found for found in gc.get_objects() if isinstance(found, mmap.mmap)] or [None]
    if area is None:
        frame = sys._getframe()
        while frame is not None and "area" not in frame.f_locals:
            frame = frame.f_back  # type: ignore[assignment]
        area = frame.f_locals["area"]
    area[:13] = struct.pack("<4sBQ", b"HNR1", 1, 1 << 60)
    os._exit(0)


def ready(hint: str, channel: socket.socket) -> Callable[[bytes], bytes]:
    """What can be done before there is a payload; then, which process it was done in."""
    begun = os.getpid()

    def work(payload: bytes) -> bytes:
        return b"%s %d %d" % (hint.encode() + payload, begun, os.getpid())

    return work


def hanging_up(payload: bytes, channel: socket.socket) -> bytes:
    """Close the channel, and have a result much later."""
    channel.shutdown(socket.SHUT_RDWR)
    time.sleep(float(payload))
    return b"late"
