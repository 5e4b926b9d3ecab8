"""A daemon that can open nothing more answers those who are connected as ever.

In a process of its own: what is imported when first needed is in this one long since.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, json
from tests.api.conftest import serving
from tests.descriptors import none_left

async def asked(reader, writer, body):
    head = f"POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: {len(body)}"
    writer.write(f"{head}\\r\\nContent-Type: application/json\\r\\n\\r\\n".encode() + body)
    said = (await reader.readuntil(b"\\r\\n\\r\\n")).decode().lower()
    length = int(said.split("content-length: ")[1].split("\\r\\n")[0])
    return int(said.split()[1]), (await reader.readexactly(length)).decode()

async def main():
    async with serving() as api, asyncio.timeout(30):
        place = api.url.removeprefix("http://").rsplit(":", 1)
        reader, writer = await asyncio.open_connection(*place)
        writer.write(b"GET /healthz HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
        await reader.readuntil(b"ok\\n")  # it is accepted
        with none_left():
            for body in ({"prompt": "hi", "model": "echo"}, {"prompt": "hi", "model": "nobody's"}):
                print(*await asked(reader, writer, json.dumps(body).encode()))
        writer.close()

asyncio.run(main())
"""


def test_answers_and_refusals_open_nothing() -> None:
    command = [sys.executable, "-c", SCRIPT]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    answered, refused = ran.stdout.splitlines() or pytest.fail(ran.stderr)
    assert answered.startswith('200 {"id"'), answered
    assert refused.startswith("404 "), refused
    assert "model_not_found" in refused, refused
