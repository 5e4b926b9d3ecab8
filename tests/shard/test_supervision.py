"""What the daemon knows of its shard process is what that holds, whatever is asked of it and
however it ends: with a process that loads nothing, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mesh.errors import (
    BadCheckpoint,
    BadRequest,
    InternalError,
    LinkLost,
    MeshError,
    NotEnoughMemory,
    ProcessLost,
    WeightsCorrupted,
)
from mesh.processes.headroom import Headroom
from mesh.processes.lifecycle import ChildEnding, LoadNeed
from mesh.processes.messages import Answer, ProcessMessage, Request, Start
from mesh.processes.tasks import spawn
from mesh.shard.commands import (
    Health,
    Listening,
    Load,
    Loaded,
    ShardRequest,
    Unload,
    Withdrawn,
)
from mesh.shard.room import Memory
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import Endpoint, LayerRange, ModelId, NodeId, ShardDescriptor, ShardId
from tests import secure
from tests.simulation.virtual_loop import run_virtually

HALF, OTHER_HALF = LayerRange(0, 4), LayerRange(4, 8)
LONG_S = 1000.0
"""Behind every wait for another try."""


def wish(layers: LayerRange = HALF, dtype: str = "auto") -> ShardRequest:
    return ShardRequest(Path("/nowhere"), ModelId("toy"), layers, dtype=dtype)


class Process:
    """What a shard process does with its commands, but for the loading."""

    def __init__(self, host: Host) -> None:
        self.held: dict[ShardId, ShardRequest] = {}
        self.loading: ShardId | None = None
        self._host = host
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, message: ProcessMessage) -> None:
        if isinstance(message, Request):
            spawn(self._work(message), "command", among=self._tasks)

    def say(self, message: ProcessMessage) -> None:
        asyncio.get_running_loop().call_soon(self._host.hear, self, message)

    def withdraw(self, name: ShardId) -> None:
        if self.held.pop(name, None) is not None:
            self.say(Withdrawn(name, WeightsCorrupted("a bit has changed.", fix="")))

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _work(self, command: Request[object]) -> None:
        try:
            answer = Answer.to(command, await self._done(command))
        except MeshError as error:
            answer = Answer(command.number, error=error)
        self.say(answer)

    async def _done(self, command: Request[object]) -> object:
        if isinstance(command, Start):
            return Listening(7, "cpu", ())
        async with self._turn:
            if isinstance(command, Load):
                return await self._load(command.request)
            assert isinstance(command, Unload)
            self.held.pop(command.shard_id, None)
        await asyncio.sleep(command.grace_s)
        return 0

    async def _load(self, request: ShardRequest) -> Loaded:
        self._host.asked_twice += request.shard_id in self.held
        if request.shard_id in self.held:
            raise BadRequest("It is already loaded.", fix="")
        self.loading = request.shard_id
        await asyncio.sleep(self._host.load_s)
        self.loading = None
        if (error := self._host.why_none()) is not None:
            raise error
        self.held[request.shard_id] = request
        shard = ShardDescriptor(
            request.shard_id, request.model_id, "f" * 64, request.layers, 8, 1, 4, NodeId("here"),
            "here", Endpoint("wss://127.0.0.1:7"), request.dtype, "test", datetime.now(UTC),
        )  # fmt: skip
        return Loaded(shard, 1, 1.0, ())


class Host(ShardSupervisor):
    """The daemon's side of such processes; who they are is up to the test."""

    def __init__(self) -> None:
        super().__init__(secure.start_command(), [], lambda: None)
        self.process: Process | None = None
        self.asked_twice = 0
        self.load_s = 0.2
        self.failures: list[MeshError | None] = []

    def why_none(self) -> MeshError | None:
        """Why the next load fails, if it does."""
        return self.failures.pop() if self.failures else None

    @property
    def pid(self) -> int | None:
        return None if self.process is None else 1

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.port is not None

    def start(self) -> None:
        """The test does."""

    def send(self, message: ProcessMessage) -> None:
        if self.process is None:
            raise LinkLost("It is gone.", fix="")
        self.process.take(message)

    def hear(self, process: Process, message: ProcessMessage) -> None:
        if process is self.process:
            self.exchange.take(message)

    async def begins(self) -> None:
        """A process begins, and listens soon."""
        self.port, self.process = None, Process(self)
        self.on_started()
        await asyncio.sleep(0.01)
        self.look_again()

    def ends(self) -> None:
        """The kernel kills it."""
        process, self.process = self.process, None
        assert process is not None
        process.end()
        self.look_again()
        loading = None if process.loading is None else LoadNeed(process.loading, 10, 100)
        ending = ChildEnding(-9, loading=loading)
        self.on_ended(ending)
        self.exchange.end(self.lost(ending))

    def reports(self) -> None:
        """As it does every second."""
        if self.process is not None and self.is_up:
            memory = Memory(Headroom(1000, 2000, "memory"), 1000)
            self.process.say(Health(memory=memory))

    @property
    def held(self) -> dict[ShardId, ShardRequest]:
        assert self.process is not None
        return self.process.held


def test_what_is_wanted_otherwise_is_served_so_after_a_new_start_as_well() -> None:
    """It was not here: its weights had changed, and to load it again had failed."""

    async def main() -> None:
        host, asked = Host(), wish(dtype="fp32")
        await host.begins()
        await host.serve(wish())
        host.failures = [BadCheckpoint("It is cut short.", fix="")]
        assert host.process is not None
        host.process.withdraw(asked.shard_id)
        await asyncio.sleep(1.0)
        assert list(host.failed) == [asked.shard_id]
        await host.serve(asked)
        assert host.held == {asked.shard_id: asked}
        host.ends()
        await host.begins()
        await asyncio.sleep(1.0)
        assert host.held == {asked.shard_id: asked}

    run_virtually(main)


def test_what_is_wanted_is_loaded_as_it_is_wanted_though_this_node_asks_otherwise() -> None:
    async def main() -> None:
        host, wanted = Host(), wish(dtype="fp32")
        await host.begins()
        host.failures = [NotEnoughMemory("It is full.", fix=""), None]  # the last comes first
        await host.serve(wanted)
        host.ends()
        await host.begins()
        await asyncio.sleep(LONG_S)  # it may be tried again, and nobody has looked yet
        here = await host.ensure(wish())
        assert here.descriptor.dtype == "fp32"
        assert host.held == {wanted.shard_id: wanted}

    run_virtually(main)


def test_a_load_that_never_ends_keeps_no_wish_waiting_for_ever() -> None:
    async def main() -> None:
        host, asked = Host(), wish()
        host.load_s = 100 * LONG_S
        await host.begins()
        serving = asyncio.create_task(host.serve(asked))
        await asyncio.sleep(1.0)
        serving.cancel()
        await asyncio.wait([serving])
        with pytest.raises(InternalError, match="not unloaded in time"):
            async with asyncio.timeout(2 * LONG_S):
                await host.serve(wish(dtype="fp32"))
        assert host.wanted == {}
        host.ends()

    run_virtually(main)


async def acts(host: Host, chance: random.Random) -> None:
    """What one user of the daemon asks, one after the other, and perhaps gives up."""
    for _ in range(chance.randint(1, 8)):
        await asyncio.sleep(chance.choice([0.0, 0.1, 0.3, 2.0]) * chance.random())
        request = wish(chance.choice([HALF, OTHER_HALF]), chance.choice(["auto", "fp32"]))
        asks: list[Callable[[], Coroutine[Any, Any, object]]] = [
            partial(host.serve, request),
            partial(host.ensure, request),
            partial(host.drop, request.shard_id, chance.choice([0.0, 1.0])),
        ]
        task = asyncio.create_task(chance.choice(asks)())
        if chance.random() < 0.3:
            await asyncio.sleep(chance.choice([0.0, 0.1, 0.3]))
            task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        expected = asyncio.CancelledError | BadCheckpoint | NotEnoughMemory | ProcessLost
        assert not isinstance(result, BaseException) or isinstance(result, expected), result


async def lives(host: Host, chance: random.Random) -> None:
    """The process ends and begins, and withdraws what it has."""
    while True:
        await host.begins()
        for _ in range(chance.choice([1, 5, 50])):
            await asyncio.sleep(0.5)
            host.reports()
            if chance.random() < 0.2 and host.process is not None and host.held:
                host.process.withdraw(chance.choice(list(host.held)))
        host.ends()
        await asyncio.sleep(chance.random())


@pytest.mark.parametrize("seed", range(40))
def test_what_a_process_holds_is_what_is_known_of_it(seed: int) -> None:
    async def main() -> None:
        host, chance = Host(), random.Random(seed)
        errors = [BadCheckpoint("cut short.", fix=""), NotEnoughMemory("full.", fix="")]
        host.failures = [chance.choice([*errors, *[None] * 8]) for _ in range(40)]
        living = asyncio.create_task(lives(host, chance))
        await asyncio.gather(*(acts(host, chance) for _ in range(chance.randint(1, 4))))
        living.cancel()
        await asyncio.wait([living])
        if not host.is_up:
            await host.begins()
        host.failures.clear()
        host.try_again()
        await asyncio.sleep(60.0)
        assert not host.exchange.asked
        assert host.asked_twice == 0
        assert set(host.shards) == set(host.wanted)
        assert set(host.held) == {*host.shards, *host.private}
        assert {name: host.held[name] for name in host.wanted} == host.wanted

    run_virtually(main)
