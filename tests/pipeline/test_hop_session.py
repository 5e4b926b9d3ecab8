"""A session on a hop that takes nothing, or answers what it should not: that hop is at fault, and
no other."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from mesh.clock import SystemClock
from mesh.errors import (
    BadRequest,
    CacheFull,
    LimitReached,
    LinkLost,
    PipelineStalled,
    SessionGone,
)
from mesh.interventions.relay import RelayedSession
from mesh.pipeline.claims import Claims
from mesh.pipeline.history import CHUNK_ROWS
from mesh.pipeline.hop import STEPS_UNDER_WAY, GenerationHop, HopSession, Patience
from mesh.pipeline.links import HopLink
from mesh.pipeline.terms import SessionTerms
from mesh.pipeline.watch.oversight import Oversight
from mesh.routing.cover import key_of
from mesh.types import LayerRange, ShardId, WireDtype
from mesh.wire.abilities import BLOBS
from mesh.wire.messages import (
    Blob,
    Failure,
    Hello,
    Loading,
    Message,
    Open,
    Opened,
    OpenTaps,
    Park,
    Result,
    Resume,
    Step,
    WireTensor,
)
from tests.pipeline.one_hop import HOST, MODEL, hop_over, session_over
from tests.simulation.virtual_loop import run_virtually


class FullLink:
    """A `Link` that opens a session and takes nothing more while it `is_full`."""

    peer = Hello(HOST, HOST, "tensors", "", fields={BLOBS: True})
    rtt_ms = None
    silent_s = 0.0

    def __init__(self, hop: HopLink) -> None:
        self._hop = hop
        self.is_full = False
        self.is_closed = False
        self.refused = 0
        self.taken: list[Message] = []

    def send(self, message: Message) -> None:
        """See `Link`."""
        if self.is_full:
            self.refused += 1
            raise LimitReached("its account is full", fix="")
        self.taken.append(message)
        loop = asyncio.get_running_loop()
        if isinstance(message, Open | OpenTaps | Resume):
            loop.call_soon(self._hop.message, Opened(message.session, 64))

    async def drain(self, timeout_s: float) -> None:
        """See `Link`."""

    def close(self, reason: str = "") -> None:
        """See `Link`."""
        self.is_closed = True


async def opened() -> tuple[HopSession, FullLink, list[str]]:
    session, way = session_over(FullLink)
    lost: list[str] = []
    session.on_lost = lambda: lost.append(str(session.error))
    await session.open()
    return session, way, lost


def a_row() -> WireTensor:
    return WireTensor("fp16", (1, 1, 8), np.zeros(8, np.float16).tobytes())


async def test_a_step_that_is_not_taken_loses_that_hop_and_raises_nothing() -> None:
    session, way, lost = await opened()
    session.step(0, a_row())
    way.is_full = True
    session.step(1, a_row())  # from where another hop's answer is passed on
    assert isinstance(session.error, LinkLost)
    assert len(lost) == 1
    assert "takes nothing more: its account is full" in lost[0]
    with pytest.raises(LinkLost):
        await session.exchange(2, a_row())
    session.close()
    assert way.is_closed, "the hop frees the session with its link"


async def test_what_waits_for_a_stream_ends_with_the_hop() -> None:
    session, way, _ = await opened()
    session.rest(before=float("inf"))
    waiting = [asyncio.ensure_future(session.exchange(at, a_row())) for at in range(3)]
    await asyncio.sleep(0)
    way.is_full = True
    async with asyncio.timeout(5):
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in results] == [LinkLost] * 3
    assert session.waiting_since is None


async def test_jobs_that_think_over_a_full_link_are_there_once_it_takes_something_again() -> None:
    hop, link, way = hop_over(FullLink)
    link.lease_s = 0.2
    claims = Claims()
    jobs = [
        RelayedSession(hop, link, claims.claim(key_of(hop.shard)), open_s=5.0, part_bytes=1)
        for _ in range(2)
    ]
    for job in jobs:
        await job.open()
    way.taken.clear()
    way.is_full = True
    async with asyncio.timeout(5):
        while way.refused < 2:  # noqa: ASYNC110 - nobody says so
            await asyncio.sleep(0.01)
        way.is_full = False
        while len({each.session for each in way.taken if isinstance(each, Blob)}) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [job.error for job in jobs] == [None, None]
    link.close("the end")


async def generating(claims: Claims) -> tuple[GenerationHop, HopLink, FullLink]:
    """The hop of a generation, its session number 1."""
    route_hop, link, way = hop_over(FullLink)
    claim, oversight = claims.claim(key_of(route_hop.shard)), Oversight(SystemClock(), ceiling_s=9)
    terms = SessionTerms(MODEL, "0" * 64, 64, WireDtype.FP16)
    hop = GenerationHop(route_hop, link, claim, terms, Patience(5.0, 5.0), oversight)
    await hop.open()
    return hop, link, way


async def test_the_answer_to_a_step_behind_a_refused_one_says_nothing_of_what_follows() -> None:
    hop, link, _ = await generating(Claims())
    hop.accept(a_row())
    hop.accept(a_row())
    full, behind = CacheFull("no room.", fix=""), BadRequest("it starts at 1.", fix="")
    link.message(Failure(full.to_dict(), 1, 1))
    hop.cut(1)
    assert hop.go_on(CHUNK_ROWS)
    link.message(Failure(behind.to_dict(), 1, 2))
    link.message(Result(1, 3, a_row(), 1, 0))
    assert (hop.error, hop.delivered) == (None, 1)
    hop.close()


@pytest.mark.parametrize(("step", "answer"), [(2, a_row()), (1, replace(a_row(), gradient=True))])
async def test_an_answer_out_of_turn_or_of_another_kind_is_handed_to_nobody(
    step: int, answer: WireTensor
) -> None:
    claims, said = Claims(), list[WireTensor]()
    hop, link, _ = await generating(claims)
    hop.on_output = lambda _, tensor: said.append(tensor)
    hop.accept(a_row())
    hop.accept(a_row())
    link.message(Result(1, step, answer, 1, 0))
    assert hop.error is not None
    assert said == []
    assert claims.depth(key_of(hop.hop.shard)) == 0, "a lost hop keeps nobody away from its host"


async def test_what_waits_for_others_to_be_answered_follows_them_unless_it_was_cut() -> None:
    claims = Claims()
    hop, link, way = await generating(claims)
    for _ in range(STEPS_UNDER_WAY + 3):
        hop.accept(a_row())
    hop.cut(STEPS_UNDER_WAY + 1)
    for step in range(1, STEPS_UNDER_WAY + 2):
        assert hop.delivered == step - 1
        link.message(Result(1, step, a_row(), 1, 0))
    sent = [each.position for each in way.taken if isinstance(each, Step)]
    assert sent == list(range(STEPS_UNDER_WAY + 1))
    assert (hop.error, hop.waiting_since) == (None, None)
    hop.close()
    assert claims.depth(key_of(hop.hop.shard)) == 0


async def test_who_owes_an_answer_is_not_gone_on_with_after_a_rest() -> None:
    hop, _, _ = await generating(Claims())
    hop.accept(a_row())
    hop.park()
    with pytest.raises(SessionGone):
        await hop.resume()


async def test_what_comes_behind_the_end_takes_no_stream_and_is_not_gone_on_with() -> None:
    hop, _, way = await generating(Claims())
    hop.park()
    hop.accept(a_row())  # an earlier hop's answer to what was guessed
    assert isinstance(way.taken[-1], Park)
    with pytest.raises(SessionGone):
        await hop.resume()


async def test_a_session_rests_once_and_only_where_nothing_is_under_way() -> None:
    hop, link, way = await generating(Claims())
    another, _, its_way = await generating(Claims())

    def times_rested() -> int:
        for each in (hop, another):
            each.rest(before=float("inf"))
        return sum(isinstance(each, Park) for each in [*way.taken, *its_way.taken])

    another.fail(CacheFull("no room.", fix=""))
    hop.rest(before=asyncio.get_running_loop().time() - 1.0)  # it was not silent for so long
    hop.accept(a_row())
    assert times_rested() == 0
    link.message(Result(1, 1, a_row(), 1, 0))
    assert times_rested() == times_rested() == 1
    hop.accept(a_row())
    assert times_rested() == 1, "it is on its way back"
    await asyncio.sleep(0)
    link.message(Result(1, 2, a_row(), 1, 0))
    way.is_closed = True
    assert times_rested() == 1
    way.is_closed = False
    hop.park()
    resuming = asyncio.ensure_future(hop.resume())
    await asyncio.sleep(0)
    assert times_rested() == 2, "as it was parked"
    await resuming


async def test_what_its_host_ended_meanwhile_is_not_asked_to_go_on() -> None:
    hop, link, way = await generating(Claims())
    hop.park()
    link.message(Failure(SessionGone("no room.", fix="").to_dict(), 1))
    with pytest.raises(SessionGone, match="while it rested: no room"):
        await hop.resume()
    assert isinstance(way.taken[-1], Park)


async def test_a_stream_that_is_on_its_way_back_at_the_end_is_given_back() -> None:
    hop, _, way = await generating(Claims())
    hop.rest(before=float("inf"))
    hop.accept(a_row())
    hop.park()
    await asyncio.sleep(0)  # it is open again, which is of no use any more
    assert [type(each) for each in way.taken[-3:]] == [Park, Resume, Park]


async def test_who_goes_on_after_the_end_of_an_answer_sends_at_once_and_may_rest_again() -> None:
    claims = Claims()
    hop, link, way = await generating(claims)
    hop.park()
    assert claims.sessions(key_of(hop.hop.shard)) == 0
    await hop.resume()
    assert claims.sessions(key_of(hop.hop.shard)) == 1
    hop.accept(a_row())
    assert [type(each) for each in way.taken[-3:]] == [Park, Resume, Step]
    link.message(Result(1, 1, a_row(), 1, 0))
    hop.rest(before=float("inf"))
    hop.accept(a_row())
    assert isinstance(way.taken[-1], Resume)


async def test_only_a_session_on_the_same_link_and_layers_is_begun_as() -> None:
    one, link, _ = await generating(Claims())
    link.copies_prefixes = True
    other, another_link, _ = await generating(Claims())
    another_link.copies_prefixes = True
    assert one.can_begin_as(one)
    assert not one.can_begin_as(other), "its number is somebody else's there"
    theirs = one.hop
    shard = replace(theirs.shard, shard_id=ShardId("toy:0-0"))
    for hop in (replace(theirs, shard=shard), replace(theirs, layers=LayerRange(1, 2))):
        other = GenerationHop(
            hop,
            link,
            Claims().claim(key_of(shard)),
            one.terms,
            Patience(),
            Oversight(SystemClock(), ceiling_s=9),
        )
        assert not one.can_begin_as(other)
    link.copies_prefixes = False
    assert not one.can_begin_as(one), "an older host would not know what it is asked"
    link.copies_prefixes = True
    one.fail(CacheFull("no room.", fix=""))
    assert not one.can_begin_as(one)


class LoadingLink(FullLink):
    """It loads and loads."""

    def send(self, message: Message) -> None:
        """See `Link`."""
        if isinstance(message, Open):
            for part in range(100):
                loading = Loading(message.session)
                asyncio.get_running_loop().call_later(part, self._hop.message, loading)


def test_who_says_again_and_again_that_it_loads_is_waited_for_once() -> None:
    async def main() -> None:
        route_hop, link, _ = hop_over(LoadingLink)
        claim, loop = Claims().claim(key_of(route_hop.shard)), asyncio.get_running_loop()
        terms = SessionTerms(MODEL, "0" * 64, 64, WireDtype.FP16)
        session, began = HopSession(route_hop, link, claim, terms, Patience(5.0, 9.0)), loop.time()
        with pytest.raises(PipelineStalled):
            await session.open()
        assert loop.time() - began == pytest.approx(9.0, abs=0.1)
        session.close()

    run_virtually(main)


async def test_nobody_waits_for_a_session_that_was_closed() -> None:
    session, _, _ = await opened()
    unopened, _ = session_over(LoadingLink)
    waiting = [
        asyncio.ensure_future(each) for each in (session.exchange(0, a_row()), unopened.open())
    ]
    await asyncio.sleep(0)
    session.close()
    unopened.close()
    async with asyncio.timeout(1):
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in results] == [asyncio.CancelledError] * 2
