"""Fetching a checkpoint over loopback: from one neighbour, from two, and beside a plain copy.

The plain copy sends the file's bytes over a TCP connection to another process, which writes them:
no encryption, no hashes. The floor does by blocking calls what a fetch cannot do without: it reads
the file, sends it over TLS 1.3, hashes each byte once and writes it. Fetchers and copies share the
machine's cores, which on few cores says how much computing a byte costs rather than how well two
neighbours add up; so two are also compared with one where each may give `CAPPED_MB` a second, as
over a network. CPU seconds are those of all processes that took part, by gigabyte.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mesh.identity.keys import NodeKey
from mesh.identity.tls import TlsContexts, TlsMaterial
from mesh.models.manifest import Manifest, read_manifest
from tests.bench.noise import wait_for_idle
from tests.checkpoints import make_checkpoint
from tests.transfers.house import MODEL, house, up

ROUNDS = 5
CAPPED_MB = 30
_RECEIVER = """
import os, socket, sys
end = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
with open(sys.argv[2], "wb") as out:
    while data := end.recv(1 << 20):
        out.write(data)
    os.fsync(out.fileno())
print("done", flush=True)
"""
_FLOOR = """
import hashlib, os, socket, ssl, sys
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
end = context.wrap_socket(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
digest, room = hashlib.sha256(), memoryview(bytearray(1 << 20))
with open(sys.argv[2], "wb", buffering=0) as out:
    while count := end.recv_into(room):
        digest.update(room[:count])
        out.write(room[:count])
    os.fsync(out.fileno())
print("done", flush=True)
"""


def copied(source: Path, target: Path) -> tuple[float, float]:
    """Seconds that a plain copy over a socket takes, and CPU seconds of both ends."""

    def send(connection: socket.socket) -> None:
        with source.open("rb") as file:
            connection.sendfile(file)

    return received(_RECEIVER, target, send)


def floor(source: Path, target: Path, context: ssl.SSLContext) -> tuple[float, float]:
    """The same for the floor."""

    def send(connection: socket.socket) -> None:
        room = memoryview(bytearray(1 << 20))
        end = context.wrap_socket(connection, server_side=True)
        with end, source.open("rb", buffering=0) as file:
            while count := file.readinto(room):
                end.sendall(room[:count])

    return received(_FLOOR, target, send)


def received(
    program: str, target: Path, send: Callable[[socket.socket], None]
) -> tuple[float, float]:
    """Seconds until a process that runs `program` has written what is sent; CPU seconds of both."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [sys.executable, "-c", program, str(port), str(target)]
        receiver = subprocess.Popen(command, stdout=subprocess.PIPE)
        connection, _ = server.accept()
        started, before = time.perf_counter(), cpu_s(None) + cpu_s(receiver.pid)
        with connection:
            send(connection)
        assert receiver.stdout is not None
        receiver.stdout.readline()
        took_s = time.perf_counter() - started
        took_cpu_s = cpu_s(None) + cpu_s(receiver.pid) - before
        receiver.wait(30)
        receiver.stdout.close()
    return took_s, took_cpu_s


async def fetched(root: Path, whole: Manifest, givers: int, rate: float) -> tuple[float, float]:
    """Seconds that a fetch from so many takes, and CPU seconds of all processes."""
    names = [f"giver{index}" for index in range(givers)]
    shutil.rmtree(root, ignore_errors=True)
    async with house(root, *names, "taker") as made:
        for name in names:
            made.start(name, whole.directory, bytes_per_s=rate)
        taker = made.start("taker")
        await up(*made.fetchers.values())
        made.introduce()
        pids = [f.supervisor.pid for f in made.fetchers.values()]
        before = sum(map(cpu_s, pids))
        started = time.perf_counter()
        await taker.supervisor.ensure(MODEL, whole.weights_sha256)
        return time.perf_counter() - started, sum(map(cpu_s, pids)) - before


def cpu_s(pid: int | None) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def measure() -> dict[str, Any]:
    """Medians of ratios over rounds that alternate."""
    wait_for_idle()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        directory = make_checkpoint(root / "whole", "llama", layers=4, hidden=1024, vocab=16000)
        whole = read_manifest(directory, model_id=MODEL, cache_dir=root / "hashes")
        size = sum(entry.nbytes for entry in whole.tensors.values())
        key = NodeKey(Ed25519PrivateKey.generate())
        context = TlsContexts(TlsMaterial.of(key, [])).server
        context.verify_mode = ssl.CERT_NONE
        rows = []
        for _ in range(ROUNDS):
            copy_s, copy_cpu = copied(directory / "model.safetensors", root / "copy")
            floor_s, floor_cpu = floor(directory / "model.safetensors", root / "copy", context)
            one_s, one_cpu = asyncio.run(fetched(root / "house", whole, 1, 0.0))
            two_s, two_cpu = asyncio.run(fetched(root / "house", whole, 2, 0.0))
            rate = CAPPED_MB * 1e6
            capped_one, _ = asyncio.run(fetched(root / "house", whole, 1, rate))
            capped_two, _ = asyncio.run(fetched(root / "house", whole, 2, rate))
            rows.append(
                {
                    "copy_MB_s": size / copy_s / 1e6,
                    "one_MB_s": size / one_s / 1e6,
                    "one_against_copy": copy_s / one_s,
                    "one_against_floor": floor_s / one_s,
                    "two_against_one": one_s / two_s,
                    "two_against_one_capped": capped_one / capped_two,
                    "capped_one_of_its_rate": size / capped_one / rate,
                    "cpu_s_per_GB_copy": copy_cpu / size * 1e9,
                    "cpu_s_per_GB_floor": floor_cpu / size * 1e9,
                    "cpu_s_per_GB_one": one_cpu / size * 1e9,
                    "cpu_s_per_GB_two": two_cpu / size * 1e9,
                }
            )
        medians = {name: round(statistics.median(r[name] for r in rows), 2) for name in rows[0]}
    return {"cores": os.cpu_count(), "MB": round(size / 1e6), **medians}
