"""Whom a process trusts; contexts, threads and an asker's engine are real, the hops are toys."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from mesh.errors import MeshError
from mesh.identity.tls import TlsContexts, TlsMaterial
from mesh.pipeline.process import AskerProcess
from mesh.processes.members import MemberFeed
from mesh.processes.messages import Trust
from tests.health.watched import Watched, watched
from tests.identity.support import Party
from tests.pipeline.toy_mesh import ToyNetwork

WAIT_S = 20.0
OVERTAKING_S = 0.3


class Contexts(TlsContexts):
    """`before` runs before a list is taken, in the thread that the process gave it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *trusted: Party) -> None:
        self.before: Callable[[Sequence[bytes]], None] = lambda _: None
        self.taken: asyncio.Queue[int] = asyncio.Queue()
        self._loop = loop
        certificates = [party.certificate for party in trusted]
        super().__init__(TlsMaterial.of(Party("asker").key, certificates))

    def update(self, members: Sequence[bytes]) -> None:
        self.before(members)
        super().update(members)
        self._loop.call_soon_threadsafe(self.taken.put_nowait, len(members))


class Following:
    """A process that follows three members, the second of whom has all layers."""

    def __init__(self, mesh: Watched, members: list[Party], tls: Contexts) -> None:
        self.process = AskerProcess(engine=mesh.engine)
        self.process.members = MemberFeed(tls)
        self.mesh = mesh
        self.hop = mesh.network.add("0-7", name=members[1].id)
        mesh.publish()
        self.members = members
        self.tls = tls

    def tell(self, *members: Party) -> None:
        self.process.take(Trust(tuple(each.certificate for each in members)))

    async def trusted_after(self, lists: int) -> list[str]:
        """Whom the contexts let in once they have taken so many lists."""
        async with asyncio.timeout(WAIT_S):
            for _ in range(lists):
                await self.tls.taken.get()
        return [each.name for each in self.members if self.tls.trusts(each.id)]


@pytest.fixture
async def case() -> AsyncIterator[Following]:
    members = [Party("a"), Party("b"), Party("c")]
    tls = await asyncio.to_thread(Contexts, asyncio.get_running_loop(), *members)
    await tls.taken.get()  # what they begin with
    with watched(ToyNetwork()) as mesh:
        case = Following(mesh, members, tls)
        await case.process.follow_members(mesh.engine.trust_only)
        yield case
        following = [each for each in asyncio.all_tasks() if each.get_name() == "follow members"]
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        await mesh.engine.close()


async def test_of_two_lists_the_newer_counts_though_the_older_takes_longer(case: Following) -> None:
    at_work, overtaken = threading.Event(), threading.Event()

    def before(listed: Sequence[bytes]) -> None:
        if len(listed) == len(case.members):
            at_work.set()
            overtaken.wait(WAIT_S)

    case.tls.before = before
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

    case.tls.before = before
    case.tell(case.members[0])
    assert await asyncio.to_thread(at_work.wait, WAIT_S)
    try:
        with pytest.raises(MeshError, match="no longer trusted"):
            await case.mesh.ask(2)
    finally:
        asked.set()
    assert not case.hop.links


async def test_a_list_that_could_not_be_taken_is_taken_later(case: Following) -> None:
    case.process.members.retry_s = 0.01
    lacking = [OSError("no descriptors"), OSError("no descriptors")]

    def before(_: Sequence[bytes]) -> None:
        if lacking:
            raise lacking.pop()

    case.tls.before = before
    case.tell(*case.members[:2])
    assert await case.trusted_after(1) == ["a", "b"]


async def test_a_process_that_cannot_follow_the_members_ends(case: Following) -> None:
    case.process.take(Trust((b"no certificate",)))
    async with asyncio.timeout(WAIT_S):
        while not case.process.is_stopping:  # noqa: ASYNC110 - `run` alone waits for it
            await asyncio.sleep(0.01)
