"""The daemon's side of the askers: one process per model.

Passes requests to the right process and its frames on to whoever reads them. Computes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol, TypeVar

from msgspec import structs

from mesh.clock import loop_time
from mesh.errors import (
    InternalError,
    MeshError,
    ModelNotFound,
    NodeStopped,
    PipelineStalled,
)
from mesh.health.series import HopSteps
from mesh.pipeline.commands import (
    AskerReady,
    AskerReport,
    CountTokens,
    Credit,
    Generate,
    GenerationFrame,
    Harvest,
    HarvestOrder,
    LoadLocally,
    Offer,
    ReadLens,
    RoutableShards,
    StartAsker,
)
from mesh.processes.attempts import Attempts
from mesh.processes.lifecycle import ChildEnding, SilenceLimits
from mesh.processes.messages import Handlers, Request, Start
from mesh.processes.supervisor import Supervisor
from mesh.types import (
    GenerationRequest,
    LayerRange,
    ModelId,
    RouteHop,
    StreamFrame,
)

logger = logging.getLogger(__name__)

A = TypeVar("A")

START_TIMEOUT_S = 120.0
CREDIT_BATCH = 16
HARVEST_TIMEOUT_S = 900.0
LENS_TIMEOUT_S = 900.0
COUNT_TIMEOUT_S = 120.0
MAX_WAITING_FRAMES = 128

Stream = asyncio.Queue[StreamFrame | None]
"""The frames of a generation; None behind the last."""


class AskerOwner(Protocol):
    """What an asker process needs of the daemon around it."""

    def routable(self, model_id: ModelId) -> Sequence[Offer]:
        """The shards that may be routed to now."""

    def asker_changed(self) -> None:
        """An asker became ready, failed or ended."""

    def stepped(self, answered: HopSteps) -> None:
        """A hop has answered steps."""

    def asker_event(self, event: dict[str, Any]) -> None:
        """Something that people should know; has a ``type``."""

    async def load_locally(self, model_id: ModelId) -> list[RouteHop]:
        """Hops over the whole model on this machine. Raises MeshError when it cannot hold it."""

    async def load_judge(self, model_id: ModelId, layers: LayerRange) -> RouteHop:
        """A hop over these layers on this machine, to check others by.

        Raises MeshError when they are too many for that, or this machine is not to compute.
        """


class AskerSupervisor(Supervisor):
    """One model's asker process, and who reads the streams of its generations."""

    def __init__(
        self,
        start: StartAsker,
        owner: AskerOwner,
        limits: SilenceLimits | None = None,
        module: str = "mesh.pipeline.process",
    ) -> None:
        """`module` is what the process runs: something that calls `mesh.pipeline.process.main`."""
        super().__init__(f"the asker of {start.model_id}", module, start, limits)
        self.model_id = start.model_id
        self.loaded = AskerReady()
        """What its ends are; nothing before they are loaded."""
        self.report = AskerReport()
        """What it said last that it does."""
        self.is_followed = False
        """Whether another asks the same model once this is to stop."""
        self.error: MeshError | None = None
        self._owner = owner
        self._attempts = Attempts()
        self._free_mb = 0  # of main memory, when the latest was to start
        self._streams: dict[str, Stream] = {}
        self._waiting = 0
        """How many wait for it to be ready."""
        self._told: tuple[Offer, ...] = ()
        """The shards that its process knows."""

    async def wait_ready(self) -> None:
        """Until the ends are loaded. Raises what `why_not_wait` says, InternalError after long."""
        if self.error is not None:
            raise self.error
        self._waiting += 1
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self.wait_up()
        except TimeoutError:
            raise InternalError(
                f"the asker of {self.model_id} did not start in {START_TIMEOUT_S:g} s.",
                fix="Read logs/daemon.log in the state directory, or what `hearthnet up` prints.",
            ) from None
        finally:
            self._waiting -= 1
        if self.error is not None:
            raise self.error

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered now."""
        return self.is_up and self.error is None

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits for what it was asked, or for it to be ready."""
        is_asked = any(not isinstance(each, Start) for each in self.exchange.asked)
        return is_asked or self._waiting > 0

    def try_again(self) -> None:
        """Load the ends, whatever happened when that was tried."""
        self._attempts.forget()

    def push_shards(self) -> None:
        """Tell the process who serves what now, if that is another than it was told."""
        shards = self._routable()
        if shards != self._told and self.tell(RoutableShards(shards)):
            self._told = shards

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[StreamFrame, None]:
        """The frames of one generation; closing the generator cancels it on every hop."""
        await self.wait_ready()
        key = request.request_id
        # The process may be ahead by its credits only, so the queue never gets full.
        stream = self._streams[key] = Stream(maxsize=MAX_WAITING_FRAMES)
        self.push_shards()  # who asks has seen the latest of them
        ended, taken = self.exchange.ask(Generate(request), lambda _: stream.put_nowait(None)), 0
        try:
            while (frame := await stream.get()) is not None:  # or the process fell silent
                yield frame
                taken += 1
                if taken % CREDIT_BATCH == 0:
                    self.tell(Credit(key, CREDIT_BATCH))
            await ended
        finally:
            self._streams.pop(key, None)
            ended.cancel()

    async def harvest(self, order: HarvestOrder) -> dict[str, Any]:
        """See `mesh.pipeline.harvest.harvest`; cancelling it ends the batch on every hop."""
        return await self._answered(Harvest(order), HARVEST_TIMEOUT_S)

    async def lens(self, request: GenerationRequest, top: int) -> dict[str, Any]:
        """See `mesh.pipeline.lens.LogitLens.read`; cancelling it ends it on every hop."""
        return await self._answered(ReadLens(request, top), LENS_TIMEOUT_S)

    async def count(self, request: GenerationRequest) -> int:
        """How many tokens the request's prompt has; raises as `Prompts.ids`."""
        return await self._answered(CountTokens(request), COUNT_TIMEOUT_S)

    # What a kind of process decides

    def answers(self) -> Handlers:
        """What an asker says, and asks."""
        return {
            AskerReport: self._reported,
            GenerationFrame: self._pass_on,
            LoadLocally: self._load_locally,
        }

    def on_started(self) -> None:
        """Tell a new asker what to load."""
        if isinstance(self.first_command, StartAsker):
            self._told = self._routable()
            self.begin(structs.replace(self.first_command, shards=self._told))

    def on_ready(self, answer: AskerReady) -> None:
        """Its ends are loaded."""
        self.loaded, self.error = answer, None
        self._attempts.succeeded(self.model_id)
        self._owner.asker_changed()

    def on_failed(self, error: MeshError) -> None:
        """Whoever waits for it is told why; it is tried again where that may help."""
        self.error = error
        self.ready()
        if error.retryable:
            self._attempts.failed(self.model_id, error, loop_time(), self._free_mb)
            super().on_failed(error)  # another one gives it another try, in time
        self._owner.asker_changed()

    def on_ended(self, ending: ChildEnding) -> None:
        """End what ran in an asker that is no more with the reason."""
        if ending.loading is not None:
            self.error = self._attempts.died(ending.loading, ending, loop_time())
            self.replace()  # who waits for it hears why, as it is no more already
        self.report = structs.replace(self.report, generations=(), accounts={})
        self._owner.asker_changed()

    def on_changed(self) -> None:
        """Have it known that the asker fell silent, was heard again or is gone."""
        self._owner.asker_changed()

    def why_not_wait(self) -> MeshError | None:
        """That it is to stop, or why its ends did not load when that was tried last."""
        return self._asks_no_more() if self.is_stopping else self.error

    def lost(self, ending: ChildEnding) -> MeshError:
        """See `Supervisor`; one that was to stop is not started anew."""
        return self._asks_no_more() if self.is_stopping else super().lost(ending)

    def why_not_start(self, free_mb: int) -> MeshError | None:
        """Why no asker is to be started while so much main memory is free."""
        self._free_mb = free_mb
        return self._attempts.why_not(self.model_id, loop_time(), free_mb, free_mb)

    # What the process says

    def _reported(self, answer: AskerReport) -> None:
        self.report = answer
        for answered in answer.steps:
            self._owner.stepped(answered)
        for event in answer.events:
            self._owner.asker_event(event)

    def _pass_on(self, said: GenerationFrame) -> None:
        stream = self._streams.get(said.id)
        if stream is not None:
            stream.put_nowait(said.frame)

    async def _load_locally(self, asked: LoadLocally) -> tuple[RouteHop, ...]:
        if asked.layers is None:
            return tuple(await self._owner.load_locally(self.model_id))
        return (await self._owner.load_judge(self.model_id, asked.layers),)

    # Private

    def _asks_no_more(self) -> MeshError:
        if self.is_followed:
            return NodeStopped(
                f"{self.model_id} is asked otherwise from now on, and this had not ended in time.",
                fix="Ask again.",
            )
        return ModelNotFound(
            f"This node has ceased to ask for {self.model_id!r}.",
            fix="See `hearthnet models`; `hearthnet run` brings it up again.",
            param="model",
        )

    def _routable(self) -> tuple[Offer, ...]:
        return tuple(self._owner.routable(self.model_id))

    async def _answered(self, request: Request[A], limit_s: float) -> A:
        """What has only one answer. Raises its error, or PipelineStalled."""
        await self.wait_ready()
        self.push_shards()
        try:
            async with asyncio.timeout(limit_s):
                return await self.exchange.ask(request)
        except TimeoutError:
            raise PipelineStalled(
                f"what was asked for was not done in {limit_s:g} s.", fix="Send less text at once."
            ) from None
