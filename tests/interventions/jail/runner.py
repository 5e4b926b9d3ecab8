"""Runs a hostile body, inside the jail or (to show that it bites) with the walls taken away."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import platform
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mesh.interventions.jail import bpf, kernel, lockdown
from mesh.interventions.jail.limits import JobLimits

CODE42 = {
    "x86_64": bytes.fromhex("b82a000000c3"),
    "aarch64": bytes.fromhex("40058052c0035fd6"),
}.get(platform.machine(), b"")


def warm(argument: str) -> None:
    """Warm-up: imports, and takes down the walls named in `argument`, separated by commas."""
    # Loaded now, so that what stops a body is a wall and not a library that cannot be loaded.
    import cProfile  # noqa: F401
    import pty  # noqa: F401
    import sqlite3  # noqa: F401
    import syslog  # noqa: F401

    import numpy  # noqa: F401
    import torch  # noqa: F401

    for wall in filter(None, argument.split(",")):
        _TAKE_DOWN[wall]()


def _outer_guard(*_: Any) -> None:
    """What bounds a body whose walls are gone, so that the machine survives it."""
    bounds = {"CPU": 10, "FSIZE": 16 << 20, "NOFILE": 300, "CORE": 0, "AS": 0}
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    bounds["AS"] = pages * 4096 + (6 << 30)
    for name, bound in bounds.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (bound, bound))


def _no_walls(keep: set[int], limits: JobLimits, readable: tuple[str, ...]) -> None:
    os.setsid()
    _outer_guard()


def _set(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _forget(option: int) -> None:
    asked = kernel.prctl
    _set(kernel, "prctl", lambda number, value: None if number == option else asked(number, value))


_REFUSE = bpf.refuse_bits
_TAKE_DOWN = {
    "all": lambda: _set(lockdown, "lock_down", _no_walls),
    "limits": lambda: _set(lockdown, "_bound_resources", _outer_guard),
    "files": lambda: _set(kernel, "landlock", lambda *_: None),
    "calls": lambda: _set(kernel, "install_filter", lambda *_: None),
    "descriptors": lambda: _set(lockdown, "close_all_but", lambda _: None),
    "executable": lambda: _set(
        bpf, "refuse_bits", lambda i, b, c: [] if b == mmap.PROT_EXEC else _REFUSE(i, b, c)
    ),
    "pointer": lambda: _set(
        bpf, "zero", lambda i: [bpf.argument(i), bpf.op(bpf.EQUAL, 0, 1, 0), *bpf.fail(1)]
    ),
    "capabilities": lambda: _set(kernel, "drop_capabilities", lambda _: None),
    "no_new_privileges": lambda: _forget(kernel.PR_SET_NO_NEW_PRIVS),
    "undumpable": lambda: _forget(kernel.PR_SET_DUMPABLE),
    "own_signals": lambda: _set(bpf, "only", lambda *_: bpf.allow()),
}


def run(payload: bytes, channel: socket.socket) -> bytes:
    """Entry point: the payload is the traps and the body; the result whatever it calls loot."""
    order = json.loads(payload)
    traps = SimpleNamespace(**order["traps"])
    channel.sendall(b"begun\n")
    names = _vocabulary(traps, channel)
    exec(compile(order["body"], "<hostile>", "exec"), names)  # noqa: S102
    loot = names["loot"]
    return loot if isinstance(loot, bytes) else str(loot).encode()


def _vocabulary(traps: SimpleNamespace, channel: socket.socket) -> dict[str, Any]:
    import numpy as np
    import torch

    libc = ctypes.CDLL(None, use_errno=True)

    def syscall(number: int, *arguments: Any) -> int:
        if platform.machine() != "x86_64":
            raise OSError(errno.ENOSYS, "the numbers in these bodies are x86-64's")
        wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
        return int(libc.syscall(ctypes.c_long(number), *wide))

    def address(area: mmap.mmap) -> ctypes.c_void_p:
        return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(area)))

    def call(area: mmap.mmap) -> int:
        return int(ctypes.CFUNCTYPE(ctypes.c_int)(address(area).value)())

    return {
        "T": traps, "channel": channel, "loot": b"", "os": os, "sys": sys, "time": time,
        "socket": socket, "signal": signal, "struct": struct, "ctypes": ctypes, "mmap": mmap,
        "subprocess": subprocess, "threading": threading, "torch": torch, "np": np,
        "syscall": syscall, "address": address, "call": call, "CODE42": CODE42,
        "proof": lambda: channel.sendall(traps.nonce.encode()),
    }  # fmt: skip


def innocent(payload: bytes, channel: socket.socket) -> bytes:
    """An honest job: computes, prints, answers on its channel."""
    import torch

    torch.manual_seed(0)
    matrix = torch.randn(64, 64)
    print("honest work")
    total = 0.0
    for _ in range(int(payload)):
        total += float((matrix @ matrix).sum())
        channel.sendall(b"tick")
        if channel.recv(4) != b"tock":
            return b"the other end lied"
    return f"{total:.3f}".encode()
