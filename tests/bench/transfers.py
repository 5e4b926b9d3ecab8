"""Fetching a checkpoint over loopback: from one neighbour, from two, and beside a plain copy.

The plain copy sends the file's bytes over a TCP connection to another process, which writes them:
no encryption, no hashes. Fetchers and copy share the machine's cores, which on few cores says how
much computing a byte costs rather than how well two neighbours add up; so two are also compared
with one where each may give `CAPPED_MB` a second, as over a network. CPU seconds are those of
all processes that took part, by gigabyte.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

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


def copied(source: Path, target: Path) -> float:
    """Seconds that a plain copy over a socket takes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [sys.executable, "-c", _RECEIVER, str(port), str(target)]
        receiver = subprocess.Popen(command, stdout=subprocess.PIPE)
        connection, _ = server.accept()
        started = time.perf_counter()
        with connection, source.open("rb") as file:
            connection.sendfile(file)
        assert receiver.stdout is not None
        receiver.stdout.read()
        took_s = time.perf_counter() - started
        receiver.wait(30)
        receiver.stdout.close()
    return took_s


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
        rows = []
        for _ in range(ROUNDS):
            copy_s = copied(directory / "model.safetensors", root / "copy")
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
                    "two_against_one": one_s / two_s,
                    "two_against_one_capped": capped_one / capped_two,
                    "capped_one_of_its_rate": size / capped_one / rate,
                    "cpu_s_per_GB_one": one_cpu / size * 1e9,
                    "cpu_s_per_GB_two": two_cpu / size * 1e9,
                }
            )
        medians = {key: round(statistics.median(row[key] for row in rows), 2) for key in rows[0]}
    return {"cores": os.cpu_count(), "MB": round(size / 1e6), **medians}
