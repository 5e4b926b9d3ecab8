"""The shard's side on an event loop: admission, parts of messages, the end of sessions."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pytest
import torch

from mesh.errors import (
    BadRequest,
    Busy,
    DeviceFailed,
    LinkLost,
    MeshError,
    NoRoute,
    SessionGone,
    VersionMismatch,
)
from mesh.interventions.channel import ANSWER, ERROR, HEAD, SocketChannel
from mesh.interventions.relay import HopSessions, relay
from mesh.interventions.skeleton import job_model, load_skeleton
from mesh.models.cuts import ANYWHERE
from mesh.models.load import load_span
from mesh.pipeline.hop import Patience
from mesh.pipeline.links import HopLink, HopLinks
from mesh.pipeline.route import HopLost
from mesh.shard.admission import LayerShape
from mesh.shard.scheduler import Scheduler
from mesh.shard.server import ShardServer
from mesh.shard.service import ShardService
from mesh.shard.settings import ShardSettings
from mesh.shard.taps import server as server_module
from mesh.shard.taps.parts import MAX_MESSAGE_BYTES
from mesh.shard.taps.server import TapServer, TapSettings
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import Endpoint, LayerRange, ModelId, NodeId, RouteHop, ShardDescriptor, shard_id
from mesh.wire.link import LinkHandler
from mesh.wire.messages import Blob, BlobKind, Hello, Step
from tests.interventions.cases import CASES, GRADIENTS, PROMPT, Parts
from tests.interventions.worlds import CPU, LAYERS, checkpoint, equal, whole
from tests.shard.asker import settled
from tests.shard.spans import plain_kernels
from tests.wire.memory import MemoryLink, link_pair

WHOLE = LayerRange(0, LAYERS)
MODEL = ModelId("m")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass
class Shard:
    """One shard of the whole model, and a link to it."""

    taps: TapServer
    service: ShardService
    queue: Scheduler
    lines: HopLinks
    links: list[MemoryLink]
    route: list[RouteHop]


def _runtime() -> TorchRuntime:
    loaded = load_span(checkpoint("llama"), WHOLE, dtype=torch.float32, device=CPU)
    return TorchRuntime(loaded, device=CPU, dtype=torch.float32)


@asynccontextmanager
async def shard(
    settings: TapSettings | None = None,
    *,
    say: Callable[[Hello], Hello] = lambda hello: hello,
    eviction_idle_s: float = 600.0,
) -> AsyncIterator[Shard]:
    """`say` is what becomes of both ends' hellos on their way."""
    manifest = await asyncio.to_thread(checkpoint, "llama")
    descriptor = ShardDescriptor(
        shard_id=shard_id(MODEL, WHOLE), model_id=MODEL, weights_sha256=manifest.weights_sha256,
        layers=WHOLE, total_layers=LAYERS, vram_required_mb=1, max_concurrent_streams=4,
        host=NodeId("n" * 64), node_name="attic", endpoint=Endpoint("wss://127.0.0.1:1"),
        dtype="fp32", determinism_class="test", advertised_at=datetime.now(UTC),
    )  # fmt: skip
    queue = Scheduler()
    server = ShardServer(
        descriptor, _runtime, ShardSettings(eviction_idle_s=eviction_idle_s),
        shape=LayerShape(manifest.hidden_size, manifest.hidden_size, ANYWHERE), scheduler=queue,
    )  # fmt: skip

    def plain() -> Any:
        return load_span(manifest, WHOLE, dtype=torch.float32, device=CPU)

    taps = TapServer(server, plain, queue, settings)
    service = ShardService()
    service.add(server, taps)
    links: list[MemoryLink] = []

    async def dial(_host: str, _port: int, handler: LinkHandler) -> MemoryLink:
        ours, theirs = link_pair(
            Hello(_host, "job", "tensors", "test"), Hello("n" * 64, "attic", "tensors", "test")
        )
        for end in (ours, theirs):
            end.session.peer = say(end.peer)
        ours.attach(handler)
        if settings is not None and isinstance(handler, HopLink):
            handler.lease_s = settings.silence_s  # as a host's hello tells it
        theirs.attach(service.handler(theirs))
        links.append(ours)
        return ours

    lines = HopLinks(dial)
    yield Shard(taps, service, queue, lines, links, [RouteHop(descriptor, WHOLE)])
    await lines.close()
    taps.shutdown()
    queue.close()


async def run_job(sessions: HopSessions, job: Callable[[Parts], Any]) -> Any:
    ours, theirs = socket.socketpair()
    passing = asyncio.create_task(relay(ours, sessions), name="relay")

    def work() -> Any:
        with theirs:
            skeleton = load_skeleton(checkpoint("llama"), dtype=torch.float32)
            return job(Parts(job_model(skeleton, SocketChannel(theirs), [WHOLE], print)))

    try:
        return await asyncio.to_thread(work)
    finally:
        await asyncio.wait_for(passing, 10)


async def test_messages_of_many_parts() -> None:
    def job(parts: Parts) -> Any:
        return CASES["every_layer"](parts), GRADIENTS["at_boundaries"](parts)

    async with shard(TapSettings(part_bytes=1000)) as here:
        sessions = await HopSessions.open(here.route, here.lines, part_bytes=700)
        found = await run_job(sessions, job)
        sessions.close()
    expected = await asyncio.to_thread(lambda: job(Parts(whole("llama"))))
    equal(found, expected, 1e-4)


async def test_a_message_goes_on_while_it_arrives() -> None:
    """No more than a part of what a job sends is ever held for it."""
    async with shard() as here:
        sessions = await HopSessions.open(here.route, here.lines, part_bytes=1000)
        ours, theirs = socket.socketpair()
        passing = asyncio.create_task(relay(ours, sessions), name="relay")
        reader, writer = await asyncio.open_connection(sock=theirs)
        (place,) = here.taps.open_sessions
        for part in range(1, 4):
            if part == 1:
                writer.write(HEAD.pack(0, ANSWER, 3500))
            writer.write(bytes(1000))
            await settled(lambda part=part: len(place.message) == 1000 * part)
        writer.write(bytes(500) + HEAD.pack(7, ANSWER, 2500) + bytes(2500))
        writer.write(HEAD.pack(0, ANSWER, 4) + bytes(4))
        for status, said in ((ANSWER, b"malformed"), (ERROR, b"no hop 7"), (ANSWER, b"malformed")):
            async with asyncio.timeout(10):
                _, found, length = HEAD.unpack(await reader.readexactly(HEAD.size))
                assert (found, said in await reader.readexactly(length)) == (status, True)
        writer.close()
        async with asyncio.timeout(10):
            await passing
        sessions.close()


async def test_an_answer_may_take_longer_than_opening() -> None:
    """A long prompt on a slow machine is no lost hop."""
    gate = threading.Event()
    async with shard() as here:
        sessions = await HopSessions.open(here.route, here.lines, open_s=5.0)
        for hop in sessions.hops:
            hop._patience = Patience(0.01, 0.01)
        here.queue.visit(lambda: gate.wait(10), lambda _: None)
        (place,) = here.taps.open_sessions
        assert place.tap is not None
        meter = place.tap.meter
        held = meter.held_bytes
        running = asyncio.create_task(run_job(sessions, CASES["logits"]))
        async with asyncio.timeout(20):
            while meter.held_bytes == held:  # noqa: ASYNC110 - a session tells nobody of questions
                await asyncio.sleep(0.01)
        done, _ = await asyncio.wait({running}, timeout=0.1)
        gate.set()
        async with asyncio.timeout(20):
            found = await running
        assert not done
        assert sessions.lost is None
        sessions.close()
    expected = await asyncio.to_thread(lambda: CASES["logits"](Parts(whole("llama"))))
    equal(found, expected, 0.0)


async def test_weights_are_shared_with_chat_unless_they_are_repacked() -> None:
    with plain_kernels():
        async with shard() as here:
            sessions = await HopSessions.open(here.route, here.lines)
            chat, jobs = (each.loaded.module for each in here.taps.weights())
            assert not {*map(id, jobs.layers.modules())} & {*map(id, chat.modules())}
            theirs = {p.data_ptr() for p in chat.parameters()}
            assert {p.data_ptr() for p in jobs.layers.parameters()} <= theirs
            sessions.close()


async def test_nodes_from_before_blobs_are_told_which_one_is_too_old() -> None:
    async with shard(say=lambda hello: replace(hello, fields={})) as here:
        with pytest.raises(HopLost, match="attic is too old") as refused:
            await HopSessions.open(here.route, here.lines)
        assert isinstance(refused.value.error, VersionMismatch)
        (hop,) = here.route
        line = await here.lines.link(hop.shard.host, hop.shard.endpoint)
        line.takes_blobs = True  # an older asker looks at nothing
        with pytest.raises(HopLost, match="job is too old") as refused:
            await HopSessions.open(here.route, here.lines)
        assert isinstance(refused.value.error, VersionMismatch)
        assert here.taps.sessions == 0


async def test_parts_out_of_order_void_the_question_and_nothing_else() -> None:
    async with shard() as here:
        sessions = await HopSessions.open(here.route, here.lines)
        (session,) = here.taps.open_sessions
        answers: list[Any] = []
        question = Blob(session.number, BlobKind.QUESTION, 8, 0, b"1234")
        session.submit(question, answers.append)
        assert (answers[-1].kind, answers[-1].offset) == (BlobKind.QUESTION, 4)
        for offset in (0, 3, 8):
            with pytest.raises(BadRequest, match="A part is missing"):
                session.submit(replace(question, offset=offset, length=20), answers.append)
            assert not session.message
            session.submit(question, answers.append)
        for wrong in (
            replace(question, length=MAX_MESSAGE_BYTES + 1),
            Blob(session.number, BlobKind.ANSWER, 8, 4),
            Step(session.number, 1, 0, question.tensor),
        ):
            with pytest.raises(BadRequest):
                session.submit(wrong, answers.append)
        found = await run_job(sessions, CASES["logits"])
        sessions.close()
    expected = await asyncio.to_thread(lambda: CASES["logits"](Parts(whole("llama"))))
    equal(found, expected, 0.0)


async def test_no_more_sessions_than_the_shard_takes() -> None:
    async with shard(TapSettings(max_sessions=1)) as here:
        first = await HopSessions.open(here.route, here.lines)
        with pytest.raises(HopLost) as refused:
            await HopSessions.open(here.route, here.lines)
        assert isinstance(refused.value.error, Busy)
        first.close()
        second = await HopSessions.open(here.route, here.lines)
        assert here.taps.sessions == 1
        second.close()


async def test_a_node_leaves_a_place_for_another_and_its_own_may_have_all() -> None:
    async with shard(TapSettings(max_sessions=3)) as here:
        (hop,) = here.route

        def asked_by(name: str) -> list[RouteHop]:
            """The test's dial tells the host that it is whoever the endpoint names."""
            endpoint = Endpoint(f"wss://{name}:1")
            return [replace(hop, shard=replace(hop.shard, endpoint=endpoint))]

        eve = [await HopSessions.open(asked_by("eve"), here.lines) for _ in range(2)]
        with pytest.raises(HopLost, match="may hold 2 tap sessions here; it holds 2"):
            await HopSessions.open(asked_by("eve"), here.lines)
        ann = await HopSessions.open(asked_by("ann"), here.lines)
        for sessions in (*eve, ann):
            sessions.close()
        await settled(lambda: not here.taps.sessions)
        own = [await HopSessions.open(asked_by("n" * 64), here.lines) for _ in range(3)]
        for sessions in own:
            sessions.close()


async def test_a_job_may_think_for_longer_than_a_silent_session_is_kept() -> None:
    def job(parts: Parts) -> Any:
        first = CASES["every_layer"](parts)
        time.sleep(3.5)
        return first, CASES["every_layer"](parts)

    async with shard(TapSettings(silence_s=2.5)) as here:
        place = here.route[0].shard
        sessions = await HopSessions.open(here.route, here.lines)
        # It rests early, so that this machine may stand still for longer.
        (await here.lines.link(place.host, place.endpoint)).lease_s = 0.4
        first, second = await run_job(sessions, job)
        assert sessions.lost is None
        equal(second, first, 0.0)
        sessions.close()


async def test_a_shard_that_takes_no_sessions_does_not_say_that_waiting_helps() -> None:
    async with shard(TapSettings(max_sessions=0)) as here:
        with pytest.raises(HopLost) as refused:
            await HopSessions.open(here.route, here.lines)
        assert isinstance(refused.value.error, NoRoute)


@pytest.mark.parametrize("error", [RuntimeError("no kernel"), OSError(5, "gone"), ImportError("x")])
async def test_what_fails_while_loading_is_said_at_once(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_args: Any) -> Any:
        raise error

    async with shard() as here:
        with monkeypatch.context() as patched:
            patched.setattr(server_module, "_grow", broken)
            async with asyncio.timeout(10):
                with pytest.raises(HopLost) as refused:
                    await HopSessions.open(here.route, here.lines)
        assert isinstance(refused.value.error, DeviceFailed)
        assert "loading for interventions failed" in caplog.text
        assert here.taps.sessions == 0
        again = await HopSessions.open(here.route, here.lines)
        again.close()


async def test_other_weights_or_layers_are_refused() -> None:
    async with shard() as here:
        descriptor = here.route[0].shard
        elsewhere = [RouteHop(descriptor, LayerRange(3, 9))]
        with pytest.raises(HopLost) as refused:
            await HopSessions.open(elsewhere, here.lines)
        assert isinstance(refused.value.error, NoRoute)
        assert here.taps.sessions == 0


async def test_a_silent_session_ends() -> None:
    async with shard(TapSettings(silence_s=0.0)) as here:
        sessions = await HopSessions.open(here.route, here.lines)
        with pytest.raises(MeshError):
            await run_job(sessions, CASES["logits"])
        assert sessions.lost is not None
        assert here.taps.sessions == 0


@pytest.mark.parametrize("why", ["silence", "unloading"])
async def test_a_job_hears_at_once_that_the_shard_has_ended_its_session(why: str) -> None:
    async with shard(TapSettings(silence_s=0.2 if why == "silence" else 600.0)) as here:
        place = here.route[0].shard
        (await here.lines.link(place.host, place.endpoint)).lease_s = None  # it does not rest
        sessions, lost = await HopSessions.open(here.route, here.lines), asyncio.Event()
        sessions.on_lost(lost.set)
        if why == "unloading":
            here.taps.shutdown()
        await asyncio.wait_for(lost.wait(), 5)
        assert sessions.lost is not None
        assert isinstance(sessions.lost.error, SessionGone)


async def test_a_job_that_opens_while_its_shard_is_unloaded_keeps_no_weights_there() -> None:
    """Nobody needs what has loaded by then, and who unloads counts on the memory."""
    gate = threading.Event()
    async with shard() as here:
        busy = asyncio.create_task(here.queue.load(lambda: gate.wait(10)))
        opening = asyncio.create_task(HopSessions.open(here.route, here.lines))
        server = here.service.servers[0]
        await settled(lambda: server.weights.is_loading)
        here.taps.shutdown()
        with pytest.raises(HopLost):
            await opening
        gate.set()
        await busy
        await settled(lambda: not [t for t in asyncio.all_tasks() if t.get_name() == "shard-open"])
        await server.evict()
        assert here.taps.weights() == []


async def test_a_hop_lost_while_the_job_thinks() -> None:
    """The job gets an error of the mesh, the shard unwinds the forward that stood still."""
    reached, lost = threading.Event(), threading.Event()

    def job(parts: Parts) -> None:
        with parts.model.trace(PROMPT):
            parts.layers[2].mlp.output[:] = 0
            reached.set()
            lost.wait(10)
            parts.layers[4].output.save()

    async with shard() as here:
        sessions = await HopSessions.open(here.route, here.lines)
        running = asyncio.create_task(run_job(sessions, job))
        await asyncio.to_thread(reached.wait, 10)
        (place,) = here.taps.open_sessions
        assert place.tap is not None
        session = place.tap
        assert session._runs
        here.links[0].close("gone")
        lost.set()
        with pytest.raises(LinkLost):
            await running
        assert sessions.lost is sessions.hops[0]
        idle = asyncio.Event()
        here.queue.visit(lambda: None, lambda _: idle.set())
        await asyncio.wait_for(idle.wait(), 10)
        assert not session._runs
        assert here.taps.sessions == 0
