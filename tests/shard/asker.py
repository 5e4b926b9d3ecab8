"""The asker's end of a link, for tests: sends what the test says, keeps what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from typing import Any

import torch

from mesh.errors import MeshError, from_dict
from mesh.models.cuts import ANYWHERE, Cuts
from mesh.shard.admission import LayerShape
from mesh.shard.runtime import Runtime
from mesh.shard.scheduler import Scheduler
from mesh.shard.server import ShardServer
from mesh.shard.service import ShardService
from mesh.shard.settings import ShardSettings
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import (
    Endpoint,
    LayerRange,
    ModelId,
    NodeId,
    ShardDescriptor,
    WireDtype,
    shard_id,
)
from mesh.wire.activations import to_torch, to_wire
from mesh.wire.limits import DEFAULT_LIMITS, Limits
from mesh.wire.link import Link
from mesh.wire.messages import (
    Close,
    Failure,
    Hello,
    Loading,
    Message,
    Open,
    Opened,
    Park,
    Result,
    Resume,
    Step,
)
from tests.shard.spans import HIDDEN, WHOLE, relative_error, runtime
from tests.wire.memory import MemoryLink, link_pair

ANSWER_TIMEOUT_S = 10.0
SETTLE_TIMEOUT_S = 5.0
MODEL = ModelId("toy")
SHA = "5" * 64


def descriptor(layers: LayerRange = WHOLE, sha: str = SHA) -> ShardDescriptor:
    """A shard of the toy model."""
    return ShardDescriptor(
        shard_id=shard_id(MODEL, layers), model_id=MODEL, weights_sha256=sha, layers=layers,
        total_layers=8, vram_required_mb=1, max_concurrent_streams=4, host=NodeId("n" * 64),
        node_name="attic", endpoint=Endpoint("wss://127.0.0.1:1"), dtype="fp32",
        determinism_class="test", advertised_at=datetime.now(UTC),
    )  # fmt: skip


class CountedLoader:
    """Loads the toy runtime, or `given`, and counts how often."""

    def __init__(self, error: Exception | None = None, given: Runtime | None = None) -> None:
        self.loads = 0
        self.error = error
        self._given = given

    def __call__(self) -> Runtime:
        self.loads += 1
        if self.error is not None:
            raise self.error
        return self._given or _served()


@cache
def _served() -> TorchRuntime:
    return runtime()


class Attic:
    """A serving node with one shard, and as many askers as a test links to it."""

    def __init__(
        self,
        loader: CountedLoader | None = None,
        queue: Scheduler | None = None,
        cuts: Cuts = ANYWHERE,
        **settings: Any,
    ) -> None:
        self.loader = loader or CountedLoader()
        self.queue = queue or Scheduler()
        self.server = ShardServer(
            descriptor(), self.loader, ShardSettings(**settings),
            shape=LayerShape(HIDDEN, HIDDEN, cuts),
            scheduler=self.queue,
        )  # fmt: skip
        self.service = ShardService()
        self.service.add(self.server)

    async def __aenter__(self) -> Attic:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        # Nothing is evicted: the weights are all tests', and to search for garbage takes long here.
        for session in list(self.server.sessions):
            session.end_with(None)
        self.queue.close()

    def asker(self, limits: Limits = DEFAULT_LIMITS) -> Asker:
        """A new link to this node."""
        ours, theirs = link_pair(
            Hello("b" * 64, "attic", "tensors", "test"),
            Hello("a" * 64, "asker", "tensors", "test"),
            limits=limits,
        )
        ours.attach(self.service.handler(ours))
        asker = Asker()
        asker.use(theirs)
        theirs.attach(asker)
        return asker


class Asker:
    """Sends messages and awaits answers in order."""

    def __init__(self) -> None:
        self._answers: asyncio.Queue[Message] = asyncio.Queue()
        self._link: Link | None = None
        self.permit: Callable[[Open], str] | None = None
        self.told_to_wait: list[int] = []
        """The sessions for which the host said that it is loading."""

    def use(self, link: Link) -> None:
        """Send over `link` from now on."""
        self._link = link

    @property
    def link(self) -> Link:
        """The link in use."""
        assert self._link is not None
        return self._link

    def message(self, message: Message) -> None:
        """See `LinkHandler.message`."""
        if isinstance(message, Loading):
            self.told_to_wait.append(message.session)
        else:
            self._answers.put_nowait(message)

    def closed(self, error: MeshError | None) -> None:
        """See `LinkHandler.closed`."""

    async def answer(self) -> Message:
        """The next message that came."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await self._answers.get()

    @property
    def answers_waiting(self) -> int:
        """How many answers nobody has read."""
        return self._answers.qsize()

    def send_open(self, session: int = 1, **changes: Any) -> None:
        """Ask for a session without waiting."""
        fields: dict[str, Any] = {
            "model_id": MODEL, "weights_sha256": SHA, "start": 0, "stop": 4, "max_tokens": 128,
            "wire_dtype": WireDtype.FP32,
        }  # fmt: skip
        request = Open(session, **fields | changes)
        if self.permit is not None:
            request = replace(request, token=self.permit(request))
        self.link.send(request)

    async def open(self, session: int = 1, **changes: Any) -> None:
        """Open a session; raises what it is refused with."""
        self.send_open(session, **changes)
        opened = await self.unwrapped()
        assert isinstance(opened, Opened)
        assert opened.session == session

    def send_step(self, number: int, position: int, hidden: torch.Tensor, session: int = 1) -> None:
        """Send a step without waiting."""
        self.link.send(Step(session, number, position, to_wire(hidden, WireDtype.FP32)))

    async def step(
        self, number: int, position: int, hidden: torch.Tensor, session: int = 1
    ) -> torch.Tensor:
        """Send a step and wait for its hidden states; raises what it fails with."""
        self.send_step(number, position, hidden, session)
        return await self.hidden(number, session)

    async def hidden(self, number: int, session: int = 1) -> torch.Tensor:
        """The hidden states of the next answer, which must be of this step."""
        result = await self.unwrapped()
        assert isinstance(result, Result)
        assert (result.session, result.step) == (session, number)
        return to_torch(result.tensor)

    def park(self, session: int = 1) -> None:
        """Give the stream back."""
        self.link.send(Park(session))

    async def resume(self, session: int = 1, max_tokens: int = 128) -> None:
        """Take it again; raises when refused."""
        self.link.send(Resume(session, max_tokens))
        assert isinstance(await self.unwrapped(), Opened)

    def close(self, session: int = 1) -> None:
        """Free the session."""
        self.link.send(Close(session))

    def cut(self) -> None:
        """Break the link."""
        assert isinstance(self._link, MemoryLink)
        self._link.cut()

    async def unwrapped(self) -> Message:
        answer = await self.answer()
        if isinstance(answer, Failure):
            raise from_dict(answer.error)
        return answer


async def settled(condition: Callable[[], bool]) -> None:
    """Let the loop turn until `condition` holds."""
    async with asyncio.timeout(SETTLE_TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - there is no event for every state of a server
            await asyncio.sleep(0)


def close_to(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return relative_error(found, expected) < 1e-5
