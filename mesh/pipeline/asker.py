"""The daemon's side of the asker processes: one per model, started, watched, started again.

Passes requests to the right process and its frames on to whoever reads them. Computes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mesh.attempts import Attempts
from mesh.channel import ChannelMessage
from mesh.charge import Ending, SilenceLimits, ended
from mesh.discovery.tasks import end, spawn
from mesh.errors import (
    Busy,
    ExperimentalDisabled,
    InternalError,
    MeshError,
    ModelNotFound,
    PipelineStalled,
    from_dict,
)
from mesh.pipeline.frames import decode_frame, encode_hop, encode_request
from mesh.pipeline.order import HarvestOrder
from mesh.supervisor import Supervisor
from mesh.types import GenerationRequest, LayerRange, ModelId, RouteHop, StreamFrame

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
CREDIT_BATCH = 16
HARVEST_TIMEOUT_S = 900.0
MAX_WAITING_FRAMES = 128


@dataclass(frozen=True, slots=True)
class AskerSpec:
    """What an asker process is told at its start."""

    model_id: ModelId
    model: dict[str, Any]
    hello: dict[str, Any]
    options: dict[str, Any]
    settings: dict[str, Any]
    tls: dict[str, Any] = field(repr=False)


class AskerOwner(Protocol):
    """What an asker process needs of the daemon around it."""

    def routable(self, model_id: ModelId) -> list[dict[str, Any]]:
        """The shards that may be routed to now, encoded by `mesh.discovery.advertisement`."""

    def asker_changed(self) -> None:
        """An asker became ready, failed or ended."""

    def latencies(self, shards: dict[str, list[float]]) -> None:
        """Milliseconds of steps per shard."""

    def asker_event(self, event: dict[str, Any]) -> None:
        """Something that people should know; has a ``type``."""

    async def load_locally(self, model_id: ModelId) -> list[RouteHop]:
        """Hops over the whole model on this machine. Raises MeshError when it cannot hold it."""

    async def load_judge(self, model_id: ModelId, layers: LayerRange) -> RouteHop:
        """A hop over these layers on this machine, to check others by.

        Raises MeshError when they are too many for that, or this machine is not to compute.
        """


class AskerProcess:
    """One model's asker: runs it, restarts it after a crash, multiplexes its generations."""

    def __init__(
        self,
        spec: AskerSpec,
        owner: AskerOwner,
        limits: SilenceLimits | None = None,
        module: str = "mesh.pipeline.engine_process",
    ) -> None:
        """`module` is what the process runs: something that calls `engine_process.main`."""
        self.spec = spec
        self.process = Supervisor(f"the asker of {spec.model_id}", module, self, limits)
        self.reasons: list[str] = []
        self.generations: list[dict[str, Any]] = []
        self.standings: list[dict[str, Any]] = []
        self.accounts: dict[str, Any] = {}
        self.error: MeshError | None = None
        self._owner = owner
        self._loading: set[asyncio.Task[None]] = set()
        self._attempts = Attempts()
        self._streams: dict[str, asyncio.Queue[ChannelMessage]] = {}

    def start(self) -> None:
        """Begin to run; `wait_ready` tells when it can answer."""
        self.process.start()

    async def wait_ready(self) -> None:
        """Until the ends are loaded. Raises what loading raised, or InternalError after long."""
        if self.error is not None:
            raise self.error
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self.process.wait_up()
        except TimeoutError:
            raise InternalError(
                f"the asker of {self.spec.model_id} did not start in {START_TIMEOUT_S:g} s.",
                fix="Read logs/daemon.log in the state directory, or what `hearthnet up` prints.",
            ) from None
        if self.error is not None:
            raise self.error

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered now."""
        return self.process.is_up and self.error is None

    async def stop(self) -> None:
        """End the process and wait for it."""
        await end(self._loading)
        await self.process.stop()

    def try_again(self) -> None:
        """Load the ends, whatever happened when that was tried."""
        self._attempts.forget()

    def push_shards(self) -> None:
        """Tell the process who serves what now."""
        self.process.tell({"op": "shards", "shards": self._owner.routable(self.spec.model_id)})

    def trust(self, members: Sequence[bytes]) -> None:
        """The certificates of those whose shards may be used from now on."""
        self.spec = replace(self.spec, tls={**self.spec.tls, "members": list(members)})
        self.process.tell({"op": "tls", "members": list(members)})

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[StreamFrame, None]:
        """The frames of one generation; closing the generator cancels it on every hop."""
        await self.wait_ready()
        # The process may be ahead by its credits only, so the queue never gets full.
        queue: asyncio.Queue[ChannelMessage] = asyncio.Queue(maxsize=MAX_WAITING_FRAMES)
        key = request.request_id
        self._streams[key] = queue
        taken = 0
        ended = False
        try:
            self._order({"op": "generate", "id": key, "request": encode_request(request)})
            while True:
                message = await queue.get()  # at the latest that the process fell silent
                if message["op"] == "end":
                    ended = True
                    return
                if message["op"] == "error":
                    ended = True
                    raise from_dict(message["error"])
                yield decode_frame(message["frame"])
                taken += 1
                if taken % CREDIT_BATCH == 0:
                    self.process.tell({"op": "credit", "id": key, "frames": CREDIT_BATCH})
        finally:
            self._streams.pop(key, None)
            if not ended:
                self.process.tell({"op": "cancel", "id": key})

    async def harvest(self, order: HarvestOrder) -> dict[str, Any]:
        """See `mesh.pipeline.harvest.harvest`; cancelling it ends the batch on every hop."""
        await self.wait_ready()
        key = f"harvest-{uuid.uuid4().hex}"
        queue = self._streams[key] = asyncio.Queue(maxsize=2)  # an answer, and the process' end
        answer: ChannelMessage | None = None
        try:
            self._order({"op": "harvest", "id": key, "order": order.to_fields()})
            async with asyncio.timeout(HARVEST_TIMEOUT_S):
                answer = await queue.get()
        except TimeoutError:
            raise PipelineStalled(
                f"a batch was not harvested in {HARVEST_TIMEOUT_S:g} s.",
                fix="Make batches smaller.",
            ) from None
        finally:
            self._streams.pop(key, None)
            if answer is None:
                self.process.tell({"op": "cancel", "id": key})
        if answer["op"] == "error":
            raise from_dict(answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    # Charge

    def process_started(self) -> None:
        """See `Charge.process_started`."""
        self.process.tell(
            {
                "op": "start",
                "model": self.spec.model,
                "hello": self.spec.hello,
                "options": self.spec.options,
                "settings": self.spec.settings,
                "tls": self.spec.tls,
                "shards": self._owner.routable(self.spec.model_id),
            }
        )

    def process_ended(self, ending: Ending) -> None:
        """See `Charge.process_ended`."""
        if ending.loading is not None:
            self.error = self._attempts.died(ending.loading, ending, _now())
        lost = ended(self.process.name, ending).to_dict()
        for queue in self._streams.values():
            queue.put_nowait({"op": "error", "error": lost})
        self.generations, self.accounts = [], {}
        self._owner.asker_changed()

    def why_not_start(self, free_mb: int) -> MeshError | None:
        """See `Charge.why_not_start`."""
        return self._attempts.why_not(self.spec.model_id, _now(), free_mb)

    def process_changed(self) -> None:
        """See `Charge.process_changed`."""
        self._owner.asker_changed()

    def process_said(self, message: ChannelMessage) -> None:
        """See `Charge.process_said`."""
        match message["op"]:
            case "ready":
                self.reasons, self.error = message["reasons"], None
                self._attempts.succeeded(self.spec.model_id)
                self.process.ready()
                self._owner.asker_changed()
            case "failed":
                self._failed(from_dict(message["error"]))
            case "generations":
                self.generations = message["generations"]
            case "standings" | "accounts":
                self._reported(message)
            case "event":
                self._owner.asker_event(message["event"])
            case "latencies":
                self._owner.latencies(message["shards"])
            case "local":
                layers = message["layers"]
                name = f"load {self.spec.model_id} {layers or 'locally'}"
                task = spawn(self._load_locally(layers), name)
                self._loading.add(task)
                task.add_done_callback(self._loading.discard)
            case "frame" | "error" | "end" | "harvested":
                queue = self._streams.get(message["id"])
                if queue is not None:
                    queue.put_nowait(message)

    # Private

    def _failed(self, error: MeshError) -> None:
        self.error = error
        self.process.ready()
        if error.retryable:
            self._attempts.failed(self.spec.model_id, error, _now())
            self.process.replace()  # by one that gives it another try, in time
        self._owner.asker_changed()

    def _reported(self, message: ChannelMessage) -> None:
        if message["op"] == "standings":
            self.standings = message["standings"]
        else:
            self.accounts = message["accounts"]

    def _order(self, order: ChannelMessage) -> None:
        """Tell the process what has an answer. Raises InternalError when nobody would give it."""
        if not self.process.tell(order):
            raise InternalError(f"{self.process.name} is gone.", fix="Ask again; it starts anew.")

    async def _load_locally(self, layers: str | None) -> None:
        answer: ChannelMessage = {"op": "local", "layers": layers}
        model_id = self.spec.model_id
        try:
            if layers is None:
                hops = await self._owner.load_locally(model_id)
            else:
                hops = [await self._owner.load_judge(model_id, LayerRange.parse(layers))]
            answer["hops"] = [encode_hop(hop) for hop in hops]
        except MeshError as error:
            answer["error"] = error.to_dict()
        self.process.tell(answer)


def _now() -> float:
    return asyncio.get_running_loop().time()


class Askers:
    """All askers of a node: the HTTP API's `mesh.api.services.Generations`."""

    def __init__(
        self,
        askers: dict[ModelId, AskerProcess],
        *,
        max_concurrent: int,
        why_disabled: Callable[[ModelId], str | None],
        on_frame: Callable[[StreamFrame], None],
    ) -> None:
        self._askers = askers
        self._max_concurrent = max_concurrent
        self._why_disabled = why_disabled
        self._on_frame = on_frame
        self._running = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[StreamFrame, None]:
        """Frames of a generation, `Done` last.

        Raises:
            ModelNotFound: this node has no ends of the model.
            Busy: `max_concurrent_pipelines` generations run already.
            ExperimentalDisabled: distributed inference is switched off here.
        """
        asker = self._askers.get(request.model)
        if asker is None:
            known = ", ".join(sorted(self._askers)) or "none"
            raise ModelNotFound(
                f"this node cannot ask for {request.model!r}; it can ask for: {known}.",
                fix="Start it with `--model PATH=ID` (and `--layers none` to hold no layers).",
                param="model",
            )
        disabled = self._why_disabled(request.model)
        if disabled is not None:
            raise ExperimentalDisabled(disabled, fix="Set research.distributed_inference.enabled.")
        if self._running >= self._max_concurrent:
            raise Busy(
                f"{self._running} generations run here already, the limit.",
                fix="Wait for one to end, or raise max_concurrent_pipelines.",
            )
        self._running += 1
        try:
            async with contextlib.aclosing(asker.generate(request)) as frames:
                async for frame in frames:
                    self._on_frame(frame)
                    yield frame
        finally:
            self._running -= 1
