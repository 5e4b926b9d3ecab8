"""What a process may have open at once: enough, wherever it was started."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys

import pytest

from mesh.processes.descriptors import say_when_out
from tests.descriptors import none_left
from tests.waiting import until

SCRIPT = """
import resource
from mesh.processes.descriptors import allow_enough
allow_enough()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("limits", "after"),
    [
        ("ulimit -Sn 256", 4096),
        ("ulimit -Sn 256; ulimit -Hn 500", 500),
        ("ulimit -Sn 5000", 5000),
    ],
    ids=["as on macOS", "where no more are to be had", "where there are more"],
)
def test_as_many_as_a_house_takes(limits: str, after: int) -> None:
    shell = ["bash", "-c", f'{limits}; exec "$@"', "bash", sys.executable, "-c", SCRIPT]
    found = subprocess.run(shell, capture_output=True, text=True, check=True, timeout=60)
    assert int(found.stdout.split()[0]) == after


async def test_that_nobody_can_connect_is_said_once_and_with_what_helps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.get_running_loop()
    say_when_out(loop)
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    with socket.socket() as client, caplog.at_level(logging.WARNING):
        with none_left():
            client.connect(server.sockets[0].getsockname())
            await until(lambda: caplog.records)
        (line,) = caplog.messages
        assert "Nobody else can connect" in line
        assert "ulimit -n" in line
        loop.call_exception_handler({"message": "something else"})
        assert caplog.messages[1:] == ["something else"]
    server.close()
    await server.wait_closed()
