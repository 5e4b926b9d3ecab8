"""What the doctor makes a jailed process try: one harmless attack per wall.

Runs inside the jail. Each canary returns evidence (what it read, what the kernel answered) or
leaves it in a trap outside; the doctor judges by that, never by an exception.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STARTED = b"started\n"


@dataclass(frozen=True)
class Traps:
    """Where the doctor looks afterwards. `secret` is the text that must not come out."""

    name: str
    nonce: str
    secret_path: str
    write_path: str
    tcp_port: int
    udp_port: int
    unix_name: str
    victim_pid: int
    memory_bytes: int
    open_files: int


def attempt(payload: bytes, channel: socket.socket) -> bytes:
    """Entry point of a canary's job."""
    traps = Traps(**json.loads(payload))
    channel.sendall(STARTED)
    return CANARIES[traps.name](traps, channel)


def _control(traps: Traps, channel: socket.socket) -> bytes:
    return traps.nonce[::-1].encode()


def _never_ends(traps: Traps, channel: socket.socket) -> bytes:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGXCPU):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


def _read_file(traps: Traps, channel: socket.socket) -> bytes:
    return Path(traps.secret_path).read_bytes()


def _read_environment(traps: Traps, channel: socket.socket) -> bytes:
    return Path(f"/proc/{traps.victim_pid}/environ").read_bytes()


def _write_file(traps: Traps, channel: socket.socket) -> bytes:
    Path(traps.write_path).write_text(traps.nonce, encoding="ascii")
    return b""


def _connect(traps: Traps, channel: socket.socket) -> bytes:
    with socket.create_connection(("127.0.0.1", traps.tcp_port), timeout=1) as link:
        link.sendall(traps.nonce.encode())
    return b""


def _datagram(traps: Traps, channel: socket.socket) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.sendto(traps.nonce.encode(), ("127.0.0.1", traps.udp_port))
    return b""


def _abstract_socket(traps: Traps, channel: socket.socket) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.connect("\0" + traps.unix_name)
        link.sendall(traps.nonce.encode())
    return b""


def _exec(traps: Traps, channel: socket.socket) -> bytes:
    os.dup2(channel.fileno(), 9)
    os.execv("/bin/sh", ["sh", "-c", f"echo {traps.nonce} >&9"])  # noqa: S606


def _run_program(traps: Traps, channel: socket.socket) -> bytes:
    return subprocess.run(
        ["/bin/echo", traps.nonce], capture_output=True, timeout=5, check=True
    ).stdout


def _fork(traps: Traps, channel: socket.socket) -> bytes:
    if os.fork() == 0:
        channel.sendall(traps.nonce.encode())
        os._exit(0)
    os.wait()
    return b""


def _thread(traps: Traps, channel: socket.socket) -> bytes:
    thread = threading.Thread(target=channel.sendall, args=(traps.nonce.encode(),))
    thread.start()
    thread.join()
    return b""


def _signal(traps: Traps, channel: socket.socket) -> bytes:
    os.kill(traps.victim_pid, signal.SIGTERM)
    return b""


def _machine_code() -> bytes:
    """A function that returns 42."""
    return {
        "x86_64": bytes.fromhex("b82a000000c3"),
        "aarch64": bytes.fromhex("40058052c0035fd6"),
    }[platform.machine()]


def _call(area: mmap.mmap) -> bytes:
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    return f"the machine code returned {ctypes.CFUNCTYPE(ctypes.c_int)(address)()}".encode()


def _executable_mapping(traps: Traps, channel: socket.socket) -> bytes:
    protection = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    area = mmap.mmap(-1, mmap.PAGESIZE, prot=protection)
    area.write(_machine_code())
    return _call(area)


def _made_executable(traps: Traps, channel: socket.socket) -> bytes:
    area = mmap.mmap(-1, mmap.PAGESIZE)
    area.write(_machine_code())
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    protection = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    libc = ctypes.CDLL(None)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), protection):
        return b""
    return _call(area)


def _memory_file(traps: Traps, channel: socket.socket) -> bytes:
    make = getattr(os, "memfd_create", None)  # which not every Python has
    return b"" if make is None else f"memory file {make('canary')}".encode()


def _memory(traps: Traps, channel: socket.socket) -> bytes:
    return f"mapped {len(mmap.mmap(-1, 2 * traps.memory_bytes))} bytes".encode()


def _open_files(traps: Traps, channel: socket.socket) -> bytes:
    opened: list[int] = []
    try:
        while len(opened) < 2 * traps.open_files:
            opened.append(os.dup(0))
    except OSError:
        return b""
    return f"{len(opened)} descriptors".encode()


def _inherited_files(traps: Traps, channel: socket.socket) -> bytes:
    expected = {0, 1, 2, channel.fileno()}
    found = []
    for fd in range(traps.open_files * 16):
        try:
            os.fstat(fd)
        except OSError:
            continue
        found.append(fd)
    return str(sorted(set(found) - expected)).encode() if set(found) - expected else b""


# Kernel features by their numbers on (x86-64, aarch64): what an exploit of the kernel starts with.
# `_VICTIM` and `_SCRATCH` stand for a foreign process and for the address of some memory.
_VICTIM, _SCRATCH = "victim", "scratch"
_KERNEL_DOORS: dict[str, tuple[int, int, tuple[int | str, ...]]] = {
    "unshare": (272, 97, (0x10000000,)),
    "ptrace": (101, 117, (16, _VICTIM, 0, 0)),
    "io_uring": (425, 425, (4, _SCRATCH)),
    "userfaultfd": (323, 282, (1,)),
    "keyctl": (250, 219, (0, -3, 1)),
    "perf": (298, 241, (_SCRATCH, 0, -1, -1, 0)),
    "shared_segment": (29, 194, (0, 4096, 0o1600)),
    "socket": (41, 198, (1, 1, 0)),
}


def _kernel_door(traps: Traps, channel: socket.socket) -> bytes:
    x86_64, aarch64, arguments = _KERNEL_DOORS[traps.name]
    number = {"x86_64": x86_64, "aarch64": aarch64}[platform.machine()]
    # Read by perf as its attributes (a software clock, 128 bytes), overwritten by io_uring.
    scratch = ctypes.create_string_buffer(b"\x01\0\0\0\x80\0\0\0" + bytes(4088))
    stands_for: dict[int | str, Any] = {_VICTIM: ctypes.c_long(traps.victim_pid), _SCRATCH: scratch}
    passed = [stands_for.get(a) or ctypes.c_long(int(a)) for a in arguments]
    answer = ctypes.CDLL(None).syscall(ctypes.c_long(number), *passed)
    return f"{traps.name} answered {answer}".encode() if answer >= 0 else b""


CANARIES: dict[str, Callable[[Traps, socket.socket], bytes]] = {
    "control": _control,
    "never_ends": _never_ends,
    "read_file": _read_file,
    "read_environment": _read_environment,
    "write_file": _write_file,
    "connect": _connect,
    "datagram": _datagram,
    "abstract_socket": _abstract_socket,
    "exec": _exec,
    "run_program": _run_program,
    "fork": _fork,
    "thread": _thread,
    "signal": _signal,
    "executable_mapping": _executable_mapping,
    "made_executable": _made_executable,
    "memory_file": _memory_file,
    "memory": _memory,
    "open_files": _open_files,
    "inherited_files": _inherited_files,
    **dict.fromkeys(_KERNEL_DOORS, _kernel_door),
}
_OF_LINUX = {
    "read_environment", "abstract_socket", "executable_mapping", "made_executable", "memory_file",
    *_KERNEL_DOORS,
}  # fmt: skip
"""Those that go by numbers, files and names that no other system has. There they would fail for
that reason, which says nothing of a wall, or mean something else."""


def canaries_of(platform: str = sys.platform) -> tuple[str, ...]:
    """The names of those that can tell something there."""
    return tuple(each for each in CANARIES if platform == "linux" or each not in _OF_LINUX)
