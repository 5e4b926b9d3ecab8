"""Whom a process trusts; contexts, threads and an asker's engine are real, the hops are toys."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from mesh.errors import UntrustedPeer
from mesh.identity.tls import TlsContexts
from mesh.pipeline.process import AskerProcess
from mesh.processes.messages import Trust
from tests.health.watched import Watched, watched
from tests.identity.support import Party
from tests.pipeline.toy_mesh import ToyNetwork

WAIT_S = 20.0
OVERTAKING_S = 0.3


class Following:
    """A process that follows three members; `before` runs before the contexts take a list."""

    def __init__(self, mesh: Watched, members: list[Party], tls: TlsContexts) -> None:
        self.process = AskerProcess(engine=mesh.engine)
        self.engine = mesh.engine
        self.hop = mesh.network.add("0-7")
        self.members = members
        self.before: Callable[[Sequence[bytes]], None] = lambda _: None
        self._taken: asyncio.Queue[int] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._tls = tls
        self._update = tls.update

    def update(self, members: Sequence[bytes]) -> None:
        """The contexts' own, in the thread that the process gave it."""
        self.before(members)
        self._update(members)
        self._loop.call_soon_threadsafe(self._taken.put_nowait, len(members))

    def tell(self, *members: Party) -> None:
        self.process.take(Trust(tuple(each.certificate for each in members)))

    async def trusted_after(self, lists: int) -> list[str]:
        """Whom the contexts let in once they have taken so many lists."""
        async with asyncio.timeout(WAIT_S):
            for _ in range(lists):
                await self._taken.get()
        return [each.name for each in self.members if self._tls.trusts(each.id)]


@pytest.fixture
async def case(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Following]:
    members = [Party("a"), Party("b"), Party("c")]
    tls = await Party("asker").trusting(*members)
    with watched(ToyNetwork()) as mesh:
        case = Following(mesh, members, tls)
        monkeypatch.setattr(tls, "update", case.update)
        case.process.members._tls = tls
        await case.process.follow_members(mesh.engine.trust_only)
        yield case
        for task in list(case.process._tasks):
            task.cancel()
        await asyncio.gather(*case.process._tasks, return_exceptions=True)
        await mesh.engine.close()


async def test_of_two_lists_the_newer_counts_though_the_older_takes_longer(case: Following) -> None:
    at_work, overtaken = threading.Event(), threading.Event()

    def before(listed: Sequence[bytes]) -> None:
        if len(listed) == len(case.members):
            at_work.set()
            overtaken.wait(WAIT_S)

    case.before = before
    case.tell(*case.members)
    assert await asyncio.to_thread(at_work.wait, WAIT_S)
    case.tell(case.members[0])
    await asyncio.sleep(OVERTAKING_S)
    overtaken.set()
    assert await case.trusted_after(2) == ["a"]


async def test_whoever_is_put_out_is_not_dialled_while_contexts_are_made(case: Following) -> None:
    at_work, asked = threading.Event(), threading.Event()

    def before(_: Sequence[bytes]) -> None:
        at_work.set()
        asked.wait(WAIT_S)

    case.before = before
    case.tell(case.members[0])
    assert await asyncio.to_thread(at_work.wait, WAIT_S)
    try:
        with pytest.raises(UntrustedPeer):
            await case.engine._links.link(case.members[1].id, case.hop.descriptor.endpoint)
    finally:
        asked.set()
    assert not case.hop.links


async def test_a_list_that_could_not_be_taken_is_taken_later(case: Following) -> None:
    case.process.members.retry_s = 0.01
    lacking = [OSError("no descriptors"), OSError("no descriptors")]

    def before(_: Sequence[bytes]) -> None:
        if lacking:
            raise lacking.pop()

    case.before = before
    case.tell(*case.members[:2])
    assert await case.trusted_after(1) == ["a", "b"]


async def test_a_process_that_cannot_follow_the_members_ends(case: Following) -> None:
    case.process.take(Trust((b"no certificate",)))
    async with asyncio.timeout(WAIT_S):
        await case.process._stopped.wait()
