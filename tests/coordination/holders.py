"""Workers and models for tests, and a real Redis server."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mesh.coordination.records import (
    ModelRef,
    ModelWorker,
    TensorDescriptor,
    WorkerKind,
    WorkerPlace,
)
from mesh.types import LayerRange, ModelId, NodeId

MODEL = ModelRef(ModelId("deepseek-ai/DeepSeek-V3"), "ab" * 32)
OTHER = ModelRef(ModelId("deepseek-ai/DeepSeek-V3"), "cd" * 32)


def tensors(count: int, padding: int = 0) -> tuple[TensorDescriptor, ...]:
    return tuple(
        TensorDescriptor(
            f"model.layers.{n}.{'x' * padding}weight", 2**63 + n, "bfloat16", 2**64 - 1
        )
        for n in range(count)
    )


def worker(
    rank: int,
    layers: str = "0-3",
    holder: str = "attic",
    *,
    count: int = 2,
    at: int = 1_769_568_000,
) -> ModelWorker:
    place = WorkerPlace(
        NodeId(holder), WorkerKind.SHARD, LayerRange.parse(layers), f"wss://10.0.0.{rank % 200}:1"
    )
    return ModelWorker(rank, place, tensors(count), at)


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something that nothing tells of."""
    async with asyncio.timeout(30):
        while not await is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@dataclass
class Told:
    """Collects warnings."""

    warnings: list[str] = field(default_factory=list)

    def __call__(self, why: str) -> None:
        self.warnings.append(why)


def sqlite_threads() -> set[threading.Thread]:
    """Those of aiosqlite: each keeps a process from its end."""
    return {each for each in threading.enumerate() if "connection_worker" in each.name}


@dataclass
class RedisServer:
    """A Redis of one test module's own."""

    directory: Path
    port: int = 0
    password: str = ""
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        user = f":{self.password}@" if self.password else ""
        return f"redis://{user}127.0.0.1:{self.port}/0"

    def start(self) -> None:
        binary = shutil.which("redis-server")
        assert binary is not None
        if not self.port:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.port = free.getsockname()[1]
        self._process = subprocess.Popen(
            [
                binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                "--appendonly", "no", "--dir", str(self.directory), "--daemonize", "no",
                *(["--requirepass", self.password] if self.password else []),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(10)

    async def wait_up(self) -> None:
        async with asyncio.timeout(20):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except OSError:
                    await asyncio.sleep(0.02)
                    continue
                writer.close()
                await writer.wait_closed()
                return


@asynccontextmanager
async def redis_server(directory: Path, password: str = "") -> AsyncIterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip(
            "a real Redis is what this tests, and there is no program redis-server on the PATH"
            " (Debian: apt install redis-server)"
        )
    server = RedisServer(directory, password=password)
    await asyncio.to_thread(server.start)
    try:
        await server.wait_up()
        yield server
    finally:
        await asyncio.to_thread(server.stop)
