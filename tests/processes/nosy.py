"""A child process that looks around: what it was given, and what lies in its memory."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import secrets
import signal
import ssl
from pathlib import Path
from typing import Any

import numpy
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mesh.processes.channel import Channel
from mesh.processes.child import attach_to_parent
from mesh.processes.exchange import Exchange
from mesh.processes.messages import ProcessMessage

_channel: list[Channel] = []
_kept: list[object] = []


def _open_files() -> dict[str, str]:
    found = {}
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found[fd.name] = str(fd.readlink())
        except OSError:
            continue  # the directory that is being read
    return found


def _lies_in_memory(first: bytes, second: bytes) -> bool:
    """Whether these halves lie behind one another in writable memory; here they never do."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, *_ = line.split()
        if not rights.startswith("rw") or "[v" in line:
            continue
        start, end = (int(number, 16) for number in place.split("-"))
        with Path("/proc/self/mem").open("rb", buffering=0) as memory:
            memory.seek(start)
            try:
                held = memory.read(end - start)
            except OSError:
                continue
        found = held.find(first)
        while found >= 0:
            if held.startswith(second, found + len(first)):
                return True
            found = held.find(first, found + 1)
    return False


def _look() -> dict[str, Any]:
    return {
        "files": _open_files(),
        "environment": dict(os.environ),
        "started_with": Path("/proc/self/environ").read_text(),
        "session": os.getsid(0) == os.getpid(),
        "signals": signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
        "collects": gc.isenabled(),
        "sum": float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()),
        "random": [
            random.random(), float(numpy.random.random()), float(torch.rand(1)),
            secrets.token_hex(), ssl.RAND_bytes(8).hex(),
            Ed25519PrivateKey.generate().private_bytes_raw().hex(),
        ],
    }  # fmt: skip


class Said(ProcessMessage, frozen=True):
    """What to do, or what was found."""

    what: str
    fields: dict[str, Any]


def _obey(order: Said) -> None:
    answer: dict[str, Any] = {}
    match order.what:
        case "look":
            answer = _look()
        case "keep":
            _kept.append(order.fields["text"])
        case "find":
            answer["found"] = [_lies_in_memory(*halves) for halves in order.fields["halves"]]
        case "exit":
            os._exit(int(order.fields["status"]))
    _say(Said(order.what, answer))


def _say(message: ProcessMessage) -> None:
    _channel[0].send(message)


async def _main() -> None:
    _channel.append(await attach_to_parent(Exchange({Said: _obey}, _say).read))
    _say(Said("ready", {}))
    await asyncio.Event().wait()


def main() -> None:
    """Be the process."""
    asyncio.run(_main())
