"""The command as a process of its own, against a real server in front of scripted generations."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from mesh.paths import StatePaths
from mesh.runtime import DaemonRecord
from tests.api.conftest import Served, serving
from tests.warm.daemons import command

COMMAND = [sys.executable, "-m", "mesh.cli.main"]


@dataclass(frozen=True)
class Finished:
    """What a command left."""

    code: int
    out: str
    err: str


Run = Callable[..., Awaitable[Finished]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which only the test's own directories exist."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HEARTHNET_", "XDG_"))}
    return kept | {"HOME": str(tmp_path), "COLUMNS": "100", "TERM": "dumb"}


@pytest.fixture
def hearthnet(environment: dict[str, str]) -> Run:
    """Run the command to its end: ``await hearthnet("status", stdin="...", HEARTHNET_X="...")``."""

    async def run(*arguments: str, stdin: str = "", **more: str) -> Finished:
        done = await asyncio.to_thread(
            command, *arguments, stdin=stdin, timeout=30, environment=environment | more
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def fresh(environment: dict[str, str]) -> Run:
    """The same in a Python of its own, for what is decided as one starts."""

    async def run(*arguments: str, stdin: str = "", **more: str) -> Finished:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment | more,
        )
        out, err = await asyncio.wait_for(
            process.communicate(stdin.encode(errors="surrogateescape")), 30
        )
        return Finished(process.returncode or 0, out.decode(), err.decode())

    return run


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Served]:
    """A running API that the default state directory points to."""
    async with serving() as served:
        await asyncio.to_thread(_write_record, served, tmp_path / ".local/state/hearthnet")
        yield served


@asynccontextmanager
async def answering(body: bytes) -> AsyncIterator[str]:
    """The host and port of something that answers every request with this."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def _write_record(served: Served, state_dir: Path) -> None:
    record = DaemonRecord.for_this_process(
        api_url=served.url, api_port=served.server.port, port=1, api_key=None
    )
    record.write(StatePaths(state_dir).create().runtime_file)
