"""What is said of a daemon of this machine that ends while it is asked."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mesh.client import client_of
from mesh.errors import LinkLost, NotRunning
from mesh.runtime import DaemonRecord
from tests.discovery.test_peering import free_ports


def record_at(port: int) -> DaemonRecord:
    return DaemonRecord.for_this_process(
        api_url=f"http://127.0.0.1:{port}", api_port=port, port=1, api_key=None
    )


async def test_a_daemon_that_has_ended_is_not_said_to_run() -> None:
    record = await asyncio.to_thread(record_at, *free_ports(1))
    ended = replace(record, create_time=record.create_time - 60)
    async with client_of(ended) as client:
        with pytest.raises(NotRunning, match=f"process {ended.pid}, has ended") as told:
            await client.models()
    assert "`hearthnet up`" in told.value.fix


async def test_a_daemon_that_is_killed_over_a_question_is_not_taken_for_another_port() -> None:
    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(end, "127.0.0.1", 0)
    record = await asyncio.to_thread(record_at, server.sockets[0].getsockname()[1])
    async with server, client_of(record) as client:
        with pytest.raises(LinkLost, match="ended before it had answered") as told:
            await client.models()
    assert "address" not in told.value.fix
