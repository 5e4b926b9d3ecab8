"""Child processes and their channel: what reads nothing is cut off, what fails leaves nothing."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from mesh.errors import LinkLost
from mesh.processes.channel import MAX_UNREAD_BYTES, Channel
from mesh.processes.child import Child
from mesh.processes.messages import Trust, encode
from mesh.processes.warm_parent import end_warm_parent


def _open_files() -> set[str]:
    return {fd.name for fd in Path("/proc/self/fd").iterdir()}


async def test_a_start_that_fails_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    await asyncio.to_thread(end_warm_parent)
    monkeypatch.setattr("sys.executable", "/nonexistent")
    before = _open_files()
    with pytest.raises(OSError, match="nonexistent"):
        await Child.start("m", name="m", on_message=print, on_closed=print)
    assert _open_files() == before


async def test_whoever_reads_nothing_is_cut_off() -> None:
    ours, theirs = socket.socketpair()
    closed = asyncio.Event()
    channel = await Channel.open(ours, print, closed.set)

    def send(count: int) -> None:
        for _ in range(count):
            channel.send(Trust((bytes(1 << 20),)))

    with theirs:
        send(MAX_UNREAD_BYTES >> 20)
        with pytest.raises(LinkLost, match="reads nothing"):
            send(4)
        async with asyncio.timeout(10):
            await closed.wait()
        with pytest.raises(LinkLost, match="gone"):
            channel.send(Trust(()))


async def test_what_is_sent_soon_goes_with_what_comes_in_the_same_turn() -> None:
    ours, theirs = socket.socketpair()
    channel = await Channel.open(ours, print, lambda: None)
    with theirs:
        theirs.setblocking(False)
        for mark in (b"1", b"2"):
            channel.send(Trust((mark,)), soon=True)
        with pytest.raises(BlockingIOError):
            theirs.recv(1000)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [mark in theirs.recv(1000, socket.MSG_PEEK) for mark in (b"1", b"2")] == [True] * 2


@pytest.mark.parametrize("ends", [False, True])
async def test_what_is_sent_soon_stays_in_order(ends: bool) -> None:
    ours, theirs = socket.socketpair()
    said: asyncio.Queue[bytes] = asyncio.Queue()
    channel = await Channel.open(ours, print, lambda: None)
    reader = await Channel.open(theirs, said.put_nowait, lambda: None)
    messages = [Trust((bytes([number]),)) for number in range(3)]
    channel.send(messages[0], soon=True)
    channel.send(messages[1])
    channel.send(messages[2], soon=True)
    if ends:
        channel.close()
    async with asyncio.timeout(10):
        assert [await said.get() for _ in messages] == [encode(message) for message in messages]
    channel.close()
    reader.close()
