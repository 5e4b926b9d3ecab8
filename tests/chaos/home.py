"""A shard process in a network namespace, held by a Python of its own that was started in there.

The warm parent of the process that runs tests is outside, and what it forks would be as well.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mesh.identity.keys import parse_pem
from mesh.identity.tls import TlsMaterial
from mesh.models.builtin import checkpoint_dir
from mesh.wire.messages import Hello
from tests import secure
from tests.chaos.lab import MODEL, port_of
from tests.chaos.namespaces import Namespace

START_LIMIT_S = 120.0
_STOP_LIMIT_S = 20.0


@asynccontextmanager
async def home(space: Namespace, directory: Path, *layers: str) -> AsyncIterator[int]:
    """Serve these layers of the built-in model in `space` to this process; gives the port."""
    told = {
        "key": secure.KEY.to_pem().decode(), "host": space.there,
        "layers": layers, "cache_dir": str(directory),
    }  # fmt: skip
    inside = await asyncio.create_subprocess_exec(
        *space.inside(sys.executable, "-m", __name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert inside.stdin is not None
    assert inside.stdout is not None
    try:
        inside.stdin.write(json.dumps(told).encode() + b"\n")
        async with asyncio.timeout(START_LIMIT_S):
            line = await inside.stdout.readline()
        assert line, "the home ended before it served"
        yield int(line)
    finally:
        inside.stdin.close()
        async with asyncio.timeout(_STOP_LIMIT_S):
            await inside.wait()


async def _serve(told: dict[str, Any]) -> None:
    there = told["host"]
    loads = (
        {"directory": str(checkpoint_dir()), "model_id": MODEL, "layers": span, "dtype": "fp32"}
        for span in told["layers"]
    )
    hosting = secure.hosting(
        Path(told["cache_dir"]), *loads, listen_host=there,
        hello=Hello(there, there, "tensors", "test"),
        tls=TlsMaterial.of(parse_pem(told["key"].encode()), []),
    )  # fmt: skip
    async with hosting as host:
        print(port_of(host), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.stdin.readline())))
