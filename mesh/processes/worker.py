"""The process's side of a child process of the daemon: what all of them do alike.

Takes commands, hands each to its handler, answers requests, owns the tasks that come of them,
follows the members, stops. A kind of process is a subclass: the commands that it understands, and
what it does then.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from mesh.errors import BadRequest, InternalError, LinkLost, MeshError
from mesh.models.progress import Progress
from mesh.processes.child import attach_to_parent, end_failed
from mesh.processes.exchange import MAX_AT_ONCE, Exchange
from mesh.processes.lifecycle import LoadNeed
from mesh.processes.members import KeepOnly, MemberFeed
from mesh.processes.messages import (
    Handlers,
    Loads,
    ProcessMessage,
    Start,
    Stop,
    Trust,
)
from mesh.processes.priority import yield_to_others
from mesh.processes.tasks import end, spawn

PROGRESS_EVERY_S = 0.2
"""The daemon is told so often how far a load is, at most."""


class Daemon(Protocol):
    """The way to the daemon: a `mesh.processes.channel.Channel`."""

    def send(self, message: ProcessMessage, *, soon: bool = False) -> None:
        """Raises LinkLost when nobody is there."""


class Worker(ABC):
    """One child process; `run` is its life."""

    most_at_once = MAX_AT_ONCE
    """So many requests are worked on at the same time; more are refused."""

    def __init__(self, daemon: Daemon | None = None) -> None:
        """`daemon` is who answers go to before `run` attaches to the parent."""
        self.members = MemberFeed()
        self._daemon = daemon
        understood: Handlers = {Trust: self._trust, Stop: self._stop}
        for kind, handler in self.commands().items():
            is_first = issubclass(kind, Start)
            understood[kind] = partial(self._begin, handler) if is_first else handler
        self.exchange = Exchange(understood, self.say, self.unforeseen, self.most_at_once)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()
        self._failure: BaseException | None = None
        self._grace_s = 0.0
        self._telling: asyncio.Task[None] | None = None

    @abstractmethod
    def commands(self) -> Handlers:
        """The commands this process understands beside `Trust` and `Stop`: each kind of request
        with the coroutine whose result is the answer, each other with what is done at once.

        When its `Start` is handled the process is as nice as that says, and `members` are open."""

    def unforeseen(self, error: Exception) -> MeshError:
        """The answer to a request whose work ended with what is no MeshError; it is logged."""
        return InternalError(f"{type(error).__name__}: {error}.", fix="See the log.")

    async def drain(self, grace_s: float) -> None:  # noqa: B027 - most end what runs at once
        """Take nothing new, and give what runs `grace_s` to end. Its tasks end afterwards."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything."""

    async def run(self) -> None:
        """Serve until told to stop; raises what a task that was to be kept failed with.

        The end of the channel ends the process at once, as the daemon is gone.
        """
        self._daemon = await attach_to_parent(self._read)
        await self._stopped.wait()
        if self._failure is not None:
            raise self._failure
        await self.drain(self._grace_s)
        await end([*self._tasks, *self.exchange.tasks])
        await self.close()

    def take(self, command: ProcessMessage) -> None:
        """Obey one command."""
        self.exchange.take(command)

    # For subclasses

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._stopped.is_set()

    def say(self, answer: ProcessMessage, *, soon: bool = False) -> None:
        """Tell the daemon, `soon`: with what else is said in this turn of the loop.

        Without a daemon there is nobody left to tell: the process is about to end.
        """
        if self._daemon is not None:
            with contextlib.suppress(LinkLost):
                self._daemon.send(answer, soon=soon)

    def say_loading(self, loading: LoadNeed | None, progress: Progress | None = None) -> None:
        """What begins to load and where that is counted, and None once that is done."""
        self.say(Loads(loading))
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        if loading is not None and progress is not None:
            self._telling = self.spawn(self._tell(loading, progress), f"progress of {loading.name}")

    def end_failed(self, error: MeshError) -> None:
        """End this process at once, as it can do nothing any more; does not return then."""
        if self._daemon is not None:
            end_failed(self._daemon.send, error)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task that ends with the process; its failure is logged."""
        return spawn(work, name, among=self._tasks)

    def keep(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task that the process is of no use without: its failure ends the process."""
        task = self.spawn(work, name)
        task.add_done_callback(self._lost)
        return task

    async def follow_members(self, keep_only: KeepOnly) -> None:
        """Trust those whom the daemon has named by now, then whom it names, and nobody else."""
        await self.members.take(keep_only)
        # A process that follows nobody any more would trust for ever those who are put out.
        self.keep(self.members.follow(keep_only), "follow members")

    # Private

    async def _begin(self, start: Callable[[Any], Awaitable[Any]], command: Start[Any]) -> Any:
        yield_to_others(command.nice)  # before there are threads, or processes, that compute
        await self.members.open(command.tls)
        return await start(command)

    async def _tell(self, loading: LoadNeed, progress: Progress) -> None:
        told: Loads | None = None
        while True:
            news = Loads(loading, *progress.now)
            if news != told and news.phase:
                self.say(news)
                told = news
            await asyncio.sleep(PROGRESS_EVERY_S)

    def _read(self, body: bytes) -> None:
        try:
            self.exchange.read(body)
        except BadRequest as error:
            self.end_failed(error)

    def _trust(self, command: Trust) -> None:
        self.members.name(command.members)

    def _stop(self, command: Stop) -> None:
        self._grace_s = command.grace_s
        self._stopped.set()

    def _lost(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._stopped.set()
