"""The daemon's side of the askers: one process per model.

Passes requests to the right process and its frames on to whoever reads them. Computes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from msgspec import structs

from mesh.clock import loop_time
from mesh.errors import (
    InternalError,
    MeshError,
    ModelNotFound,
    PipelineStalled,
)
from mesh.health.series import HopSteps
from mesh.pipeline.commands import (
    AskerReady,
    AskerReport,
    Completed,
    CountTokens,
    Credit,
    Ended,
    Generate,
    GenerationFrame,
    Harvest,
    HarvestOrder,
    LiveGeneration,
    LoadedLocally,
    LoadLocally,
    Offer,
    ReadLens,
    RoutableShards,
    StartAsker,
)
from mesh.processes.attempts import Attempts
from mesh.processes.lifecycle import ChildEnding, SilenceLimits
from mesh.processes.messages import Cancel, Failed, Handlers, ProcessMessage
from mesh.processes.supervisor import Supervisor
from mesh.processes.tasks import end, spawn
from mesh.types import (
    GenerationRequest,
    LayerRange,
    ModelId,
    RouteHop,
    StreamFrame,
)

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
CREDIT_BATCH = 16
HARVEST_TIMEOUT_S = 900.0
LENS_TIMEOUT_S = 900.0
COUNT_TIMEOUT_S = 120.0
MAX_WAITING_FRAMES = 128

Stream = asyncio.Queue[GenerationFrame | Ended | Completed]


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
        self.reasons: tuple[str, ...] = ()
        self.is_thin = False
        self.abilities: tuple[str, ...] = ()
        self.generations: tuple[LiveGeneration, ...] = ()
        self.standings: list[dict[str, Any]] = []
        self.accounts: dict[str, Any] = {}
        self.error: MeshError | None = None
        self._owner = owner
        self._loading: set[asyncio.Task[None]] = set()
        self._attempts = Attempts()
        self._streams: dict[str, Stream] = {}
        self._waiting: set[asyncio.Timeout] = set()
        """The patience of whoever waits for it to be ready."""
        self._told: tuple[Offer, ...] = ()
        """The shards that its process knows."""

    async def wait_ready(self) -> None:
        """Until the ends are loaded. Raises what loading raised, ModelNotFound once it is to stop,
        or InternalError after long."""
        if self.error is not None:
            raise self.error
        if self.is_stopping:
            raise self._asks_no_more()
        try:
            async with asyncio.timeout(START_TIMEOUT_S) as patience:
                self._waiting.add(patience)
                try:
                    await self.wait_up()
                finally:
                    self._waiting.discard(patience)
        except TimeoutError:
            if self.is_stopping:
                raise self._asks_no_more() from None
            raise InternalError(
                f"the asker of {self.model_id} did not start in {START_TIMEOUT_S:g} s.",
                fix="Read logs/daemon.log in the state directory, or what `hearthnet up` prints.",
            ) from None
        if self.error is not None:
            raise self.error

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered now."""
        return self.is_up and self.error is None

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits for what it was asked, or for it to be ready."""
        return bool(self._streams or self._waiting)

    async def stop(self) -> None:
        """End the process and wait for it; who waits for it to be ready does so no longer."""
        await end(self._loading)
        for patience in self._waiting:
            if not patience.expired():
                patience.reschedule(loop_time())
        await super().stop()

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
        taken, ended = 0, None
        try:
            self._order(Generate(request))
            while True:
                answer = await stream.get()  # at the latest that the process fell silent
                if not isinstance(answer, GenerationFrame) or answer.frame is None:
                    ended = answer
                    break
                yield answer.frame
                taken += 1
                if taken % CREDIT_BATCH == 0:
                    self.tell(Credit(key, CREDIT_BATCH))
        finally:
            self._streams.pop(key, None)
            if ended is None:
                self.tell(Cancel(key))
        if isinstance(ended, Ended) and ended.error is not None:
            raise ended.error

    async def harvest(self, order: HarvestOrder) -> dict[str, Any]:
        """See `mesh.pipeline.harvest.harvest`; cancelling it ends the batch on every hop."""
        key = f"harvest-{uuid.uuid4().hex}"
        return await self._completed(key, Harvest(key, order), HARVEST_TIMEOUT_S)

    async def lens(self, request: GenerationRequest, top: int) -> dict[str, Any]:
        """See `mesh.pipeline.lens.LogitLens.read`; cancelling it ends it on every hop."""
        key = request.request_id
        return await self._completed(key, ReadLens(key, request, top), LENS_TIMEOUT_S)

    async def count(self, request: GenerationRequest) -> int:
        """How many tokens the request's prompt has; raises as `Prompts.ids`."""
        key = request.request_id
        counted = await self._completed(key, CountTokens(key, request), COUNT_TIMEOUT_S)
        return int(counted["tokens"])

    # What a kind of process decides

    def answers(self) -> Handlers:
        """What an asker says; it is ready once its ends are loaded."""
        return {
            AskerReady: self._is_loaded,
            Failed: self._failed,
            AskerReport: self._reported,
            LoadLocally: self._asked_to_load,
            GenerationFrame: self._pass_on,
            Ended: self._pass_on,
            Completed: self._pass_on,
        }

    def on_started(self) -> None:
        """Tell a new asker what to load."""
        if isinstance(self.first_command, StartAsker):
            self._told = self._routable()
            self.tell(structs.replace(self.first_command, shards=self._told))

    def on_ended(self, ending: ChildEnding) -> None:
        """End what ran in an asker that is no more with the reason."""
        if ending.loading is not None:
            self.error = self._attempts.died(ending.loading, ending, loop_time())
        lost = self.error_of(ending)
        for key, stream in self._streams.items():
            stream.put_nowait(Ended(key, lost))
        self.generations, self.accounts = (), {}
        self._owner.asker_changed()

    def on_changed(self) -> None:
        """Have it known that the asker fell silent, was heard again or is gone."""
        self._owner.asker_changed()

    def why_not_start(self, free_mb: int) -> MeshError | None:
        """Why no asker is to be started while so much main memory is free."""
        return self._attempts.why_not(self.model_id, loop_time(), free_mb)

    # What the process says

    def _is_loaded(self, answer: AskerReady) -> None:
        self.reasons, self.error = answer.reasons, None
        self.is_thin, self.abilities = answer.is_thin, answer.abilities
        self._attempts.succeeded(self.model_id)
        self.ready()
        self._owner.asker_changed()

    def _failed(self, answer: Failed) -> None:
        self.error = answer.error
        self.ready()
        if answer.error.retryable:
            self._attempts.failed(self.model_id, answer.error, loop_time())
            self.replace()  # by one that gives it another try, in time
        self._owner.asker_changed()

    def _reported(self, answer: AskerReport) -> None:
        self.generations, self.standings = answer.generations, answer.standings
        self.accounts = answer.accounts
        for answered in answer.steps:
            self._owner.stepped(answered)
        for event in answer.events:
            self._owner.asker_event(event)

    def _asked_to_load(self, answer: LoadLocally) -> None:
        loading = self._load_locally(answer.layers)
        task = spawn(loading, f"load {self.model_id} {answer.layers or 'locally'}")
        self._loading.add(task)
        task.add_done_callback(self._loading.discard)

    def _pass_on(self, answer: GenerationFrame | Ended | Completed) -> None:
        stream = self._streams.get(answer.id)
        if stream is not None:
            stream.put_nowait(answer)

    # Private

    def _asks_no_more(self) -> ModelNotFound:
        return ModelNotFound(
            f"This node has ceased to ask for {self.model_id!r}.",
            fix="See `hearthnet models`; `hearthnet run` brings it up again.",
            param="model",
        )

    def _routable(self) -> tuple[Offer, ...]:
        return tuple(self._owner.routable(self.model_id))

    def _order(self, order: ProcessMessage) -> None:
        """Tell the process what has an answer. Raises InternalError when nobody would give it."""
        self.push_shards()  # who asks has seen the latest of them
        if not self.tell(order):
            raise InternalError(f"{self.name} is gone.", fix="Ask again; it starts anew.")

    async def _completed(self, key: str, order: ProcessMessage, limit_s: float) -> dict[str, Any]:
        """The result of what has only one answer. Raises its error, or PipelineStalled."""
        await self.wait_ready()
        stream = self._streams[key] = Stream(maxsize=2)  # an answer, and the process' end
        answer: GenerationFrame | Ended | Completed | None = None
        try:
            self._order(order)
            async with asyncio.timeout(limit_s):
                answer = await stream.get()
        except TimeoutError:
            raise PipelineStalled(
                f"what was asked for was not done in {limit_s:g} s.", fix="Send less text at once."
            ) from None
        finally:
            self._streams.pop(key, None)
            if answer is None:
                self.tell(Cancel(key))
        if isinstance(answer, Completed):
            return answer.result
        if isinstance(answer, Ended) and answer.error is not None:
            raise answer.error
        raise InternalError("it ended without a result.", fix="Report this as a bug.")

    async def _load_locally(self, layers: LayerRange | None) -> None:
        try:
            if layers is None:
                hops = await self._owner.load_locally(self.model_id)
            else:
                hops = [await self._owner.load_judge(self.model_id, layers)]
        except MeshError as error:
            self.tell(LoadedLocally(layers, error=error))
        else:
            self.tell(LoadedLocally(layers, tuple(hops)))
