from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest

from mesh.shard.runtime import SpanRuntime
from mesh.supervise import Child
from mesh.types import LayerRange
from tests import secure
from tests.shard.asker import Asker
from tests.shard.spans import checkpoint, relative_error, rows, runtime, step

TIMEOUT_S = 60.0


class Daemon:
    """The daemon's side of a shard process: every map it says, by op."""

    def __init__(self) -> None:
        self._said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.closed = asyncio.Event()

    async def start(self) -> Child:
        return await Child.start(
            "mesh.shard.host",
            name="shards",
            on_message=self._said.put_nowait,
            on_closed=self.closed.set,
        )

    async def hears(self, op: str) -> dict[str, Any]:
        async with asyncio.timeout(TIMEOUT_S):
            while (message := await self._said.get())["op"] != op:
                pass
        return message


@pytest.fixture
def served() -> tuple[dict[str, Any], SpanRuntime]:
    manifest = checkpoint()
    shard = {
        "directory": str(manifest.directory), "model_id": "toy", "layers": "1-3", "dtype": "auto",
        "max_concurrent_streams": 2, "kv_tokens": 4096, "eviction_idle_s": 60.0,
        "advertise_host": "127.0.0.2",
    }  # fmt: skip
    return shard, runtime(layers=LayerRange(1, 4))


async def test_a_shard_process_from_start_to_stop(
    served: tuple[dict[str, Any], SpanRuntime],
) -> None:
    shard, span = served
    daemon = Daemon()
    child = await daemon.start()
    child.channel.send({"op": "start", **secure.start_command(None)})
    listening = await daemon.hears("listening")
    assert listening["device"] == "cpu"
    assert len(listening["reasons"]) == 2

    child.channel.send({"op": "load", "shard": shard | {"directory": "/nowhere"}})
    failed = await daemon.hears("failed")
    assert failed["error"]["code"] == "model_not_found"
    assert failed["shard"]["directory"] == "/nowhere"
    child.channel.send({"op": "dance"})
    assert (await daemon.hears("failed"))["error"]["code"] == "bad_request"

    child.channel.send({"op": "load", "shard": shard})
    loaded = await daemon.hears("loaded")
    described = loaded["descriptor"]
    assert described["shard_id"] == "toy:1-3"
    assert described["layer_range"] == "1-3"
    assert described["endpoint"] == f"wss://127.0.0.2:{listening['port']}"
    assert described["dtype"] == "fp32"
    assert "/t1/" in described["determinism_class"]
    assert loaded["bytes_read"] > 0

    child.channel.send({"op": "load", "shard": shard})
    assert "already loaded" in (await daemon.hears("failed"))["error"]["message"]

    asker = Asker()
    link = await secure.dial("127.0.0.1", listening["port"], asker)
    asker.use(link)
    await asker.open(weights_sha256=described["weights_sha256"], start=1, stop=4)
    found = await asker.step(0, 0, rows(30))
    assert relative_error(found, step(span, span.new_cache(64), 0, rows(30))) < 1e-5
    health: dict[str, Any] = {}
    while not health.get("active_streams"):
        (health,) = (await daemon.hears("health"))["shards"]
    assert health["shard_id"] == "toy:1-3"
    assert health["loaded"]
    assert (health["kv_tokens_used"], health["kv_tokens"]) == (128, 4096)
    assert health["rss_mb"] > 0

    child.channel.send({"op": "unload", "shard_id": "toy:1-3"})
    assert (await daemon.hears("unloaded"))["shard_id"] == "toy:1-3"
    child.channel.send({"op": "stop", "grace_s": 0.0})
    assert await child.wait(TIMEOUT_S) == 0
    link.close()
    child.channel.close()


async def test_the_process_ends_with_its_parent() -> None:
    daemon = Daemon()
    child = await daemon.start()
    child.channel.close()  # what the child sees when the daemon is gone, however it went
    assert await child.wait(TIMEOUT_S) == 0


def test_importing_the_package_loads_no_torch() -> None:
    code = (
        "import mesh.shard, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}  # noqa: PTH109
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    )
