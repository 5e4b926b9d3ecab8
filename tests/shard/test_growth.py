"""Caches grow with their sessions: as far as there is room, and at nobody's expense who works."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from mesh.accounts.ledger import Resource, of_peer
from mesh.clock import SystemClock
from mesh.errors import CacheFull, ContextTooLong, MeshError, SessionGone
from mesh.shard.admission import SessionTable
from mesh.shard.sessions import GROWTH, ChatSession
from mesh.shard.settings import ShardSettings
from mesh.shard.steering import SessionEdits
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange, WireDtype
from mesh.wire.messages import Open
from tests.shard.asker import Attic, close_to
from tests.shard.spans import rows, step


async def test_a_session_outgrows_what_it_was_opened_with(span: TorchRuntime) -> None:
    cache = span.new_cache(1000)
    async with Attic() as attic:
        asker = attic.asker()
        await asker.open(max_tokens=10)
        position = 0
        for number, count in enumerate((10, 1, 300, 1, 40)):
            hidden = rows(count, seed=number)
            found = await asker.step(number, position, hidden)
            assert close_to(found, step(span, cache, position, hidden))
            position += count
            now = attic.server.load_now()
            assert position <= now.kv_tokens_used <= max(10, position + GROWTH)
            held = now.kv_mb * 2**20 / (now.kv_tokens_used * 2 * 4 * 32 * 4)
            assert held <= 1, "the buffers take no more than is accounted for"
        asker.close()
        await asker.open(2)
        assert attic.server.load_now().kv_tokens_used == 128


async def test_a_step_without_room_is_refused_and_the_session_goes_on_when_there_is() -> None:
    async with Attic(kv_tokens=300) as attic:
        asker = attic.asker()
        await asker.open(1, max_tokens=100)
        await asker.open(2, max_tokens=200)
        await asker.step(0, 0, rows(100), 1)
        with pytest.raises(CacheFull):
            await asker.step(1, 100, rows(1), 1)
        await asker.step(0, 0, rows(3), 2)  # which nobody asked to go
        asker.close(2)
        await asker.step(1, 100, rows(1), 1)
        with pytest.raises(ContextTooLong):
            await asker.step(2, 101, rows(200), 1)
        await asker.step(2, 101, rows(199), 1)


async def test_what_is_parked_goes_before_a_session_at_work_stands_still() -> None:
    async with Attic(kv_tokens=300) as attic:
        asker = attic.asker()
        for session in (1, 2, 3):
            await asker.open(session, max_tokens=100)
            await asker.step(0, 0, rows(100), session)
        asker.park(1)
        asker.park(2)
        await asker.step(1, 100, rows(1), 3)
        with pytest.raises(SessionGone):
            await asker.resume(1, 100)
        await asker.resume(2, 100)


async def test_a_newcomer_leaves_a_growing_answer_the_room_it_needs_next() -> None:
    async with Attic(kv_tokens=2000) as attic:
        asker = attic.asker()
        await asker.open(1, max_tokens=100)
        await asker.step(0, 0, rows(101), 1)
        taken = attic.server.load_now().kv_tokens_used
        assert taken == 100 + GROWTH
        left = 2000 - taken
        with pytest.raises(CacheFull, match="answers at work"):
            await asker.open(2, max_tokens=left)
        await asker.open(2, max_tokens=left - GROWTH)
        await asker.step(1, 101, rows(GROWTH), 1)
        assert attic.server.load_now().kv_tokens_used == 2000


BUDGET = 4000
OWNERS = [of_peer(name * 64) for name in "abc"]


class Sharing(RuleBasedStateMachine):
    """Whoever comes, grows, rests and goes: the books balance, and who works stays."""

    sessions: Bundle[ChatSession] = Bundle("sessions")

    @initialize(streams=st.integers(1, 6))
    def begin(self, streams: int) -> None:
        self.streams = streams
        self.table = SessionTable(ShardSettings(streams, BUDGET, silent_s=1e9), SystemClock())
        self.here: set[ChatSession] = set()
        self.numbers = 0

    @rule(target=sessions, owner=st.sampled_from(OWNERS), positions=st.integers(1, BUDGET + 9))
    def open(self, owner, positions):  # type: ignore[no-untyped-def] # hypothesis wraps it
        self.numbers += 1
        request = Open(
            self.numbers, "toy", "", 0, 4, positions, WireDtype.FP32
        )  # fmt: skip
        session = ChatSession(cast("Any", None), request, owner, SessionEdits(LayerRange(0, 4), ()))
        self._attempt(session, lambda: self.table.admit(session, 0.0))
        return session

    @rule(session=sessions, more=st.integers(1, 700))
    def grow(self, session, more):  # type: ignore[no-untyped-def]
        if session in self.here and not session.parked:
            wanted = session.max_tokens + more
            working = {each for each in self.here if not each.parked}
            self._attempt(session, lambda: self.table.grow(session, wanted, 0.0))
            assert working <= self.here, "a session at work went for another's growth"

    @rule(session=sessions)
    def park(self, session):  # type: ignore[no-untyped-def]
        if session in self.here and not session.parked:
            self.table.park(session, 0.0)

    @rule(session=sessions, positions=st.integers(1, BUDGET))
    def resume(self, session, positions):  # type: ignore[no-untyped-def]
        if session in self.here and session.parked:
            self._attempt(session, lambda: self.table.resume(session, positions, 0.0))

    @rule(session=sessions)
    def close(self, session):  # type: ignore[no-untyped-def]
        if session in self.here:
            self.table.remove(session)
            self.here.discard(session)

    def _attempt(self, session, what):  # type: ignore[no-untyped-def]
        before = (session.max_tokens, self.table.kv_tokens_used, set(self.here))
        was_here = session in self.here
        try:
            ended = what()
        except MeshError:
            assert before == (session.max_tokens, self.table.kv_tokens_used, self.here)
            return
        for each, _ in ended:
            assert each is not session
            self.here.discard(each)
        if not was_here:
            self.here.add(session)

    @invariant()
    def nothing_is_counted_twice_or_not_at_all(self) -> None:
        if not hasattr(self, "table"):
            return
        assert set(self.table) == self.here
        accounts, held, streams = self.table.accounts, Counter[object](), Counter[object]()
        for session in self.here:
            held[session.owner] += session.max_tokens
            streams[session.owner] += not session.parked
        assert self.table.kv_tokens_used == sum(held.values()) <= BUDGET
        assert self.table.active == sum(streams.values()) <= self.streams
        for owner in OWNERS:
            assert accounts.held(owner, Resource.CACHE_POSITIONS) == held[owner]
            assert accounts.held(owner, Resource.STREAMS) == streams[owner]


Sharing.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestSharing = Sharing.TestCase
