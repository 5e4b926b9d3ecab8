"""The process of one model's asker: ``python -m mesh.pipeline.process``, started by the daemon.

Turns commands into calls of an `Engine`, and what that gives into answers. It opens no port.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from mesh.accounts import allowances
from mesh.accounts.ledger import ResourceLedger
from mesh.clock import LoopClock, set_within, tick
from mesh.errors import BadValue, InternalError, MeshError, PipelineStalled
from mesh.logs import REQUEST
from mesh.models.progress import Progress
from mesh.pipeline.commands import (
    AskerOptions,
    AskerReady,
    AskerReport,
    CountTokens,
    Credit,
    Generate,
    GenerationFrame,
    Harvest,
    LoadLocally,
    Offer,
    ReadLens,
    RoutableShards,
    StartAsker,
)
from mesh.pipeline.dialing import secured
from mesh.pipeline.draft_model import load_asker_and_draft
from mesh.pipeline.engine import Engine
from mesh.pipeline.model import AskerModel
from mesh.pipeline.sessions import expire_regularly
from mesh.processes.lifecycle import LoadNeed
from mesh.processes.messages import Handlers
from mesh.processes.worker import Daemon, Worker
from mesh.shard.failures import lost
from mesh.shard.memory import shed
from mesh.types import LayerRange, ModelId, NodeId, RouteHop, ShardFailover

logger = logging.getLogger(__name__)

FRAME_CREDITS = 64
"""Frames a generation may be ahead of whoever reads its stream."""

CONSUMER_TIMEOUT_S = 300.0
EXPIRY_TICK_S = 5.0
LOCAL_LOAD_TIMEOUT_S = 300.0
REPORT_TICK_S = 0.5
IDLE_REPORT_TICK_S = 1.0

LoadAsker = Callable[
    [Path, ModelId, AskerOptions, Callable[[LoadNeed, Progress], object]],
    tuple[AskerModel, list[str]],
]


@dataclass(slots=True)
class _Reader:
    """How many frames a generation may still send."""

    credits: int = FRAME_CREDITS
    refilled: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self) -> None:
        """One frame's credit. Raises PipelineStalled when the reader takes nothing for long."""
        while self.credits <= 0:
            self.refilled.clear()
            if not await set_within(self.refilled, CONSUMER_TIMEOUT_S):
                raise PipelineStalled(
                    f"nobody read the stream for {CONSUMER_TIMEOUT_S:g} s.", fix="Ask again."
                )
        self.credits -= 1


class AskerProcess(Worker):
    """One model's engine, and the generations and harvests that run on it."""

    def __init__(
        self,
        load: LoadAsker = load_asker_and_draft,
        *,
        engine: Engine | None = None,
        daemon: Daemon | None = None,
        local_load_s: float = LOCAL_LOAD_TIMEOUT_S,
    ) -> None:
        """`engine` is what answers before a `StartAsker` makes one."""
        super().__init__(daemon)
        self._local_load_s = local_load_s
        self._load_asker = load
        self._engine = engine
        self._readers: dict[str, _Reader] = {}
        self._reported = AskerReport()
        self._shards: tuple[Offer, ...] | None = None
        self._local: dict[LayerRange | None, asyncio.Future[tuple[RouteHop, ...]]] = {}

    def commands(self) -> Handlers:
        """What an asker is told beside `Trust` and `Stop`."""
        return {
            StartAsker: self._start,
            RoutableShards: self._take_shards,
            Generate: self._generate,
            Harvest: self._harvest,
            ReadLens: self._read_lens,
            CountTokens: self._count,
            Credit: self._credit,
        }

    def unforeseen(self, error: Exception) -> MeshError:
        if (gone := lost(error)) is not None:
            self.end_failed(gone)  # embedding and head are on that device, too
        return super().unforeseen(error)

    async def close(self) -> None:
        """Let go of the engine, its sessions and its links."""
        if self._engine is not None:
            await self._engine.close()

    async def load_locally(self, layers: LayerRange | None) -> tuple[RouteHop, ...]:
        """Have the daemon load layers, or all, here; one question serves all who ask it.

        Raises what loading raises, or PipelineStalled when nobody answers.
        """
        asked = self._local.get(layers)
        if asked is None or asked.done():
            asked = self._local[layers] = self.exchange.ask(LoadLocally(layers))
        try:
            async with asyncio.timeout(self._local_load_s):
                return await asyncio.shield(asked)
        except TimeoutError:
            if self._local.get(layers) is asked:
                del self._local[layers]  # whoever asks next has it tried again
            raise PipelineStalled("the local model did not load.", fix="See the log.") from None

    # Commands

    async def _start(self, command: StartAsker) -> AskerReady:
        """Load the ends and begin to follow the mesh."""
        tell_loop = asyncio.get_running_loop().call_soon_threadsafe
        model, reasons = await asyncio.to_thread(
            self._load_asker,
            command.directory,
            command.model_id,
            command.options,
            lambda loading, progress: tell_loop(self.say_loading, loading, progress),
        )
        if model.ends is None and command.settings.activation_noise:
            raise _no_noise(model.model_id)
        self.say_loading(None)
        own, accounts = NodeId(command.hello.node_id), ResourceLedger(LoopClock(), allowances.ASKER)
        dial = secured(command.hello, self.members.tls, accounts)
        engine = self._engine = Engine(
            model, own, command.settings, self._local_model, self._judge, dial, accounts
        )
        await self.follow_members(engine.trust_only)
        # What came while the ends were loading is newer than what came with the command.
        engine.serve_from(command.shards if self._shards is None else self._shards)
        self.keep(engine.watch_stalls(), "watch stalls")
        self.keep(expire_regularly(engine.sessions, EXPIRY_TICK_S), "expire parked")
        self.keep(self._report_regularly(), "report")
        await asyncio.to_thread(shed)
        able = await asyncio.to_thread(model.abilities)
        return AskerReady(tuple(reasons), is_thin=model.ends is None, abilities=able)

    def _take_shards(self, command: RoutableShards) -> None:
        self._shards = command.shards
        if self._engine is not None:
            self._engine.serve_from(command.shards)

    async def _generate(self, command: Generate) -> None:
        REQUEST.set(command.request.trace_id)
        key, reader = command.request.request_id, _Reader()
        frames = self._started().chat(command.request)
        self._readers[key] = reader
        try:
            async with contextlib.aclosing(frames):
                is_first = True
                async for frame in frames:
                    if is_first or isinstance(frame, ShardFailover):
                        self._report()
                        is_first = False
                    await reader.take()
                    # The next token's way to the first hop is begun before this one's to its
                    # reader.
                    self.say(GenerationFrame.of(key, frame), soon=True)
        finally:
            del self._readers[key]
            self._report()

    async def _harvest(self, command: Harvest) -> dict[str, Any]:
        return await self._started().harvest(command.order)

    async def _read_lens(self, command: ReadLens) -> dict[str, Any]:
        return await self._started().lens(command.request, command.top)

    async def _count(self, command: CountTokens) -> int:
        return await self._started().count(command.request)

    def _credit(self, command: Credit) -> None:
        reader = self._readers.get(command.id)
        if reader is not None:  # else its generation ended meanwhile
            reader.credits += command.frames
            reader.refilled.set()

    # Here

    async def _local_model(self) -> tuple[RouteHop, ...]:
        return await self.load_locally(None)

    async def _judge(self, layers: LayerRange) -> RouteHop:
        return (await self.load_locally(layers))[0]

    def _started(self) -> Engine:
        if self._engine is None:
            raise InternalError("the asker is not started.", fix="Report this as a bug.")
        return self._engine

    # Reports

    async def _report_regularly(self) -> None:
        while True:
            self._report()
            busy = self._started().sessions.busy.is_set()
            await tick(REPORT_TICK_S if busy else IDLE_REPORT_TICK_S)

    def _report(self) -> None:
        engine = self._started()
        report = AskerReport(
            engine.generations(),
            engine.oversight.rows(),
            engine.accounts.report(""),
            engine.take_steps(),
            engine.oversight.take_events(),
        )
        if report != self._reported:
            self.say(report)
            self._reported = structs.replace(report, steps=[], events=[])


def _no_noise(model_id: ModelId) -> BadValue:
    return BadValue(
        f"routing.activation_noise goes on what is embedded here; {model_id} is elsewhere.",
        fix=f"Fetch its ends (`hearthnet pull {model_id} --layers none`), with"
        " research.distributed_inference.thin not `always`; or set no noise.",
        param="routing.activation_noise",
    )


def main(load: LoadAsker = load_asker_and_draft) -> None:
    """Run until told to stop or until the daemon is gone."""
    torch.set_grad_enabled(False)
    asyncio.run(AskerProcess(load).run())


if __name__ == "__main__":
    main()
