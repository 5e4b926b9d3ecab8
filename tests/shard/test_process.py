from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from mesh.errors import (
    BadCheckpoint,
    BadRequest,
    BadValue,
    Busy,
    ConnectFailed,
    DeviceLost,
    MeshError,
    ModelNotFound,
)
from mesh.identity.tls import TlsMaterial
from mesh.pipeline.commands import Credit
from mesh.processes.child import Child
from mesh.processes.exchange import Exchange
from mesh.processes.lifecycle import SilenceLimits
from mesh.processes.messages import (
    Alive,
    Handlers,
    LastWords,
    Loads,
    ProcessMessage,
    Request,
    Stop,
    Trust,
)
from mesh.shard.commands import Health, Listening, Load, Pause, StartShards, Withdrawn
from mesh.shard.supervisor import ShardSupervisor
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange
from mesh.wire.connection import WebSocketLink
from mesh.wire.websocket import connect
from tests import secure
from tests.identity.support import Party, Recorder
from tests.shard import doomed_host
from tests.shard.asker import Asker
from tests.shard.hosts import hosted
from tests.shard.spans import checkpoint, relative_error, rows, runtime, step

TIMEOUT_S = 60.0
SAID = (Alive, LastWords, Loads, Withdrawn, Health)
A = TypeVar("A")
M = TypeVar("M", bound=ProcessMessage)


class Daemon:
    """The daemon's side of a shard process: everything it says, by its class, and its answers."""

    def __init__(self) -> None:
        self._said: asyncio.Queue[ProcessMessage] = asyncio.Queue()
        understood: Handlers = dict.fromkeys(SAID, self._said.put_nowait)
        self._exchange = Exchange(understood, self._send)
        self.closed = asyncio.Event()

    async def start(self) -> Child:
        self.child = await Child.start(
            "mesh.shard.process",
            name="shards",
            on_message=self._exchange.read,
            on_closed=self.closed.set,
        )
        return self.child

    def _send(self, message: ProcessMessage) -> None:
        self.child.channel.send(message)

    def ask(self, request: Request[A]) -> asyncio.Future[A]:
        return self._exchange.ask(request)

    async def listens(self, start: StartShards | None = None) -> Listening:
        """Where it does, once it is told to."""
        return await self.ask(start or secure.start_command())

    async def hears(self, kind: type[M]) -> M:
        """The next message of this kind; those before it are dropped."""
        async with asyncio.timeout(TIMEOUT_S):
            while not isinstance(message := await self._said.get(), kind):
                pass
        return message

    def forget(self) -> None:
        """Drop what nobody heard yet."""
        while not self._said.empty():
            self._said.get_nowait()


@pytest.fixture
def served() -> tuple[dict[str, Any], TorchRuntime]:
    manifest = checkpoint()
    shard = {
        "directory": str(manifest.directory), "model_id": "toy", "layers": "1-3", "dtype": "auto",
        "max_concurrent_streams": 2, "kv_tokens": 4096, "eviction_idle_s": 60.0,
        "advertise_host": "127.0.0.2",
    }  # fmt: skip
    return shard, runtime(layers=LayerRange(1, 4))


async def test_a_shard_process_from_start_to_stop(
    served: tuple[dict[str, Any], TorchRuntime],
) -> None:
    shard, span = served
    daemon = Daemon()
    child = await daemon.start()
    listening = await daemon.listens()
    assert listening.device == "cpu"
    assert len(listening.reasons) == 2

    request = secure.request(**shard)
    with pytest.raises(ModelNotFound):
        await daemon.ask(Load(replace(request, directory=Path("/nowhere"))))

    loaded = await daemon.ask(Load(request))
    described = loaded.descriptor
    assert described.shard_id == "toy:1-3"
    assert described.layers == LayerRange(1, 4)
    assert described.endpoint == f"wss://127.0.0.2:{listening.port}"
    assert described.dtype == "fp32"
    assert "/t1/" in described.determinism_class
    assert loaded.bytes_read > 0

    with pytest.raises(MeshError, match="already loaded"):
        await daemon.ask(Load(request))

    asker = Asker()
    link = await secure.dial("127.0.0.1", listening.port, asker)
    asker.use(link)
    await asker.open(weights_sha256=described.weights_sha256, start=1, stop=4)
    found = await asker.step(0, 0, rows(30))
    assert relative_error(found, step(span, span.new_cache(64), 0, rows(30))) < 1e-5
    daemon.forget()  # what it said before it had one
    (report,) = (health := await daemon.hears(Health)).shards
    while not report.health.active_streams:
        (report,) = (health := await daemon.hears(Health)).shards
    assert report.shard_id == "toy:1-3"
    assert report.load.loaded
    assert (report.load.kv_tokens_used, report.load.kv_tokens) == (128, 4096)
    assert health.rss_mb > 0
    child.channel.send(Stop())
    assert await child.wait(TIMEOUT_S) == 0
    link.close()
    child.channel.close()


async def test_a_session_is_on_the_shard_that_its_layers_name_among_others_that_have_them(
    served: tuple[dict[str, Any], TorchRuntime], tmp_path: Path
) -> None:
    shard, span = served
    rounded = shard | {"layers": "0-3", "quant": "int8"}
    async with secure.hosting(tmp_path, rounded, shard) as host:
        by_format = {each.descriptor.dtype: each.descriptor for each in host.serving}
        assert set(by_format) == {"int8", "fp32"}
        plain = by_format["fp32"]
        asker = Asker()
        port = int(plain.endpoint.rpartition(":")[2])
        asker.use(await secure.dial("127.0.0.1", port, asker))
        for number in range(2):
            await asker.open(number, weights_sha256=plain.weights_sha256, start=1, stop=4)
            found = await asker.step(0, 0, rows(30), session=number)
            assert relative_error(found, step(span, span.new_cache(64), 0, rows(30))) < 1e-5
        with pytest.raises(Busy):  # the other has room, and computes something else
            await asker.open(2, weights_sha256=plain.weights_sha256, start=1, stop=4)
        asker.link.close()


async def test_the_process_ends_with_its_parent() -> None:
    daemon = Daemon()
    child = await daemon.start()
    child.channel.close()  # what the child sees when the daemon is gone, however it went
    assert await child.wait(TIMEOUT_S) == 0


async def test_a_shard_that_is_wanted_at_home_while_it_loads_is_served_all_the_same(
    served: tuple[dict[str, Any], TorchRuntime],
) -> None:
    shard, _ = served
    changed = asyncio.Event()
    host = ShardSupervisor(secure.start_command(), [secure.request(**shard)], changed.set)
    host.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await secure.settled(host)
            assert host.pid is not None
            os.kill(host.pid, signal.SIGKILL)  # during an answer, say
            while host.shards:
                changed.clear()
                await changed.wait()
            ours, too = await asyncio.gather(
                *(host.ensure(secure.request(**shard)) for _ in range(2))
            )
            assert ours is too
            assert host.shards == {ours.descriptor.shard_id: ours}
            assert not host.private
            assert not host.failed
    finally:
        await host.stop()


async def test_what_was_loaded_at_home_is_served_only_where_it_is_asked_for_just_so(
    served: tuple[dict[str, Any], TorchRuntime],
) -> None:
    shard, _ = served
    few, more = (secure.request(**(shard | {"kv_tokens": tokens})) for tokens in (300, 600))
    async with secure.hosting(None) as host, asyncio.timeout(TIMEOUT_S):
        private = await host.ensure(few)
        assert await host.serve(few) is private
        await host.drop(few.shard_id, 0.0)
        await host.ensure(few)
        longer = await host.serve(more)
        assert longer.descriptor.kv_tokens == 600
        assert host.shards == {few.shard_id: longer}
        assert not host.private
        # For itself as well, this node has it as it was asked for last.
        await host.drop(few.shard_id, 0.0)
        assert (await host.ensure(few)).descriptor.kv_tokens == 300
        assert (await host.ensure(more)).descriptor.kv_tokens == 600


BROKEN: dict[str, dict[str, Any]] = {
    "refused by its own class": {"num_attention_heads": 5},
    "divides by nothing": {"num_key_value_heads": 0},
    "has an activation nobody knows": {"hidden_act": "zzz"},
}


@pytest.mark.parametrize("why", BROKEN)
async def test_a_model_that_cannot_be_loaded_leaves_the_others_served(
    served: tuple[dict[str, Any], TorchRuntime], why: str, tmp_path: Path
) -> None:
    shard, _ = served
    broken = await asyncio.to_thread(shutil.copytree, shard["directory"], tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text()) | BROKEN[why]
    (broken / "config.json").write_text(json.dumps(config))
    shards = ({**shard, "directory": str(broken), "model_id": "broken"}, shard)
    requests = [secure.request(**each) for each in shards]
    host = ShardSupervisor(secure.start_command(), requests, lambda: None)
    host.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(BadCheckpoint):
                await secure.settled(host)
        assert list(host.shards) == ["toy:1-3"]
        assert list(host.failed) == ["broken:1-3"]
    finally:
        await host.stop()


async def test_who_needs_layers_of_a_process_whose_device_is_gone_hears_so(
    served: tuple[dict[str, Any], TorchRuntime],
) -> None:
    shard, _ = served
    async with secure.hosting(None, device="cuda:99") as host, asyncio.timeout(TIMEOUT_S):
        for need in (host.ensure, host.serve):  # before that is known, and then
            with pytest.raises(BadValue, match="cuda:99"):
                await need(secure.request(**shard))


async def test_what_cannot_be_loaded_in_one_way_is_tried_in_another(
    served: tuple[dict[str, Any], TorchRuntime], tmp_path: Path
) -> None:
    shard, _ = served
    odd = await asyncio.to_thread(shutil.copytree, shard["directory"], tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text()) | {"hidden_act": "tanh"}
    (odd / "config.json").write_text(json.dumps(config))
    plain = secure.request(**{**shard, "directory": str(odd)})
    async with secure.hosting(None) as host, asyncio.timeout(TIMEOUT_S):
        few = replace(plain, quant="int8")
        for _ in range(2):
            with pytest.raises(BadRequest, match="cannot be served in int8"):
                await host.serve(few)
        assert (await host.serve(plain)).descriptor.dtype == "fp32"


async def test_pausing_and_stopping_do_not_wait_for_a_shard_that_loads(
    served: tuple[dict[str, Any], TorchRuntime],
) -> None:
    shard, _ = served
    daemon = Daemon()
    child = await daemon.start()
    await daemon.listens()
    loading = daemon.ask(Load(secure.request(**shard)))
    await daemon.ask(Pause(paused=True))
    assert not loading.done()
    await loading
    late = daemon.ask(Load(secure.request(**{**shard, "layers": "0-3"})))
    child.channel.send(Stop())
    assert await child.wait(TIMEOUT_S) == 0
    await daemon.closed.wait()
    assert not late.done()
    child.channel.close()


@pytest.mark.skipif(sys.platform != "linux", reason="limits another process with prlimit")
async def test_a_revoked_member_loses_its_link_even_when_no_descriptor_is_left() -> None:
    import resource

    guest, late = Party("guest"), Party("late")
    start = secure.start_command(tls=TlsMaterial.of(secure.KEY, [guest.certificate]))
    daemon = Daemon()
    child = await daemon.start()
    port = (await daemon.listens(start)).port

    async def dial(party: Party, handler: Recorder) -> WebSocketLink:
        tls = (await party.trusting(Party("host", secure.KEY))).client(secure.KEY.node_id)
        return await connect("127.0.0.1", port, hello=party.hello(), handler=handler, ssl=tls)

    linked = Recorder()
    await dial(guest, linked)
    before = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (3, before[1]))
    child.channel.send(Trust((late.certificate,)))
    async with asyncio.timeout(TIMEOUT_S):
        await linked.ended.wait()
    daemon.forget()
    await daemon.hears(Health)  # the process lives on
    resource.prlimit(child.pid, resource.RLIMIT_NOFILE, before)
    async with asyncio.timeout(TIMEOUT_S):
        while not await _comes_in(dial(late, Recorder())):  # not before it has tried again
            await daemon.hears(Health)
    assert not await _comes_in(dial(guest, Recorder()))
    await child.stop(TIMEOUT_S)


async def _comes_in(dialled: Awaitable[WebSocketLink]) -> bool:
    try:
        (await dialled).close()
    except ConnectFailed:
        return False
    return True


async def test_a_task_of_the_process_that_fails_ends_it() -> None:
    daemon = Daemon()
    child = await daemon.start()
    await daemon.listens()
    child.channel.send(Trust((b"no certificate",)))
    async with asyncio.timeout(TIMEOUT_S):
        await daemon.closed.wait()
    assert await child.wait(TIMEOUT_S) != 0


async def test_a_process_that_is_told_what_it_does_not_know_says_so_and_ends() -> None:
    daemon = Daemon()
    child = await daemon.start()
    child.channel.send(Credit("r", 1))  # an asker's command
    error = (await daemon.hears(LastWords)).error
    assert isinstance(error, BadRequest)
    assert "Credit" in error.message
    assert await child.wait(TIMEOUT_S) != 0


async def test_shards_move_to_another_port_when_theirs_was_taken_meanwhile() -> None:
    changed = asyncio.Event()
    host = ShardSupervisor(secure.start_command(), (), changed.set)

    async def listens_elsewhere(port: int | None) -> int:
        async with asyncio.timeout(TIMEOUT_S):
            while host.port in (None, port):
                changed.clear()
                await changed.wait()
        assert host.port is not None
        return host.port

    host.start()
    try:
        port = await listens_elsewhere(None)
        assert host.pid is not None
        os.kill(host.pid, signal.SIGKILL)
        async with asyncio.timeout(TIMEOUT_S):
            while host.ending is None:
                changed.clear()
                await changed.wait()
        with socket.create_server(("127.0.0.1", port)):
            await listens_elsewhere(port)
        assert not host.failed
    finally:
        await host.stop()


async def test_a_process_that_stands_still_serves_nothing_and_is_replaced(
    served: tuple[dict[str, Any], TorchRuntime],
) -> None:
    shard, _ = served
    limits = SilenceLimits(suspect_s=2.0, replace_s=4.0)
    async with hosted(shard, limits=limits) as (host, sees):
        (before,) = host.serving
        stuck = host.pid
        assert stuck is not None
        os.kill(stuck, signal.SIGSTOP)
        await sees(lambda: not host.serving)
        assert host.pid == stuck, "it is not offered before it is given up"
        await sees(lambda: bool(host.serving))
        assert host.pid != stuck
        assert host.ending is not None
        assert host.ending.hung
        (after,) = host.serving
        assert after.descriptor.endpoint == before.descriptor.endpoint


@pytest.mark.parametrize(
    ("doom", "reason"),
    [
        (doomed_host.ASSERTS, "device-side assert triggered"),
        (doomed_host.STANDS_STILL, "at one step for"),
    ],
)
async def test_a_process_whose_device_does_nothing_more_is_replaced(
    served: tuple[dict[str, Any], TorchRuntime], doom: str, reason: str
) -> None:
    shard, span = served
    doomed = {**shard, "model_id": doom}
    async with hosted(doomed, module="tests.shard.doomed_host") as (host, sees):
        first = host.pid
        assert host.port is not None
        asker = Asker()
        asker.use(await secure.dial("127.0.0.1", host.port, asker))
        (here,) = host.serving
        sha = here.descriptor.weights_sha256
        await asker.open(model_id=doom, weights_sha256=sha, start=1, stop=4)
        found = await asker.step(0, 0, rows(3))
        assert relative_error(found, step(span, span.new_cache(64), 0, rows(3))) < 1e-5
        asker.send_step(1, 3, rows(1))
        await sees(lambda: not host.serving)
        await sees(lambda: bool(host.serving))
        assert host.pid != first
        assert host.ending is not None
        assert isinstance(host.ending.said, DeviceLost)
        assert reason in str(host.ending)


def test_importing_the_package_loads_no_torch() -> None:
    code = (
        "import mesh.shard, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}  # noqa: PTH109
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    )
