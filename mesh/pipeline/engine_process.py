"""The process of one model's asker: commands from the daemon in, frames out.

Started by `mesh.pipeline.asker` as ``python -m mesh.pipeline.engine_process``. Commands: ``start``,
``shards``, ``tls``, ``generate``, ``harvest``, ``credit``, ``cancel``, ``local``, ``stop``.
Answers: ``ready`` or ``failed``, then ``frame``, ``end`` or ``error`` per generation, ``harvested``
or ``error`` per batch, ``generations`` when the live ones change, ``latencies``, and ``local`` to
have the whole model, or some ``layers``, loaded here. It opens no port.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mesh import allowances
from mesh.channel import Channel, ChannelMessage
from mesh.charge import Loading
from mesh.clock import LoopClock
from mesh.discovery.tasks import spawn
from mesh.errors import InternalError, LinkLost, MeshError, PipelineStalled, from_dict
from mesh.errors.foreseen import foreseen
from mesh.identity.tls import TlsContexts, TlsMaterial
from mesh.ledger import ResourceLedger
from mesh.pipeline.checkpoint import AskerOptions, load_asker
from mesh.pipeline.dialing import secured
from mesh.pipeline.engine import Engine, EngineSettings
from mesh.pipeline.following import Following
from mesh.pipeline.frames import decode_hop, decode_request, encode_frame
from mesh.pipeline.model import AskerModel
from mesh.pipeline.order import HarvestOrder
from mesh.pipeline.sessions import expire_regularly
from mesh.shard.failures import lost
from mesh.supervise import LOADING, attach_to_parent, end_failed
from mesh.types import LayerRange, ModelId, NodeId, RouteHop, ShardFailover, StreamFrame
from mesh.wire.messages import Hello

logger = logging.getLogger(__name__)

FRAME_CREDITS = 64
"""Frames a generation may be ahead of whoever reads its stream."""

CONSUMER_TIMEOUT_S = 300.0
EXPIRY_TICK_S = 5.0
LOCAL_LOAD_TIMEOUT_S = 300.0
REPORT_TICK_S = 0.5


@dataclass(slots=True)
class _Reader:
    """How many frames a generation may still send, and the task that runs it."""

    credits: int = FRAME_CREDITS
    refilled: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    async def take(self) -> None:
        """One frame's credit. Raises PipelineStalled when the reader takes nothing for long."""
        while self.credits <= 0:
            self.refilled.clear()
            try:
                async with asyncio.timeout(CONSUMER_TIMEOUT_S):
                    await self.refilled.wait()
            except TimeoutError:
                raise PipelineStalled(
                    f"nobody read the stream for {CONSUMER_TIMEOUT_S:g} s.", fix="Ask again."
                ) from None
        self.credits -= 1


Load = Callable[
    [Path, ModelId, AskerOptions, Callable[[Loading], object]], tuple[AskerModel, list[str]]
]


class EngineProcess:
    """Turns the daemon's commands into calls of an `Engine`."""

    def __init__(self, load: Load = load_asker) -> None:
        self._load_asker = load
        self._channel: Channel | None = None
        self._engine: Engine | None = None
        self._readers: dict[str, _Reader] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._reported: list[dict[str, Any]] = []
        self._standings: list[dict[str, Any]] = []
        self._accounts: dict[str, Any] = {}
        self._stopped = asyncio.Event()
        self._shards: list[dict[str, Any]] = []
        self._local: dict[str | None, asyncio.Future[tuple[RouteHop, ...]]] = {}
        self._following = Following()

    async def run(self) -> None:
        """Serve until the daemon says stop or is gone."""
        self._channel = await attach_to_parent(self._command)
        self._spawn(self._report(), "report generations")
        await self._stopped.wait()
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._engine is not None:
            await self._engine.close()

    def _command(self, message: ChannelMessage) -> None:
        match message["op"]:
            case "start":
                self._spawn(self._start(message), "start")
            case "shards":
                self._shards = message["shards"]
                if self._engine is not None:
                    self._engine.shards.replace(self._shards)
            case "tls":
                self._following.tell(message["members"])
            case "generate" | "harvest":
                self._take_order(message)
            case "credit" | "cancel":
                self._about_reader(message)
            case "local":
                self._local_answer(message)
            case "stop":
                self._stopped.set()

    def _about_reader(self, message: ChannelMessage) -> None:
        reader = self._readers.get(message["id"])
        if reader is None:
            return  # its generation ended meanwhile
        if message["op"] == "credit":
            reader.credits += message["frames"]
            reader.refilled.set()
        elif reader.task is not None:
            reader.task.cancel()

    async def _start(self, message: ChannelMessage) -> None:
        answer: ChannelMessage
        try:
            loading = self._load_engine(message)
            reasons = await foreseen(loading, "loading the ends", self._unforeseen)
            answer = {"op": "ready", "reasons": reasons}
        except MeshError as error:
            answer = {"op": "failed", "error": error.to_dict()}
        self._send(answer)

    async def _load_engine(self, message: ChannelMessage) -> list[str]:
        """Load the ends and begin to follow the mesh; the reasons of what was chosen."""
        settings = EngineSettings(**message["settings"])
        wanted, tell_loop = message["model"], asyncio.get_running_loop().call_soon_threadsafe
        model, reasons = await asyncio.to_thread(
            self._load_asker,
            Path(wanted["directory"]),
            ModelId(wanted["model_id"]),
            _options(message["options"]),
            lambda loading: tell_loop(self._say_loading, loading),
        )
        self._say_loading(None)
        material = TlsMaterial.from_fields(message["tls"])
        tls = await asyncio.to_thread(TlsContexts, material)
        hello = Hello(**message["hello"])
        accounts = ResourceLedger(LoopClock(), allowances.ASKER)
        own, dial = NodeId(hello.node_id), secured(hello, tls, accounts)
        self._engine = Engine(model, own, settings, self._local_model, self._judge, dial, accounts)
        await self._follow_members(self._engine, tls)
        # What came while the ends were loading is newer than what came with the command.
        self._engine.shards.replace(self._shards or message["shards"])
        self._spawn(self._engine.watch_stalls(), "watch stalls")
        self._spawn(expire_regularly(self._engine.sessions, EXPIRY_TICK_S), "expire parked")
        return reasons

    def _say_loading(self, loading: Loading | None) -> None:
        self._send({"op": LOADING, "load": None if loading is None else asdict(loading)})

    async def _follow_members(self, engine: Engine, tls: TlsContexts) -> None:
        """Trust those whom the daemon has named by now, then whom it names, and nobody else."""
        await self._following.take(tls, engine.trust_only)
        following = self._spawn(self._following.run(tls, engine.trust_only), "follow members")
        # A process that follows nobody any more would trust for ever those who are put out.
        following.add_done_callback(lambda _: self._stopped.set())

    def _take_order(self, message: ChannelMessage) -> None:
        if message["op"] == "generate":
            self._generate(message["id"], message["request"])
        else:
            self._harvest(message["id"], message["order"])

    def _harvest(self, order_id: str, fields: dict[str, Any]) -> None:
        order = HarvestOrder.from_fields(fields)
        self._begin(order_id, _Reader(), self._run_harvest(order_id, order), "harvest")

    def _begin(self, key: str, reader: _Reader, work: Coroutine[Any, Any, None], kind: str) -> None:
        self._readers[key] = reader
        reader.task = self._spawn(work, f"{kind} {key}")
        # Not at the end of the work: a task that is cancelled before its first step has none.
        reader.task.add_done_callback(lambda _: self._readers.pop(key, None))

    async def _run_harvest(self, order_id: str, order: HarvestOrder) -> None:
        answer: ChannelMessage
        try:
            harvested = self._started().harvest(order)
            answer = {
                "op": "harvested",
                "result": await foreseen(harvested, f"harvest={order_id}", self._unforeseen),
            }
        except MeshError as error:
            answer = {"op": "error", "error": error.to_dict()}
        self._send({**answer, "id": order_id})

    def _generate(self, request_id: str, fields: dict[str, Any]) -> None:
        try:
            engine = self._started()
        except MeshError as error:
            self._send({"op": "error", "id": request_id, "error": error.to_dict()})
            return
        reader = _Reader()
        frames = engine.chat(decode_request(fields))
        self._begin(request_id, reader, self._run(request_id, frames, reader), "generate")

    def _started(self) -> Engine:
        if self._engine is None:
            raise InternalError("the asker is not started.", fix="Report this as a bug.")
        return self._engine

    async def _run(
        self, request_id: str, frames: AsyncGenerator[StreamFrame, None], reader: _Reader
    ) -> None:
        ending: ChannelMessage = {"op": "end"}
        try:
            stream = self._stream(request_id, frames, reader)
            await foreseen(stream, f"request={request_id}", self._unforeseen)
        except MeshError as error:
            ending = {"op": "error", "error": error.to_dict()}
        finally:
            self._send({**ending, "id": request_id})
            self._send_generations()

    async def _stream(
        self, request_id: str, frames: AsyncGenerator[StreamFrame, None], reader: _Reader
    ) -> None:
        async with contextlib.aclosing(frames):
            first = True
            async for frame in frames:
                if first or isinstance(frame, ShardFailover):
                    self._send_generations()
                    first = False
                await self._pass_on(request_id, frame, reader)

    async def _pass_on(self, request_id: str, frame: StreamFrame, reader: _Reader) -> None:
        await reader.take()
        self._send({"op": "frame", "id": request_id, "frame": encode_frame(frame)})

    async def _local_model(self) -> tuple[RouteHop, ...]:
        return await self._load(None)

    async def _judge(self, layers: LayerRange) -> RouteHop:
        return (await self._load(str(layers)))[0]

    async def _load(self, layers: str | None) -> tuple[RouteHop, ...]:
        """Have the daemon load layers, or all, here; one question serves all who ask it."""
        asked = self._local.get(layers)
        if asked is None:
            asked = self._local[layers] = asyncio.get_running_loop().create_future()
            self._send({"op": "local", "layers": layers})
        try:
            async with asyncio.timeout(LOCAL_LOAD_TIMEOUT_S):
                return await asyncio.shield(asked)
        except TimeoutError:
            if self._local.get(layers) is asked:
                del self._local[layers]  # whoever asks next has it tried again
            raise PipelineStalled("the local model did not load.", fix="See the log.") from None

    def _local_answer(self, message: ChannelMessage) -> None:
        asked = self._local.pop(message["layers"], None)
        if asked is None or asked.done():
            return
        if "error" in message:
            asked.set_exception(from_dict(message["error"]))
            asked.exception()  # whoever asked may be gone; that is no error of its own
        else:
            asked.set_result(tuple(decode_hop(hop) for hop in message["hops"]))

    async def _report(self) -> None:
        while True:
            self._send_generations()
            latencies = self._engine.take_latencies() if self._engine is not None else {}
            if latencies:
                self._send({"op": "latencies", "shards": latencies})
            self._send_oversight()
            await asyncio.sleep(REPORT_TICK_S)

    def _send_generations(self) -> None:
        live = self._engine.generations() if self._engine is not None else []
        if live != self._reported:
            self._reported = live
            self._send({"op": "generations", "generations": live})

    def _send_oversight(self) -> None:
        if self._engine is None:
            return
        for event in self._engine.oversight.take_events():
            self._send({"op": "event", "event": event})
        accounts = self._engine.accounts.report("")
        if accounts != self._accounts:
            self._accounts = accounts
            self._send({"op": "accounts", "accounts": accounts})
        standings = self._engine.oversight.rows()
        if standings != self._standings:
            self._standings = standings
            self._send({"op": "standings", "standings": standings})

    def _unforeseen(self, error: Exception) -> MeshError:
        gone = lost(error)
        if gone is not None and self._channel is not None:
            end_failed(self._channel, gone)  # embedding and head are on that device, too
        return InternalError(f"{type(error).__name__}: {error}.", fix="See the log.")

    def _send(self, message: ChannelMessage) -> None:
        if self._channel is not None:
            # Without the daemon there is nobody left to tell; the process is about to end.
            with contextlib.suppress(LinkLost):
                self._channel.send(message)

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = spawn(coroutine, name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _options(fields: dict[str, Any]) -> AskerOptions:
    options = dict(fields)
    for name in ("cache_dir", "threads_dir"):
        if name in options:
            options[name] = Path(options[name])
    return AskerOptions(**options)


def main(load: Load = load_asker) -> None:
    """Run until told to stop or until the daemon is gone."""
    torch.set_grad_enabled(False)
    asyncio.run(EngineProcess(load).run())


if __name__ == "__main__":
    main()
