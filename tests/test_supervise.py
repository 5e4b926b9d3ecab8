"""Child processes and their channel: what reads nothing is cut off, what fails leaves nothing."""

from __future__ import annotations

import asyncio
import socket

import pytest

from mesh import channel as channel_module
from mesh.channel import Channel
from mesh.errors import LinkLost
from mesh.supervise import Child


async def test_a_start_that_fails_leaves_no_socket_open(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = socket.socketpair()
    monkeypatch.setattr(socket, "socketpair", lambda: ends)
    monkeypatch.setattr("sys.executable", "/nonexistent")
    with pytest.raises(OSError, match="nonexistent"):
        await Child.start("m", name="m", on_message=print, on_closed=print)
    assert [end.fileno() for end in ends] == [-1, -1]


async def test_whoever_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_UNREAD_BYTES", 8 << 20)
    ours, theirs = socket.socketpair()
    closed = asyncio.Event()
    channel = await Channel.open(ours, print, closed.set)

    def send(count: int) -> None:
        for _ in range(count):
            channel.send({"blob": bytes(1 << 20)})

    with theirs:
        send(8)
        with pytest.raises(LinkLost, match="reads nothing"):
            send(4)
        async with asyncio.timeout(10):
            await closed.wait()
        with pytest.raises(LinkLost, match="gone"):
            channel.send({})
