"""What a simulated node's code stands on: a loop with a meter, SQLite and threads in place.

The database is real, in a file; only that a connection has a thread of its own is left out, as are
the threads of a device: what they do is done at once, in the order in which it was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from contextvars import Context
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from mesh.identity.certificates import check_certificate
from mesh.identity.keys import node_id
from mesh.identity.tls import TlsMaterial
from mesh.types import NodeId
from tests.simulation.members.meter import Meter, seams
from tests.simulation.virtual_loop import VirtualLoop

T = TypeVar("T")

_EPOCH = datetime(2030, 1, 1, tzinfo=UTC)


class MeteredLoop(VirtualLoop):
    """Tells its meter at the end of each callback: that is a turn, in which nobody else has one."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter(self.time)

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(self._turn, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._turn, callback, *args, context=context)

    def run_in_executor(
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        with self.meter.thread():
            return super().run_in_executor(executor, func, *args)

    def _turn(self, callback: Callable[..., Any], *args: Any) -> None:
        try:
            callback(*args)
        finally:
            self.meter.turn()


class LoopTime:
    """The clock of every node: what the loop says."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def now(self) -> datetime:
        return _EPOCH + timedelta(seconds=self.monotonic())


class Connection:
    """As aiosqlite's, in place."""

    def __init__(self, path: Path) -> None:
        self._real = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._real.execute("PRAGMA synchronous=OFF")

    @property
    def in_transaction(self) -> bool:
        return self._real.in_transaction

    async def execute(self, query: str, values: Sequence[Any] = ()) -> None:
        self._real.execute(query, values)

    async def executemany(self, query: str, rows: Sequence[Sequence[Any]]) -> None:
        self._real.executemany(query, rows)

    async def execute_fetchall(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        if "synchronous" in query:
            return []  # the disk of a simulation does not have to survive a power cut
        return self._real.execute(query, values).fetchall()

    async def commit(self) -> None:
        self._real.execute("COMMIT")

    async def rollback(self) -> None:
        self._real.rollback()

    async def close(self) -> None:
        self._real.close()


async def _connect(path: Path, **_: Any) -> Connection:
    return Connection(path)


class NoTls:
    """Who may link, without the contexts: what is under way here is not encrypted, and making one
    takes as long as all else in a run."""

    def __init__(self, material: TlsMaterial) -> None:
        self._trusted: frozenset[NodeId] = frozenset()
        self.update(material.members)

    def update(self, members: Iterable[bytes]) -> None:
        self._trusted = frozenset(node_id(check_certificate(member)) for member in members)

    def trusts(self, node: NodeId) -> bool:
        return node in self._trusted


class InPlace(Executor):
    """Does what is submitted, at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._initial = None

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        done: Future[T] = Future()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MeteredLoop)
        with loop.meter.thread():
            try:
                done.set_result(fn(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - whoever waits gets it
                done.set_exception(error)
        return done


@contextlib.contextmanager
def _in_place() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(mock.patch("aiosqlite.connect", _connect))
        stack.enter_context(mock.patch("mesh.hearth.hearth.TlsContexts", NoTls))
        stack.enter_context(mock.patch("mesh.shard.scheduler.ThreadPoolExecutor", InPlace))
        yield


def run_metered(main: Callable[[Meter], Coroutine[Any, Any, T]]) -> T:
    """Run `main` to its end in virtual time, on a loop whose meter it is given."""
    with asyncio.Runner(loop_factory=MeteredLoop, debug=False) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, MeteredLoop)
        with _in_place(), seams(loop.meter):
            return runner.run(main(loop.meter))
